"""Paged decode attention for any platform: a loop over blocks of pages with an online softmax.

The trip count follows the longest row at run time, so one program serves every context length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools, load_block, pad_columns
from sparsejax.pallas_kernels.platforms import platform

NEG = -1e30
_ELEMENTWISE_BATCH = 8


def block_rows(batch: int) -> int:
    """Rows per block: on a CPU a block of the whole batch should stay in its caches; elsewhere long blocks win."""
    return max(64, min(256, 1024 // batch)) if platform() == "cpu" else 1024


def _elementwise(batch: int) -> bool:
    """Whether products are plain multiplications and sums.

    A CPU runs many small matrix products, of a few queries each, slower than the loops that XLA makes of these.
    """
    return platform() == "cpu" and batch >= _ELEMENTWISE_BATCH


def _weighted_sum(weights: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    """float32 [batch, heads, group, dim] of weights [batch, heads, group, rows] and v [batch, heads, rows, dim].

    What is not `valid` (bool [batch, heads or 1, 1, rows]) is not ours: its weight of zero would still turn its
    infinities into NaN.
    """
    v = jnp.where(valid[:, :, 0, :, None], v, 0)
    return jnp.einsum("bhgs,bhsd->bhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)


def _weighted_sum_elementwise(weights: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    """The same. Values are masked only in blocks in which a row ends, for masking costs as much as the sum."""
    v = v.astype(jnp.float32)
    starts, ends = valid[:, :, 0, 0], valid[:, :, 0, -1]

    def masked() -> jax.Array:
        return (weights[..., None] * jnp.where(valid[:, :, 0, :, None], v, 0)[:, :, None]).sum(3)

    def plain() -> jax.Array:
        return (weights[..., None] * v[:, :, None]).sum(3)

    part = jax.lax.cond((starts & ~ends).any(), masked, plain)
    return jnp.where(starts[:, :, None, None], part, 0)


def decode_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.decode_attention`."""
    page_size = pools[names[0]].shape[1]
    batch, q_heads, dim = q.shape
    columns = max(1, min(block_rows(batch) // page_size, view.table.shape[2]))
    block = columns * page_size
    view = pad_columns(view, columns)
    heads, elementwise = view.num_heads, _elementwise(batch)
    weighted_sum = _weighted_sum_elementwise if elementwise else _weighted_sum
    query = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(batch, heads, q_heads // heads, dim)
    num_blocks = (view.lengths.max() + block - 1) // block

    def step(carry):
        i, peak, total, out = carry
        k, v = load_block(pools, names, view.head_pages(i * columns, columns), load_tile, layer)
        if elementwise:
            logits = (query.astype(jnp.float32)[:, :, :, None] * k.astype(jnp.float32)[:, :, None]).sum(-1)
        else:
            logits = jnp.einsum("bhgd,bhsd->bhgs", query, k, preferred_element_type=jnp.float32)
        row = i * block + jnp.arange(block, dtype=jnp.int32)
        valid = row[None, None, None, :] < view.lengths[:, :, None, None]
        logits = jnp.where(valid, logits, NEG)
        new_peak = jnp.maximum(peak, logits.max(-1))
        # Exactly zero for invalid rows, also in blocks where a short row has no valid key at all.
        weights = jnp.where(valid, jnp.exp(logits - new_peak[..., None]), 0.0)
        decay = jnp.exp(peak - new_peak)
        part = weighted_sum(weights, v, valid)
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
    out = (out / total[..., None]).astype(q.dtype).reshape(batch, q_heads, dim)
    return out, (peak + jnp.log(total)).reshape(batch, q_heads)
