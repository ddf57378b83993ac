"""Logit thresholds on TPUs against a NumPy sort, in interpret mode."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, tpu_support
from sparsejax.pallas_kernels.logit_threshold import mosaic_tpu
from tests.contracts.kernels_gpu.thresholds import KINDS, check, make
from tests.contracts.kernels_tpu.cases import interpret, slow

threshold = functools.partial(api.logit_threshold, implementation="mosaic_tpu")


def found(logits: np.ndarray, columns: dict[str, np.ndarray]) -> np.ndarray:
    return interpret(threshold, logits, *columns.values())


@pytest.mark.parametrize(("vocab", "seeds"), [(1, 1), (300, 4), slow(5000, 6), slow(151_936, 1)])
def test_matches_a_sort(vocab, seeds):
    made = [make(len(KINDS), vocab, seed) for seed in range(seeds)]
    logits = np.concatenate([logits for logits, _ in made])
    columns = {name: np.concatenate([columns[name] for _, columns in made]) for name in made[0][1]}
    result = found(logits, columns)
    assert result.dtype == np.float32
    check(result, logits, columns)


def parameters(rows: int, **given: float) -> dict[str, np.ndarray]:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    return {name: np.full(rows, value, np.int32 if name == "top_k" else np.float32) for name, value in values.items()}


def test_a_row_has_the_same_result_in_any_batch_and_with_any_blocks(monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "BLOCK", 256)
    logits = np.random.default_rng(0).standard_normal((11, 700)).astype(np.float32)
    columns = parameters(11, top_p=0.37, top_k=300)
    together = found(logits, columns)
    monkeypatch.setattr(mosaic_tpu, "BLOCK", 1024)
    alone = found(logits[9:10, ::-1], {name: column[:1] for name, column in columns.items()})
    assert together[9] == alone[0]


def test_rows_that_ask_for_nothing():
    logits = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    columns = parameters(4) | {"temperature": np.array([0.0, 1.0, 1.0, 0.5], np.float32)}
    columns["top_k"] = np.array([3, 0, 50, 3], np.int32)
    result = found(logits, columns)
    assert np.isneginf(result[:3]).all()
    assert result[3] == np.sort(logits[3])[-3]


def test_mass_of_equal_tokens_is_counted_exactly():
    logits = np.zeros((1, 4096), np.float32)
    logits[0, 1] = 1e-5  # the best one, so that top-p cuts none or all of the others
    for top_p, least in ((1 / 4097, 1e-5), (0.5, 0.0)):
        assert found(logits, parameters(1, top_p=top_p))[0] == np.float32(least)


def test_what_is_not_served_has_a_reason():
    def problem(vocab, dtype="float32"):
        with tpu_support.interpreting():
            return mosaic_tpu.unsupported(jax.ShapeDtypeStruct((2, vocab), dtype))

    assert problem(262_208) is None
    assert problem(9, "bfloat16") == "logits are bfloat16, not float32"
    assert "the vocabulary has 524288 tokens, more than" in str(problem(2**19))
