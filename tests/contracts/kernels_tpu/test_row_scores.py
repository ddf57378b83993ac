"""Scores of resident rows on TPUs against the oracle, in interpret mode."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, reference, specs, tpu_support
from sparsejax.pallas_kernels.row_scores import mosaic_tpu
from tests.contracts.kernels_tpu.cases import ATTENTION, CODES, by_name, interpret, stored
from tests.contracts.test_kernels import tolerance
from tests.contracts.test_row_scores import WAYS, close, limits, options_of


def compute(module, shape, limit, first: int = 0, **options):
    """(lse, scores by way) as numpy."""
    rows, q = stored(shape, **options)
    how = tuple(rows.how.values())

    def both(q, pools, table, limit):
        arrays = (q, pools, rows.names, rows.view._replace(table=table), limit)
        if module is reference:
            lse = reference.attention_lse(*arrays, first, *how)
            every = [options_of(way, lse) for way in WAYS]
            return lse, [
                reference.row_scores(*arrays, some["lse"], some["group"], *how, over=some["over"]) for some in every
            ]
        keywords = {**rows.how, "implementation": "mosaic_tpu"}
        lse = api.attention_lse(*arrays, first=first, **keywords)
        return lse, [api.row_scores(*arrays, **options_of(way, lse), **keywords) for way in WAYS]

    return interpret(both, q, rows.pools, rows.view.table, jnp.asarray(limit))


def check(shape, limit, first: int = 0):
    near = tolerance(shape.dtype) if shape.scaled_codes else close(shape.dtype)
    wanted_lse, wanted = compute(reference, shape, limit, first)
    lse, scores = compute(api, shape, limit, first)
    np.testing.assert_allclose(lse, wanted_lse, **near)
    for way, found, expected in zip(WAYS, scores, wanted, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, err_msg=str(way), **near)


@by_name(argvalues=ATTENTION)
def test_every_shape(shape):
    check(shape, limits(shape), first=16)


def test_limits_of_heads_and_short_blocks(monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "LONGEST_BLOCK", 128)
    shape = specs.AttentionShape("long", (300, 20), 2, 3, 128, chunks=(9, 1))
    limit = limits(shape, per_head=True)
    limit[:, 1] //= 2
    limit[1, 0] = 0
    check(shape, limit)


@pytest.mark.slow
def test_poison_and_place_change_nothing():
    shape = CODES
    lse, scores = compute(api, shape, limits(shape), poison=0.0)
    again_lse, again = compute(api, shape, limits(shape), poison=float("inf"), seed=9)
    np.testing.assert_array_equal(again_lse, lse)
    for found, expected in zip(again, scores, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"group_size": 16, "chunks": (65,)}, "65 queries of a group of 16 are more than 1024"),
        ({"page_size": 48}, "pages of 48 rows do not fill 128 lanes of scores"),
    ],
    ids=str,
)
def test_what_is_not_served_has_a_reason(change, reason):
    fields = {"num_kv_heads": 1, "group_size": 1, "head_dim": 128, "chunks": (1,)} | change
    rows, q = stored(specs.AttentionShape("refused", (100,), **fields))
    with tpu_support.interpreting():
        assert mosaic_tpu.unsupported(q, rows.pools, rows.names, rows.view, rows.load_tile) == reason
