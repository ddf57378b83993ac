"""Decode attention that scores rows against the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, reference
from tests.contracts.test_kernels import by_name, rows_of, tolerance
from tests.contracts.test_row_scores import SOME


def inputs(rows, q, seed: int = 0):
    """The query, and scores: NaN but where rows are resident that are not the query's own."""
    rng = np.random.default_rng(seed)
    pool = rows.pools["positions"]
    scores = np.full(pool.shape, np.nan, np.float32)
    lengths = np.broadcast_to(rows.view.lengths, rows.head_pages.shape[:2])
    for b, h in np.ndindex(lengths.shape):
        row = np.arange(lengths[b, h] - 1)
        scores[rows.head_pages[b, h, row // pool.shape[1]], row % pool.shape[1]] = rng.random(len(row))
    return q[:, 0], jnp.asarray(scores)


def check(found, wanted, dtype: str) -> None:
    np.testing.assert_allclose(np.asarray(found[0], np.float32), wanted[0], **tolerance(dtype))
    scores, expected = np.asarray(found[1]), np.asarray(wanted[1])
    resident = np.isfinite(expected)
    np.testing.assert_allclose(scores[resident], expected[resident], **tolerance(dtype))
    others = ~resident.any(1)
    others[0] = False  # the null page is nobody's
    assert others.any()
    assert np.isnan(scores[others]).all()


@by_name(argvalues=SOME)
@pytest.mark.parametrize("shared", [True, False])
def test_matches_the_oracle(shared, shape):
    rows, q = rows_of(shape)
    q, scores = inputs(rows, q)
    how = {"load_tile": rows.load_tile, "layer": rows.layer, "scale": rows.geometry.scale, "shared": shared}
    wanted = reference.observed_decode_attention(q, scores, rows.pools, rows.names, rows.view, **how)

    @jax.jit
    def run(q, scores, pools, table):
        view = rows.view._replace(table=table)
        return api.observed_decode_attention(q, scores, pools, rows.names, view, **how)

    found = run(q, scores, rows.pools, rows.view.table)
    assert found[0].dtype == shape.dtype
    check(found, wanted, shape.dtype)
