"""The bug report: complete, and free of secrets and user names."""

from __future__ import annotations

import json
import pathlib

import pytest

import sparsejax
from sparsejax import collect_env


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOME", "/somewhere/alice")
    assert str(pathlib.Path.home()) == "/somewhere/alice"
    return "/somewhere/alice"


def test_report_names_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_env.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["versions", "system", "devices", "environment"]
    assert report["versions"]["sparsejax"].startswith(sparsejax.__version__)
    assert {"jax", "jaxlib", "numpy"} <= set(report["versions"])
    assert report["devices"]["backend"] == "cpu"
    assert report["devices"]["count"] == "2"
    assert report["environment"]["JAX_NUMPY_RANK_PROMOTION"] == "raise"
    assert report["system"]["python"]


def test_text_has_one_line_per_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_env.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"versions", "system", "devices", "environment"} <= set(lines)
    assert any(line.split()[:1] == ["jaxlib"] for line in lines)


def test_credentials_are_not_printed(home: str) -> None:
    secrets = ["SPARSEJAX_API_KEY", "HF_TOKEN", "SPARSEJAX_ADMIN_KEY", "JAX_AUTH", "HF_PASSWORD", "CUDA_SECRET_THING"]
    shown = collect_env.settings(dict.fromkeys(secrets, "hunter2") | {"AWS_REGION": "x", "PATH": "y"})
    assert shown == dict.fromkeys(sorted(secrets), "set")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/somewhere/alice/.cache/jax", "~/.cache/jax"),
        ("--xla_dump_to=/somewhere/alice --other", "--xla_dump_to=~ --other"),
        ("/home/bob/models:/Users/carol/models", "~/models:~/models"),
        ("/somewhere/alicette/x", "/somewhere/alicette/x"),
        ("/data/models", "/data/models"),
    ],
)
def test_home_directories_lose_their_owner(home: str, value: str, shown: str) -> None:
    assert collect_env.settings({"XLA_FLAGS": value}) == {"XLA_FLAGS": shown}


def test_a_backend_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    import jax

    def fail() -> list[jax.Device]:
        raise RuntimeError(f"no driver in {home}/cuda")

    monkeypatch.setattr(jax, "devices", fail)
    assert collect_env.devices() == {"error": "no driver in ~/cuda"}
    assert "no driver" in collect_env.render({"devices": collect_env.devices(), "environment": {}})
