"""Page scores on TPUs against the oracle, in interpret mode."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from sparsejax.pallas_kernels import api, reference, specs, tpu_support
from sparsejax.pallas_kernels.page_scores import mosaic_tpu
from tests.contracts.kernels_tpu.cases import by_name, interpret, slow
from tests.contracts.test_kernels import bounds_of, last_columns

SHAPES = [
    specs.ScoreShape("page-16", (1, 16, 17, 150, 1100), 8, 2, 128),
    slow(specs.ScoreShape("page-64-layer-bfloat16", (63, 65, 500), 8, 4, 256, 64, "layer", "bfloat16")),
    slow(specs.ScoreShape("sixteen-heads-no-groups", (300, 20), 16, 1, 128)),
]


@by_name(argvalues=SHAPES)
@pytest.mark.parametrize("block", [128, 1024])
def test_every_shape(shape, block, monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "BLOCK_BOUNDS", block)
    low, high, rows, q = bounds_of(shape)
    wanted = interpret(functools.partial(reference.page_scores, view=rows.view), q, low, high)
    score = functools.partial(
        api.page_scores, view=rows.view, page_size=shape.page_size, implementation="page_scores=mosaic_tpu"
    )
    found = interpret(score, q, low, high)
    assert found.dtype == np.float32
    assert found.shape == wanted.shape
    real = last_columns(shape)
    # Sums over head_dim without a softmax: the error grows with their size.
    close = {"rtol": 2e-2, "atol": 0.3} if shape.dtype == "bfloat16" else {"rtol": 2e-5, "atol": 2e-4}
    np.testing.assert_allclose(np.moveaxis(found, 1, 2)[real], np.moveaxis(wanted, 1, 2)[real], **close)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (specs.ScoreShape("dim", (20,), 8, 1, 64), "bounds of 64 do not fill the 128 lanes"),
        (specs.ScoreShape("heads", (20,), 3, 1, 128), "bounds are read for 8 adjacent heads at once"),
        (specs.ScoreShape("tables", (20,), 8, 1, 128, granularity="head"), "bounds are read for 8 adjacent heads"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_is_not_served_has_a_reason(shape, reason):
    low, high, rows, q = bounds_of(shape)
    with tpu_support.interpreting():
        assert reason in str(mosaic_tpu.unsupported(q, low, high, rows.view))
