"""The example that a reader runs first."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / "step_functions.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_with_random_weights():
    assert "64 rows stay; 30 pages come back, 5 are in use" in run("--random")


def test_with_the_default_model(default_model):
    assert "The capital of Spain is Madrid" in run()
