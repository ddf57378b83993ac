"""Attention of tiles over a few biased keys, for any platform: one product at a time, tiles in turn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.block_sparse_attention.tiles import pack_queries, unpack_queries

NEG = -1e30
TILES_AT_ONCE = 32


def tile_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, tile_rows: int, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.tile_attention`."""
    chunk, heads = q.shape[1], k.shape[1]
    group = q.shape[2] // heads
    tiles = bias.shape[2]
    query = pack_queries((q.astype(jnp.float32) * scale).astype(q.dtype), heads, tile_rows)
    query = query.reshape(*query.shape[:2], tiles, tile_rows, query.shape[3])

    def attend(arguments: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        query, bias = arguments  # [batch, heads, tile_rows, dim], [batch, heads, keys]
        logits = jnp.einsum("bhqd,bhsd->bhqs", query, k, preferred_element_type=jnp.float32)
        logits = jnp.where(bias[:, :, None] > -jnp.inf, logits + bias[:, :, None], -jnp.inf)
        peak = jnp.maximum(logits.max(-1), NEG)
        weights = jnp.exp(logits - peak[..., None])
        total = jnp.maximum(weights.sum(-1), 1e-30)
        part = jnp.einsum("bhqs,bhsd->bhqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return (part / total[..., None]).astype(q.dtype), peak + jnp.log(total)

    split = (jnp.moveaxis(query, 2, 0), jnp.moveaxis(bias, 2, 0))
    out, lse = jax.lax.map(attend, split, batch_size=min(TILES_AT_ONCE, tiles))

    def unfold(x: jax.Array) -> jax.Array:  # [tiles, batch, heads, tile_rows, ...]
        x = jnp.moveaxis(x, 0, 2)
        return unpack_queries(x.reshape(*x.shape[:2], -1, *x.shape[4:]), chunk, group)

    return unfold(out), unfold(lse)
