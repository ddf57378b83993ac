"""Residual norms on TPUs, in interpret mode: the sum bit for bit, the norm to its last bits."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, choice, tpu_support
from sparsejax.pallas_kernels.add_rms_norm import mosaic_tpu
from tests.contracts.kernels_tpu.cases import interpret
from tests.contracts.kernels_tpu.test_support import tracing_for_a_tpu


@pytest.mark.parametrize(("shape", "dtype"), [((3, 1, 40), "float32"), ((37, 576), "bfloat16"), ((1, 128), "bfloat16")])
def test_the_stream_is_added_to_and_normed(shape, dtype, monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "MOST_TOKENS", 16)  # so that a block is cut by the end
    rng = np.random.default_rng(3)
    x, delta = (jnp.asarray(rng.normal(0, 2, shape), dtype) for _ in range(2))
    weight = jnp.asarray(rng.normal(1, 0.3, shape[-1]), dtype)
    norm = functools.partial(api.add_rms_norm, eps=1e-5)
    total, normed = interpret(functools.partial(norm, implementation="mosaic_tpu"), x, delta, weight)
    wanted = norm(x, delta, weight, implementation="xla")
    assert total.dtype == normed.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(total, wanted[0])
    close = {"rtol": 2e-6 if dtype == "float32" else 2**-7, "atol": 1e-6}
    np.testing.assert_allclose(normed.astype(np.float32), np.asarray(wanted[1], np.float32), **close)


def test_it_is_left_to_xla_unless_the_kernel_is_asked_for_by_name(caplog, monkeypatch):
    monkeypatch.setattr(choice, "_chosen", {})
    tracing_for_a_tpu(monkeypatch)

    def logged(**options):
        x, weight = jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((64,), "float32")
        with caplog.at_level(logging.INFO, "sparsejax.kernels"):
            jax.eval_shape(functools.partial(api.add_rms_norm, eps=1e-5, **options), x, x, weight)
        record = caplog.records[-1]
        return record.levelno, record.getMessage()

    reasons = "triton: needs an NVIDIA GPU, JAX runs on tpu; mosaic_tpu: XLA fuses it with what is around it"
    assert logged() == (logging.INFO, f"add_rms_norm: xla ({reasons})")
    assert api.expected()["add_rms_norm"] == "xla"
    assert logged(implementation="add_rms_norm=mosaic_tpu") == (logging.INFO, "add_rms_norm: mosaic_tpu")


@pytest.mark.parametrize(
    ("size", "dtype", "weight_dtype", "reason"),
    [
        (64, "bfloat16", "bfloat16", None),
        (64, "bfloat16", "float32", "dtypes differ"),
        (64, "float16", "float16", "rows are float16"),
        (16385, "float32", "float32", "rows have 16385 elements"),
    ],
)
def test_what_is_served(size, dtype, weight_dtype, reason):
    x, weight = jax.ShapeDtypeStruct((2, size), dtype), jax.ShapeDtypeStruct((size,), weight_dtype)
    with tpu_support.interpreting():
        problem = mosaic_tpu.unsupported(x, x, weight)
    assert problem is None if reason is None else reason in str(problem)
