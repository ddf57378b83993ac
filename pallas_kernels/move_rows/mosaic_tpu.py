"""Rows moved on TPUs through Mosaic: gathered by XLA, then stored page by page."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import PageView, Pools
from sparsejax.pallas_kernels.tpu_rows import store, unsupported_pools
from sparsejax.pallas_kernels.tpu_support import platform_problem


def unsupported(pools: Pools, rows: jax.Array, target: PageView) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.move_rows`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_pools(pools, rows.shape[0], rows.shape[2], target.num_heads)


def move_rows(pools: Pools, rows: jax.Array, source: PageView, target: PageView) -> dict[str, jax.Array]:
    """See `api.move_rows`."""
    page_size = pools["k"].shape[1]
    batch, _, kept = rows.shape
    old, offsets = source.pages_at(rows // page_size), rows % page_size
    moved = {name: pool[old, offsets].swapaxes(1, 2) for name, pool in pools.items()}
    empty = target._replace(lengths=jnp.zeros((batch, 1), jnp.int32))
    return store(pools, moved, empty, jnp.full((batch,), kept, jnp.int32))
