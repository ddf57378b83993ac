"""Importing: cheap, and the same from a checkout, from an installed copy and from a user's own folder."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.repo.layout import PACKAGE_DIR, ROOT, copy_as_installed

# Loaded where they are used, never by `import sparsejax`: its cost is that of `import jax`.
HEAVY = {
    "flax", "gguf", "huggingface_hub", "jinja2", "msgspec", "optax", "orbax", "pallas_kernels", "prometheus_client",
    "safetensors", "scipy", "starlette", "tensorstore", "tokenizers", "torch", "tqdm", "transformers", "uvicorn",
}  # fmt: skip

# Modules that only an extra makes importable.
OPTIONAL = {"jax_triton", "triton"}

IMPORT_ALL = """
import importlib, json, sys
failed = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = error.name
print(json.dumps({"failed": failed, "file": importlib.import_module("sparsejax").__file__,
                  "bare": [n for n in ("models", "serving", "pallas_kernels") if n in sys.modules]}))
"""


def run_python(code: str, *args: str, cwd: pathlib.Path, path: pathlib.Path | None = None) -> str:
    """Runs `code` with `cwd` first on the import path, as `python -c` and `python -m` have it, then `path`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    result = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def user_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A project with folders of the same names as ours, which must never be imported by mistake."""
    folder = tmp_path / "project"
    for name in ("models", "serving", "pallas_kernels", "tests"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('the user\\'s {name} was imported')\n")
    return folder


def all_modules() -> list[str]:
    """Import name of every module in the four code folders."""
    names = []
    for package, folder in PACKAGE_DIR.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return sorted(set(names))


def test_import_loads_nothing_heavy(user_folder: pathlib.Path) -> None:
    code = "import sparsejax, sys, json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    loaded = set(json.loads(run_python(code, cwd=user_folder, path=ROOT)))
    assert "sparsejax" in loaded
    assert loaded & HEAVY == set()


@pytest.mark.parametrize("layout", ["checkout", "installed"])
def test_every_module_imports_beside_the_users_own_folders(
    layout: str, user_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    site = ROOT if layout == "checkout" else copy_as_installed(tmp_path / "site")
    answer = json.loads(run_python(IMPORT_ALL, json.dumps(all_modules()), cwd=user_folder, path=site))
    assert pathlib.Path(answer["file"]).is_relative_to(site)
    assert answer["bare"] == []
    assert {name: missing for name, missing in answer["failed"].items() if missing not in OPTIONAL} == {}


def test_imports_from_the_root_of_a_checkout() -> None:
    names = [*PACKAGE_DIR, "sparsejax.models.spec"]
    answer = json.loads(run_python(IMPORT_ALL, json.dumps(names), cwd=ROOT))
    assert pathlib.Path(answer["file"]).is_relative_to(ROOT)
    assert answer["failed"] == {}


def test_public_names_exist() -> None:
    import sparsejax

    assert {name for name in sparsejax.__all__ if not hasattr(sparsejax, name)} == set()
