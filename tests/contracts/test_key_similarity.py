"""Similarity of keys against the oracle, in tiles of every kind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.geometry import Geometry, Granularity
from sparsejax.pallas_kernels import api, reference
from tests.core.paging import paged


@pytest.mark.parametrize("granularity", [Granularity.SEQUENCE, Granularity.HEAD])
@pytest.mark.parametrize(
    ("rows", "tile", "alike"), [(1, 4, 0.9), (37, 4, 0.9), (37, 16, 0.0), (60, 16, 0.5), (60, 64, 1.0)]
)
def test_matches_the_oracle(rows, tile, alike, granularity):
    rng = np.random.default_rng(rows)
    geometry = Geometry(2, 4, 2, 8, 4, 64, 1.0)
    keys = rng.standard_normal((1, rows, 2, 8)) + 2 * (rng.random((1, rows, 2, 1)) < alike)
    stored = paged(geometry, keys, keys, [rows], granularity=granularity, layer=1)
    how = {"load_tile": stored.load_tile, "layer": stored.layer}

    @jax.jit
    def run(pools, table, lengths):
        view = stored.view._replace(table=table, lengths=lengths)
        return api.key_similarity(pools, stored.names, view, threshold=0.5, tile_rows=tile, **how)

    found = run(stored.pools, stored.view.table, stored.view.lengths)
    wanted = reference.key_similarity(stored.pools, stored.names, stored.view, 0.5, **how)
    assert found.dtype == jnp.float32
    assert found.shape == (2, -(-rows // 4) * 4)
    np.testing.assert_allclose(found[:, :rows], wanted, rtol=1e-5, atol=1e-6)
