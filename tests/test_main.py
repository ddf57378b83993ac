"""The `sparsejax` command finds its sub-commands."""

from __future__ import annotations

import importlib
import tomllib

import pytest

from sparsejax import __main__, __version__
from tests.repo.layout import ROOT


def test_the_entry_point_is_this_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"sparsejax": "sparsejax.__main__:main"}


@pytest.mark.parametrize("module", [module for module, _ in __main__.COMMANDS.values()])
def test_every_command_has_a_main(module: str) -> None:
    assert callable(importlib.import_module(module).main)


def test_arguments_reach_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["collect-env", "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sparsejax {__version__}\n"
    for arguments in ([], ["--help"], ["-h"]):
        assert __main__.main(arguments) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in __main__.COMMANDS)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["serv"]) == 2
    error = capsys.readouterr().err
    assert "'serv'" in error
    assert all(name in error for name in __main__.COMMANDS)
