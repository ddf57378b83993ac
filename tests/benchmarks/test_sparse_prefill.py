"""The threshold that a benchmark of sparse prefill chooses, and what it counts."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from benchmarks import sparse_prefill
from benchmarks.sparse_prefill import BINS, Counts, Operation, Shape
from benchmarks.step_timing import MODELS
from sparsejax.methods.flashprefill_v2 import Rules

RULES = Rules(16, 64, 0.0, 1, 1, 1, 0, True)


def found(**bins: int) -> dict:
    counts = np.zeros(BINS, np.int64)
    for name, number in bins.items():
        counts[int(name[1:])] = number
    return {"causal": 100, "always": 10, "bins": counts}


@pytest.mark.parametrize(
    ("density", "wanted"),
    [(0.5, 1 / BINS), (0.14, 1 / BINS), (0.13, 101 / BINS), (0.12, 101 / BINS), (0.1, 1.0), (0.05, 1.0)],
)
def test_the_least_threshold_that_is_sparse_enough(density, wanted):
    counts = found(b0=86, b100=2, b8000=1, b8191=1)
    assert sparse_prefill.threshold_for(density, counts) == pytest.approx(wanted)


def test_what_the_threshold_promises_is_read():
    made, counts = Operation(Shape(64, 448), MODELS["tiny"], "float32"), Counts()
    energies = made.count(functools.partial(sparse_prefill.note_energies, counts, RULES), counts)
    threshold = sparse_prefill.threshold_for(0.5, energies)
    rules = RULES._replace(threshold=threshold)
    read = made.count(functools.partial(sparse_prefill.note_plan, counts, rules), counts)
    assert 0 < threshold < 1
    assert read["causal"] == energies["causal"]
    above = energies["bins"][round(threshold * BINS) :].sum()
    assert read["read"] == energies["always"] + above <= read["causal"] / 2
    assert counts.take() == {}
