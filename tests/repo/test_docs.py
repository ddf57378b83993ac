"""What README.md and docs/ say must be true of the code beside them."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import pathlib
import re
import subprocess
import sys

import pytest

from tests.repo.layout import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SERVE_COMMANDS = ("python -m sparsejax.serve", "sparsejax serve")


def blocks(page: pathlib.Path, *languages: str) -> list[str]:
    """The fenced code blocks of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [code for language, code in found if language in languages]


def commands(page: pathlib.Path) -> list[str]:
    """Every shell command of a page, continuation lines joined, comments removed; inline code included."""
    text = "\n".join(blocks(page, "bash", "sh"))
    lines = re.sub(r"\\\n", " ", text).splitlines()
    inline = re.findall(r"`((?:python -m |sparsejax |pip |bash )[^`\n]+)`", page.read_text("utf-8"))
    return [line.split("  #")[0].strip() for line in [*lines, *inline] if line.strip() and not line.startswith("#")]


@functools.cache
def serve_flags() -> frozenset[str]:
    """What `python -m sparsejax.serve --help` lists."""
    from sparsejax import serve

    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        serve.main(["--help"])
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", text.getvalue()))


def ids(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_modules_that_commands_run_exist(page: pathlib.Path) -> None:
    modules = {
        match for line in commands(page) for match in re.findall(r"python -m ((?:sparsejax|benchmarks)[\w.]*)", line)
    }
    missing = {
        name
        for name in modules
        if not (path := ROOT.joinpath(*name.split("."))).with_suffix(".py").is_file() and not path.is_dir()
    }
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_that_commands_run_exist(page: pathlib.Path) -> None:
    files = {match for line in commands(page) for match in re.findall(r"(?:python|bash) ([\w./-]+/[\w.-]+)", line)}
    assert {name for name in files if not (ROOT / name).is_file()} == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_flags_in_commands_exist(page: pathlib.Path) -> None:
    """Every flag of a serve command, and every flag mentioned alone, is one that --help knows."""
    known = serve_flags()
    text = re.sub(r"<!-- generated: layout -->.*?<!-- end -->", "", page.read_text("utf-8"), flags=re.DOTALL)
    mentioned = set()
    for line in commands(page):
        if any(command in line for command in SERVE_COMMANDS):
            mentioned.update(re.findall(r"(?<!\S)(--[a-z][a-z-]*)", line))
    if page.name != "CONTRIBUTING.md":  # there, flags belong to other programs
        mentioned.update(re.findall(r"`(--[a-z][a-z-]*)", text))
    assert mentioned - known == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_point_at_files(page: pathlib.Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8"))
    local = {link for link in links if "://" not in link}
    assert {link for link in local if not (page.parent / link).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_python_examples_use_names_that_exist(page: pathlib.Path) -> None:
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sparsejax":
                module = importlib.import_module(node.module or "")
                assert {alias.name for alias in node.names if not hasattr(module, alias.name)} == set()


def test_start_and_tests_are_two_commands_each() -> None:
    bash = [block.splitlines() for block in blocks(ROOT / "README.md", "bash")]
    assert ["pip install -e .", "python -m sparsejax.serve"] in bash
    assert ["pip install -e '.[dev]'", "python -m pytest -n 2 --dist worksteal"] in bash


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    (test_commands,) = [block for block in blocks(ROOT / "README.md", "bash") if "pytest" in block]
    position = 0
    for command in test_commands.splitlines():
        position = script.index(f"activated {command}", position)


def test_generated_blocks_are_current() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{result.stdout}{result.stderr}run python docs/generate.py"


def test_every_endpoint_is_documented() -> None:
    from sparsejax.serving.app import create_app
    from sparsejax.serving.state import ServerState

    routes = {
        (method, re.sub(r":\w+\}", "}", route.path))  # pyright: ignore[reportAttributeAccessIssue]
        for route in create_app(ServerState()).routes
        for method in route.methods - {"HEAD"}  # pyright: ignore[reportAttributeAccessIssue]
    }
    section = (ROOT / "docs" / "api.md").read_text().split("## Endpoints")[1].split("\n## ")[0]
    assert set(re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", section)) == routes


def test_every_request_field_is_documented() -> None:
    from sparsejax.serving import protocol

    text = (ROOT / "docs" / "api.md").read_text()
    bodies = (protocol.ChatBody, protocol.CompletionBody, protocol.TokenizeBody, protocol.DetokenizeBody)
    fields = {field for body in bodies for field in body.__struct_fields__}
    assert {field for field in fields if f"`{field}`" not in text} == set()
