"""Block-sparse prefill attention for any platform: all tiles at once against the next block of each one's list.

The trip count follows the longest list at run time, and nothing is gathered but blocks that are listed (for a tile at
its end, a block that it has read before).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.block_sparse_attention.tiles import (
    pack_queries,
    packed_positions,
    readable,
    unpack_queries,
)
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools, gather_rows

NEG = -1e30


def load_blocks(
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    blocks: jax.Array,
    block_size: int,
    load_tile: LoadTile,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [batch, kv_heads, n, block_size, head_dim] of blocks int32 [batch, kv_heads, n] of rows.

    A block may be a part of a page, or several pages. Rows past the end of the table are those of other pages.
    """
    page_size = pools[names[0]].shape[1]
    part = math.gcd(page_size, block_size)  # rows that are together in both
    each, per_page = block_size // part, page_size // part
    first = blocks * each
    index = (first[..., None] + jnp.arange(each, dtype=jnp.int32)[None, None, None]).reshape(*first.shape[:2], -1)
    columns = jnp.minimum(index // per_page, view.table.shape[2] - 1)
    parts = view.pages_at(columns) * per_page + index % per_page
    tiles = {name: gather_rows(pools[name].reshape(-1, part, *pools[name].shape[2:]), parts) for name in names}
    k, v = load_tile(tiles, layer)
    shape = (*blocks.shape, block_size, k.shape[-1])
    return k.reshape(shape), v.reshape(shape)


def block_sparse_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    start: jax.Array,
    blocks: jax.Array,
    num_blocks: jax.Array,
    block_size: int,
    tile_rows: int,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_sparse_attention`."""
    chunk, heads = q.shape[1], view.num_heads
    group = q.shape[2] // heads
    tiles = blocks.shape[2]
    query = pack_queries((q.astype(jnp.float32) * scale).astype(q.dtype), heads, tile_rows)
    query = query.reshape(*query.shape[:2], tiles, tile_rows, query.shape[3])
    shape = {"block_size": block_size, "tile_rows": tile_rows, "group": group, "chunk": chunk}
    num_read, _ = readable(view, start, blocks, num_blocks, **shape)
    position = start[:, :, None, None] + packed_positions(tiles, tile_rows, group)[None, None]
    limit = jnp.minimum(position + 1, view.lengths[:, :, None, None])[..., None]  # rows that a packed row sees

    def step(carry):
        i, peak, total, out = carry
        at = jnp.minimum(i, jnp.maximum(num_read - 1, 0))[..., None]
        block = jnp.where(num_read > 0, jnp.take_along_axis(blocks, at, axis=3)[..., 0], 0)
        k, v = load_blocks(pools, names, view, block, block_size, load_tile, layer)
        row = block[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)[None, None, None]
        # What lies past the end is not ours: a weight of zero would still turn its infinities into NaN.
        v = jnp.where((row < view.lengths[:, :, None, None])[..., None], v, 0)
        logits = jnp.einsum("bhtqd,bhtsd->bhtqs", query, k, preferred_element_type=jnp.float32)
        valid = (row[:, :, :, None, :] < limit) & (i < num_read)[..., None, None]
        logits = jnp.where(valid, logits, NEG)
        new_peak = jnp.maximum(peak, logits.max(-1))
        weights = jnp.where(valid, jnp.exp(logits - new_peak[..., None]), 0.0)
        decay = jnp.exp(peak - new_peak)
        part = jnp.einsum("bhtqs,bhtsd->bhtqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return i + 1, new_peak, total * decay + weights.sum(-1), out * decay[..., None] + part

    init = (
        jnp.int32(0),
        jnp.full(query.shape[:4], NEG, jnp.float32),
        jnp.zeros(query.shape[:4], jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )
    most = num_read.max()
    _, peak, total, out = jax.lax.while_loop(lambda carry: carry[0] < most, step, init)
    total = jnp.maximum(total, 1e-30)

    def unfold(x: jax.Array) -> jax.Array:
        return unpack_queries(x.reshape(*x.shape[:2], -1, *x.shape[4:]), chunk, group)

    return unfold((out / total[..., None]).astype(q.dtype)), unfold(peak + jnp.log(total))
