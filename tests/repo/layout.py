"""Where the code folders stand in the checkout and in the wheel."""

from __future__ import annotations

import pathlib
import shutil

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The same mapping as PACKAGE_DIR in setup.py, which can't be imported without building.
PACKAGE_DIR = {
    "sparsejax": "sparsejax",
    "sparsejax.models": "models",
    "sparsejax.serving": "serving",
    "sparsejax.pallas_kernels": "pallas_kernels",
}


def copy_as_installed(target: pathlib.Path) -> pathlib.Path:
    """Copies the code folders into `target` the way the wheel installs them. Returns `target`."""
    for package, folder in PACKAGE_DIR.items():
        shutil.copytree(
            ROOT / folder, target.joinpath(*package.split(".")), ignore=shutil.ignore_patterns("__pycache__")
        )
    return target


def source_files() -> list[pathlib.Path]:
    """Every Python file of the four code folders."""
    return sorted(path for folder in PACKAGE_DIR.values() for path in (ROOT / folder).rglob("*.py"))
