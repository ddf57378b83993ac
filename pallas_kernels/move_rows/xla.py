"""Rows moved on any platform: gathered, then scattered."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import PageView, Pools


def move_rows(pools: Pools, rows: jax.Array, source: PageView, target: PageView) -> dict[str, jax.Array]:
    """See `api.move_rows`."""
    page_size = next(iter(pools.values())).shape[1]
    index = jnp.arange(rows.shape[2], dtype=jnp.int32)[None, None, :]
    columns = jnp.broadcast_to(index // page_size, (rows.shape[0], 1, rows.shape[2]))
    old, offsets = source.pages_at(rows // page_size), rows % page_size
    new = target.pages_at(columns)
    return {name: pool.at[new, index % page_size].set(pool[old, offsets]) for name, pool in pools.items()}
