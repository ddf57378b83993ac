"""Paged prefill attention for any platform: all queries of a chunk against blocks of pages, online softmax.

The trip count follows the longest row at run time. Cost is quadratic in nothing but what is read: blocks past the last
key of the batch are never visited.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools, load_block, pad_columns

BLOCK_ROWS = 512
NEG = -1e30


def prefill_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    start: jax.Array,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.prefill_attention`."""
    page_size = pools[names[0]].shape[1]
    columns = max(1, min(BLOCK_ROWS // page_size, view.table.shape[2]))
    block = columns * page_size
    view = pad_columns(view, columns)
    batch, chunk, q_heads, dim = q.shape
    heads = view.num_heads
    group = q_heads // heads
    query = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(batch, chunk, heads, group, dim)
    query = query.transpose(0, 2, 3, 1, 4).reshape(batch, heads, group * chunk, dim)
    index = start[:, :, None] + jnp.arange(chunk, dtype=jnp.int32)[None, None, :]
    limit = jnp.minimum(index + 1, view.lengths[:, :, None])  # [batch, heads or 1, chunk]: rows a query sees
    limit = jnp.tile(limit, (1, 1, group))  # queries are laid out group-major
    num_blocks = (view.lengths.max() + block - 1) // block

    def step(carry):
        i, peak, total, out = carry
        k, v = load_block(pools, names, view.head_pages(i * columns, columns), load_tile, layer)
        logits = jnp.einsum("bhqd,bhsd->bhqs", query, k, preferred_element_type=jnp.float32)
        row = i * block + jnp.arange(block, dtype=jnp.int32)
        valid = row[None, None, None, :] < limit[:, :, :, None]
        # What lies past the end is not ours: a weight of zero would still turn its infinities into NaN.
        v = jnp.where((row[None, None, :] < view.lengths[:, :, None])[..., None], v, 0)
        logits = jnp.where(valid, logits, NEG)
        new_peak = jnp.maximum(peak, logits.max(-1))
        weights = jnp.where(valid, jnp.exp(logits - new_peak[..., None]), 0.0)
        decay = jnp.exp(peak - new_peak)
        part = jnp.einsum("bhqs,bhsd->bhqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return i + 1, new_peak, total * decay + weights.sum(-1), out * decay[..., None] + part

    shape = query.shape[:3]
    init = (
        jnp.int32(0),
        jnp.full(shape, NEG, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )
    _, peak, total, out = jax.lax.while_loop(lambda carry: carry[0] < num_blocks, step, init)
    total = jnp.maximum(total, 1e-30)

    def unfold(x):  # [batch, heads, group * chunk, ...] -> [batch, chunk, q_heads, ...]
        x = x.reshape(batch, heads, group, chunk, *x.shape[3:])
        return jnp.moveaxis(x, 3, 1).reshape(batch, chunk, q_heads, *x.shape[4:])

    return unfold((out / total[..., None]).astype(q.dtype)), unfold(peak + jnp.log(total))
