"""Decode attention that scores rows, for any platform: attention, its weights from a second pass, then a scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.decode_attention import xla as attention
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools, gather_rows
from sparsejax.pallas_kernels.row_scores import xla as rows


def observed_decode_attention(
    q: jax.Array,
    scores: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    shared: bool,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.observed_decode_attention`."""
    out, lse = attention.decode_attention(q, pools, names, view, load_tile, layer, scale)
    limit = view.lengths[:, :, None]
    mass = rows.row_scores(q[:, None], pools, names, view, limit, lse[:, None], "sum", load_tile, layer, scale)
    # Whoever uses `out` waits for the second pass too, so that no later layer can store rows before these are read.
    # XLA would copy whole pools instead.
    after = jnp.minimum(mass[0, 0, 0].astype(jnp.int32) & 1, 0)
    return out + after.astype(out.dtype), add_mass(scores, view, mass, shared)


def add_mass(scores: jax.Array, view: PageView, mass: jax.Array, shared: bool) -> jax.Array:
    """Adds `mass` [batch, kv_heads, capacity] to the scores of a view's rows, and begins that of the last one."""
    if shared:
        mass = jnp.broadcast_to(mass.sum(1, keepdims=True), mass.shape)
    head_pages = view.held_pages(scores.shape[1])
    row = jnp.arange(mass.shape[2], dtype=jnp.int32)[None, None]
    before = jnp.where(row < view.lengths[:, :, None] - 1, gather_rows(scores, head_pages), 0.0)
    return scores.at[head_pages].set((before + mass).reshape(*head_pages.shape, -1))
