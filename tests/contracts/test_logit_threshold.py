"""Logit thresholds: the portable implementation and the oracle against a NumPy sort, and what the kernel serves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, reference
from sparsejax.pallas_kernels.logit_threshold import triton_gpu
from tests.contracts.kernels_gpu.thresholds import KINDS, check, make


@functools.cache
def program(function):
    return jax.jit(function)


@pytest.mark.parametrize("function", [api.logit_threshold, reference.logit_threshold], ids=["api", "oracle"])
@pytest.mark.parametrize("vocab", [1, 7, 300, 5000])
def test_matches_a_sort(function, vocab):
    for seed in range(12):
        logits, columns = make(len(KINDS), vocab, seed)
        found = program(function)(logits, **columns)
        assert found.dtype == jnp.float32
        check(np.asarray(found), logits, columns)


def test_rows_that_ask_for_nothing():
    logits = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    temperature = np.array([0.0, 1.0, 1.0, 0.5], np.float32)
    top_k = np.array([3, 0, 50, 3], np.int32)
    found = api.logit_threshold(logits, temperature, top_k, np.ones(4, np.float32), np.zeros(4, np.float32))
    assert np.isneginf(found[:3]).all()
    assert float(found[3]) == np.sort(logits[3])[-3]


def test_zeros_of_either_sign_are_equal():
    logits = np.array([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]], np.float32)
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    found = api.logit_threshold(logits, ones, np.ones(2, np.int32), ones, zeros)
    assert (logits >= found[:, None]).tolist() == [[True, True, False]] * 2


def test_what_the_kernel_does_not_take():
    def logits(vocab, dtype="float32"):
        return jax.ShapeDtypeStruct((2, vocab), jnp.dtype(dtype))

    assert triton_gpu.unsupported_shape(logits(262_208)) is None
    assert triton_gpu.unsupported_shape(logits(9, "bfloat16")) == "logits are bfloat16, not float32"
    assert triton_gpu.unsupported_shape(logits(2**20)) == "the vocabulary has 1048576 tokens, more than 1048575"


@pytest.mark.parametrize("vocab", [1, 4095, 4096, 4097, 151_936, 262_208])
def test_splits_cover_the_vocabulary(vocab):
    sizes = triton_gpu.constants(vocab, triton_gpu.Config())["bins"]
    assert 0 <= sizes["SPLITS"] * sizes["BLOCK"] - vocab < sizes["BLOCK"]
    assert 1 <= sizes["FULL_SPLITS"] <= sizes["SPLITS"] <= sizes["SPLITS_PAD"]
    assert sizes["FULL_SPLITS"] * sizes["BLOCK"] <= vocab or sizes["SPLITS"] == 1
