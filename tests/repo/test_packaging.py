"""What stands in the checkout must arrive in the wheel."""

from __future__ import annotations

import ast
import fnmatch
import tomllib

import pytest
import setuptools

import sparsejax
from tests.repo.layout import PACKAGE_DIR, ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_setup_maps_the_same_folders() -> None:
    assignments = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
    }
    assert assignments["PACKAGE_DIR"] == PACKAGE_DIR


@pytest.mark.parametrize("folder", PACKAGE_DIR.values())
def test_every_folder_with_code_is_a_package(folder: str) -> None:
    """A folder without __init__.py imports fine from a checkout and is missing from the wheel."""
    packaged = {
        folder,
        *(f"{folder}/{name.replace('.', '/')}" for name in setuptools.find_packages(str(ROOT / folder))),
    }
    with_code = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
    assert with_code - packaged == set()


@pytest.mark.parametrize(("package", "folder"), PACKAGE_DIR.items())
def test_every_data_file_is_declared(package: str, folder: str) -> None:
    declared = PYPROJECT["tool"]["setuptools"]["package-data"]
    patterns = declared["*"] + declared.get(package, [])
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}]
    unmatched = [
        path.relative_to(ROOT).as_posix()
        for path in files
        if not any(fnmatch.fnmatch(path.relative_to(ROOT / folder).as_posix(), pattern) for pattern in patterns)
    ]
    assert unmatched == []


def test_version_is_in_the_changelog() -> None:
    assert f"## [{sparsejax.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_license_is_apache() -> None:
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
