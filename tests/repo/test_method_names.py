"""Sparse methods and storages are known by discovery: no other code may name one."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

from tests.repo.layout import ROOT, source_files

MEMBER_FOLDERS = (ROOT / "sparsejax" / "methods", ROOT / "sparsejax" / "storages")
# File names that are also ordinary words of the field: only string literals equal to them count.
WORDS = {"dense", "plain"}
# Policies of pruning: words of the API that have names of methods in them, and who may say them.
POLICY_WORDS = re.compile(r"(snapkv|kvzip)_global")
POLICY_FILES = {"sparsejax/prune_records.py", "serving/prune.py", "serving/client.py"}
# Where such a literal is right.
ALLOWED = {
    ("sparsejax/config.py", "dense"),  # the default in --help
    ("sparsejax/llm.py", "dense"),  # the default in the signature
    ("sparsejax/registry.py", "dense"),  # the defaults by name
    ("sparsejax/registry.py", "plain"),
    ("pallas_kernels/payload.py", "plain"),  # a layout of rows in memory
    ("sparsejax/mock.py", "dense"),  # the stand-in for the default
    ("sparsejax/method.py", "dense"),  # the role of layers that select nothing
    ("sparsejax/combine.py", "dense"),
}


def member_names() -> set[str]:
    """Every method and storage, by file name."""
    return {path.stem for folder in MEMBER_FOLDERS for path in folder.glob("[!_]*.py")}


def mentions(text: str, names: set[str]) -> list[tuple[int, str]]:
    """(line, name) of every mention in code, strings or comments, upper or lower case, also inside identifiers."""
    if not names:
        return []
    pattern = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(map(re.escape, names)))})(?![a-z0-9])", re.IGNORECASE)
    return [
        (number, match.group(1)) for number, line in enumerate(text.splitlines(), 1) for match in pattern.finditer(line)
    ]


def literals(text: str, names: set[str]) -> list[tuple[int, str]]:
    """(line, name) of every string literal that equals a name."""
    return [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]


def outside() -> list[pathlib.Path]:
    return [path for path in source_files() if not any(path.is_relative_to(folder) for folder in MEMBER_FOLDERS)]


def test_there_are_members_to_look_for() -> None:
    assert member_names() - WORDS
    assert len(outside()) > 10


@pytest.mark.parametrize("path", outside(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_member_is_named(path: pathlib.Path) -> None:
    text = path.read_text("utf-8")
    file = path.relative_to(ROOT).as_posix()
    said = POLICY_WORDS.sub("", text) if file in POLICY_FILES else text
    found = mentions(said, member_names() - WORDS)
    found += [(line, name) for line, name in literals(text, member_names() & WORDS) if (file, name) not in ALLOWED]
    assert found == []


def test_the_search_finds_what_it_should() -> None:
    text = "x = 'snapkv'\n# SnapKV's window\nsnapkv_window = 1\nrequest = questions\nmode = 'dense'\n"
    assert mentions(text, {"snapkv", "quest"}) == [(1, "snapkv"), (2, "SnapKV"), (3, "snapkv")]
    assert literals(text, WORDS) == [(5, "dense")]
