"""Finishing heads and storing new rows for any platform: XLA's scatters."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.heads import Heads, finish
from sparsejax.pallas_kernels.layout import POSITIONS, Encode, PageView, Pools


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
    page_size = pools[POSITIONS].shape[1]
    head_pages, offsets = view.places(num_new, q.shape[1], page_size)
    rows = encode(layer, k, v)
    rows[POSITIONS] = jnp.broadcast_to(positions[:, :, None], head_pages.shape)
    updated = {name: pools[name].at[head_pages, offsets].set(row) for name, row in rows.items()}
    return q, k, v, {**pools, **updated}
