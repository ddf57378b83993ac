"""The settings of tests/conftest.py are in force: what they forbid fails."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

from tests.repo.layout import ROOT


def test_two_devices_on_the_cpu() -> None:
    assert [device.platform for device in jax.devices()] == ["cpu", "cpu"]


def test_dtypes_are_not_promoted() -> None:
    with pytest.raises(ValueError, match="promotion"):
        jnp.ones(2, jnp.int32) + jnp.ones(2, jnp.float32)


def test_ranks_are_not_promoted() -> None:
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 2)) + jnp.ones(2)


def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning):
        warnings.warn("anything", stacklevel=1)


def test_child_processes_inherit_the_settings() -> None:
    code = "import jax; print(jax.device_count(), jax.config.jax_numpy_rank_promotion)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2", "raise"]


@pytest.mark.gpu
def test_gpu_tests_see_a_gpu() -> None:
    assert jax.default_backend() == "gpu"


@pytest.mark.tpu
def test_tpu_tests_see_a_tpu() -> None:
    assert jax.default_backend() == "tpu"
