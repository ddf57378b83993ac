"""Logit thresholds and the sampling program on a GPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sparsejax import sampling
from sparsejax.pallas_kernels import api
from tests.contracts.kernels_gpu.thresholds import KINDS, check, make

pytestmark = pytest.mark.gpu

threshold = jax.jit(api.logit_threshold, static_argnames="implementation")


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("vocab", [7, 5000, 128_256, 151_936, 262_208])
def test_matches_a_sort(implementation, vocab):
    for seed in range(3 if implementation == "triton" else 1):
        logits, columns = make(2 * len(KINDS), vocab, seed)
        check(np.asarray(threshold(logits, **columns, implementation=implementation)), logits, columns)


def test_every_kind_with_top_p_alone_and_with_both():
    """Flat rows leave the search many candidates: all of a bin, or of the vocabulary."""
    for top_k in (0, 20, 40_000):
        logits, columns = make(len(KINDS), 151_936, 0)
        ones = np.ones(len(KINDS), np.float32)
        columns |= {"temperature": ones, "top_p": 0.9 * ones, "min_p": 0 * ones, "top_k": np.full(len(ones), top_k)}
        columns["top_k"] = columns["top_k"].astype(np.int32)
        check(np.asarray(threshold(logits, **columns, implementation="triton")), logits, columns)


def test_a_row_has_the_same_threshold_alone_and_in_company():
    logits, columns = make(64, 151_936, 3)
    together = np.asarray(threshold(logits, **columns, implementation="triton"))
    for _ in range(3):
        np.testing.assert_array_equal(threshold(logits, **columns, implementation="triton"), together)
    for row in range(0, 64, 5):
        own = {name: column[row : row + 1] for name, column in columns.items()}
        alone = threshold(logits[row : row + 1], **own, implementation="triton")
        np.testing.assert_array_equal(alone, together[row : row + 1])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_ends_and_leaves_the_others_alone(poison):
    logits, columns = make(8, 5000, 4)
    columns |= {"temperature": np.full(8, 0.7, np.float32), "top_k": np.tile([0, 50], 4).astype(np.int32)}
    columns["top_p"] = np.full(8, 0.9, np.float32)
    wanted = np.asarray(threshold(logits, **columns, implementation="triton"))
    for row, part in ((2, slice(3, 4)), (2, slice(None)), (3, slice(3, 4)), (3, slice(None))):
        poisoned = logits.copy()
        poisoned[row, part] = poison
        found = np.asarray(threshold(poisoned, **columns, implementation="triton"))
        np.testing.assert_array_equal(np.delete(found, row), np.delete(wanted, row))


def test_both_implementations_draw_the_same_tokens():
    logits = (np.random.default_rng(0).standard_normal((8, 151_936)) * 3).astype(np.float32)
    ints, floats = sampling.greedy_inputs(8)
    knobs = {"temperature": [0.7] * 7 + [0.0], "top_p": [0.95, 0.8, 1.0, 1.0] * 2, "min_p": [0.0, 0.0, 0.05, 0.0] * 2}
    for name, values in knobs.items():
        floats[:, sampling.FLOAT_COLUMNS.index(name)] = values
    for name, values in {"top_k": [20, 0, 0, 0] * 2, "seed_low": range(8), "position": range(8)}.items():
        ints[:, sampling.INT_COLUMNS.index(name)] = values

    def draw(implementation):
        def run(logits, ints, floats):
            inputs = sampling.SamplingInputs.unpack(ints, floats)
            return sampling.sample(logits, inputs, tuple, sampling.SAMPLE, implementation)  # no bias in this mode

        return np.asarray(jax.jit(run)(logits, ints, floats))

    found = draw("triton")
    np.testing.assert_array_equal(found, draw("xla"))
    assert found[7] == logits[7].argmax()
