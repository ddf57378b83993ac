"""Storing new rows on TPUs through Mosaic. Heads are finished and rows encoded by XLA, which fuses that well."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.heads import Heads, finish
from sparsejax.pallas_kernels.layout import POSITIONS, Encode, PageView, Pools
from sparsejax.pallas_kernels.tpu_rows import store, unsupported_pools
from sparsejax.pallas_kernels.tpu_support import platform_problem


def unsupported(heads: Heads, pools: Pools, view: PageView, encode: Encode) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.append`."""
    if (problem := platform_problem()) is not None:
        return problem
    batch, chunk = heads.qkv.shape[:2]
    return unsupported_pools(pools, batch, chunk, view.num_heads)


def append(
    heads: Heads,
    pools: Pools,
    view: PageView,
    num_new: jax.Array,
    positions: jax.Array,
    encode: Encode,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """See `api.append`."""
    q, k, v = finish(heads)
    rows = encode(layer, k, v)
    rows[POSITIONS] = jnp.broadcast_to(positions[:, :, None], k.shape[:3])
    return q, k, v, store(pools, rows, view, num_new)
