"""Float32 oracles in plain jnp: materialise everything, mask, softmax. Slow on purpose; kernels are judged by these."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools, load_block

NEG = -1e30


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Masked attention in float32.

    Args:
      q: [batch, queries, num_q_heads, head_dim].
      k, v: [batch, num_kv_heads, rows, head_dim].
      mask: bool, broadcastable to [batch, num_kv_heads, queries, rows]; a query with no key gives zeros.
      scale: softmax scale.

    Returns:
      out [batch, queries, num_q_heads, head_dim] and log-sum-exp [batch, queries, num_q_heads], float32.
    """
    batch, queries, q_heads, dim = q.shape
    heads = k.shape[1]
    q = q.astype(jnp.float32).reshape(batch, queries, heads, q_heads // heads, dim)
    precision = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("bqhgd,bhsd->bhgqs", q, k.astype(jnp.float32), precision=precision) * scale
    keep = jnp.broadcast_to(mask, (batch, heads, queries, k.shape[2]))[:, :, None]
    logits = jnp.where(keep, logits, NEG)
    peak = logits.max(-1, keepdims=True)
    weights = jnp.where(keep, jnp.exp(logits - peak), 0.0)
    total = weights.sum(-1, keepdims=True)
    v = jnp.where(keep.any((2, 3))[..., None], v.astype(jnp.float32), 0.0)  # 0 * inf is NaN
    out = jnp.einsum("bhgqs,bhsd->bqhgd", weights, v, precision=precision)
    total_q = jnp.moveaxis(total[..., 0], 3, 1)
    out = out / jnp.maximum(total_q, 1e-30)[..., None]
    lse = jnp.where(total[..., 0] > 0, peak[..., 0] + jnp.log(jnp.maximum(total[..., 0], 1e-30)), NEG)
    return out.reshape(batch, queries, q_heads, dim), jnp.moveaxis(lse, 3, 1).reshape(batch, queries, q_heads)


def _rows(view: PageView, pools: Pools, names: tuple[str, ...], load_tile: LoadTile, layer: jax.Array):
    return load_block(pools, names, view.head_pages(0, view.table.shape[2]), load_tile, layer)


def decode_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Oracle of `api.decode_attention`."""
    k, v = _rows(view, pools, names, load_tile, layer)
    mask = jnp.arange(k.shape[2])[None, None, :] < view.lengths[:, :, None]
    out, lse = attention(q[:, None], k, v, mask[:, :, None], scale)
    return out[:, 0], lse[:, 0]


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
    """Oracle of `api.prefill_attention`."""
    k, v = _rows(view, pools, names, load_tile, layer)
    row = jnp.arange(k.shape[2])[None, None, None, :]
    query = start[:, :, None, None] + jnp.arange(q.shape[1])[None, None, :, None]
    mask = (row <= query) & (row < view.lengths[:, :, None, None])
    return attention(q, k, v, mask, scale)


def page_scores(q: jax.Array, page_min: jax.Array, page_max: jax.Array, view: PageView) -> jax.Array:
    """Oracle of `api.page_scores`."""
    head_pages = view.head_pages(0, view.table.shape[2])
    low = page_min[head_pages].astype(jnp.float32)
    high = page_max[head_pages].astype(jnp.float32)
    batch, heads, _, dim = low.shape
    query = q.astype(jnp.float32).reshape(batch, heads, -1, 1, dim)
    return jnp.maximum(query * low[:, :, None], query * high[:, :, None]).sum(-1).max(2)


def merge(parts: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Joins attention over disjoint key sets: [(out [..., head_dim], lse [...])] -> (out, lse)."""
    lses = jnp.stack([lse for _, lse in parts])
    total = jax.nn.logsumexp(lses, axis=0)
    weights = jnp.exp(lses - total[None])
    outs = jnp.stack([out.astype(jnp.float32) for out, _ in parts])
    return (weights[..., None] * outs).sum(0), total
