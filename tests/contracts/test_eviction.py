"""What eviction methods share: the choice of rows where heads keep different numbers of them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import eviction


@pytest.mark.parametrize("seed", range(40))
def test_heads_keep_as_many_rows_as_they_are_told(seed):
    rng = np.random.default_rng(seed)
    heads, capacity = int(rng.integers(1, 4)), 24
    length = int(rng.integers(2, capacity + 1))
    first, recent = int(rng.integers(0, 2)), int(rng.integers(0, 2))
    counts = rng.integers(max(1, first + recent), length + 1, heads)
    scores = rng.choice([0.0, -0.0, 1.0, -1.0, 2.5, -np.inf, np.nan], (heads, capacity)).astype(np.float32)
    kept = int(counts.max())
    arrays = jnp.asarray(scores), jnp.int32(length), kept, jnp.asarray(counts, jnp.int32)
    found = np.asarray(eviction.choose_counted_rows(*arrays, first=first, recent=recent))
    for head, count in enumerate(counts):
        wanted = np.where(np.isnan(scores[head, :length]), -np.inf, scores[head, :length])
        wanted[:first] = wanted[length - recent :] = np.inf
        best = np.sort(np.argsort(-wanted, kind="stable")[:count])
        np.testing.assert_array_equal(found[head, :count], best)
        np.testing.assert_array_equal(found[head, count:], length - 1)
