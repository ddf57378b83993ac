"""Who may import whom: the contracts of .importlinter, and proof that the contract type can fail."""

from __future__ import annotations

import configparser
import os
import pathlib
import subprocess
import sys

from tests.repo.layout import ROOT, copy_as_installed

HERE = pathlib.Path(__file__).resolve().parent


def lint_imports(site: pathlib.Path, config: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on the `sparsejax` that stands in `site`."""
    return subprocess.run(
        [sys.executable, "-c", "import importlinter.cli as c; c.lint_imports_command()", str(config), "--no-cache"],
        cwd=site,
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{HERE}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_import_rules_hold(tmp_path: pathlib.Path) -> None:
    result = lint_imports(copy_as_installed(tmp_path), ROOT / ".importlinter")
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_module_has_a_rule() -> None:
    """A new module must be placed: nothing is free by being forgotten."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    ruled = {name for section in contracts.values() for name in section.get("source_modules", "").split()}
    modules = {f"sparsejax.{path.stem}" for path in (ROOT / "sparsejax").glob("[!_]*")} - {"sparsejax.py"}
    assert modules - ruled == set()


def test_a_forbidden_import_and_a_missing_source_are_found(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "sparsejax"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "host.py").write_text("import json\nimport numpy\nimport sparsejax\nfrom sparsejax import device\n")
    (package / "device.py").write_text("import jax\n")
    config = tmp_path / "contracts.ini"
    config.write_text(
        "[importlinter]\nroot_package = sparsejax\ninclude_external_packages = True\n"
        "contract_types =\n    only: import_contract.OnlyImports\n"
        "[importlinter:contract:host]\nname = host\ntype = only\nsource_modules =\n    sparsejax.host\n"
        "    sparsejax.gone\nallowed_modules =\n    numpy\n    sparsejax\n"
    )
    result = lint_imports(tmp_path, config)
    assert result.returncode == 1
    assert "sparsejax.gone does not exist" in result.stdout
    assert "sparsejax.host (line 4) may not import sparsejax.device" in result.stdout
    assert "numpy" not in result.stdout
    assert "json" not in result.stdout
