"""pyproject.toml, docs/dependencies.md and the imports in the code must agree."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib

from tests.repo.layout import ROOT, source_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Import names that differ from the distribution's name.
DISTRIBUTIONS = {"yaml": "pyyaml", "orbax": "orbax-checkpoint"}
# Installed by a package that can't work without it, and used only together with it.
COMPANIONS = {"jaxlib": "jax", "huggingface-hub": "transformers", "tokenizers": "transformers", "triton": "jax-triton"}
# Imported by another dependency only when it needs them: transformers renders chat templates with jinja2.
INDIRECT = {"jinja2"}


def distribution(requirement: str) -> str:
    """'jax[cuda13]>=1' -> 'jax'."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def table(heading: str) -> list[list[str]]:
    """Cells of the table under a heading of docs/dependencies.md."""
    text = (ROOT / "docs" / "dependencies.md").read_text()
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (body,) = [part for part in section if part.startswith(heading)]
    rows = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names(cell: str) -> set[str]:
    return {distribution(name) for name in re.findall(r"`([^`]+)`", cell)}


def test_core_table_equals_pyproject() -> None:
    documented = [name for row in table("Core") for name in names(row[0])]
    declared = [distribution(requirement) for requirement in PROJECT["dependencies"]]
    assert documented == declared


def test_extras_table_equals_pyproject() -> None:
    documented = {row[0].strip("`"): names(row[1]) for row in table("Extras")}
    declared = {
        extra: {distribution(requirement) for requirement in requirements}
        for extra, requirements in PROJECT["optional-dependencies"].items()
    }
    assert documented == declared


def imported_distributions() -> set[str]:
    """Distribution names of every third-party import in the four code folders."""
    found = set()
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            else:
                continue
            found.update(module.split(".")[0] for module in modules)
    third_party = found - set(sys.stdlib_module_names) - {"sparsejax", "__future__"}
    return {DISTRIBUTIONS.get(name, name).replace("_", "-") for name in third_party}


def test_every_import_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = {
        distribution(requirement) for requirement in [*PROJECT["dependencies"], *extras["gpu"], *extras["client"]]
    } | {"uvloop", "httptools"}
    undeclared = {
        name for name in imported_distributions() if COMPANIONS.get(name, name).replace("_", "-") not in declared
    }
    assert undeclared == set()


def test_every_core_dependency_is_imported() -> None:
    declared = {distribution(requirement) for requirement in PROJECT["dependencies"]}
    assert declared - imported_distributions() - INDIRECT == set()


def test_installed_versions_satisfy_the_bounds() -> None:
    """The environment that runs the tests is one that pyproject.toml allows."""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in PROJECT["dependencies"]]
    wrong = {
        str(requirement): installed
        for requirement in requirements
        if not requirement.specifier.contains(installed := importlib.metadata.version(requirement.name))
    }
    assert wrong == {}
