"""Row scores for any platform: a loop over blocks of pages, as far as any query sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools, load_block, pad_columns

BLOCK_ROWS = 512
NEG = -1e30


def attention_lse(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    limit: jax.Array,
    first: int,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> jax.Array:
    """See `api.attention_lse`."""
    batch, queries, q_heads, _ = q.shape

    def step(carry, row, logits, seen):
        peak, total = carry
        logits = jnp.where(seen & (row >= first)[None, None, None, None, :], logits, -jnp.inf)
        new_peak = jnp.maximum(peak, logits.max(-1))  # finite: so what is not seen weighs exactly nothing
        mass = jnp.exp(logits - new_peak[..., None]).sum(-1)
        return new_peak, total * jnp.exp(peak - new_peak) + mass

    shape = (batch, view.num_heads, q_heads // view.num_heads, queries)
    init = (jnp.full(shape, NEG, jnp.float32), jnp.zeros(shape, jnp.float32))
    peak, total = _fold(q, pools, names, view, limit, load_tile, layer, scale, step, init)
    lse = jnp.where(total > 0, peak + jnp.log(jnp.maximum(total, 1e-30)), NEG)
    return jnp.moveaxis(lse, 3, 1).reshape(batch, queries, q_heads)


def row_scores(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    limit: jax.Array,
    lse: jax.Array | None,
    group: str,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    *,
    over: str = "sum",
) -> jax.Array:
    """See `api.row_scores`."""
    batch, queries, q_heads, _ = q.shape
    heads, capacity = view.num_heads, view.table.shape[2] * pools[names[0]].shape[1]
    if lse is not None:
        lse = jnp.moveaxis(lse.reshape(batch, queries, heads, q_heads // heads), 1, 3)

    def step(scores, row, logits, seen):
        if lse is None:
            votes = jnp.where(seen, logits, -jnp.inf).max(3)
        else:
            shares = jnp.where(seen, jnp.exp(jnp.minimum(logits - lse[..., None], 0.0)), 0.0)
            votes = shares.max(3) if over == "max" else shares.sum(3)
        votes = votes.max(2) if group == "max" else votes.sum(2)
        return jax.lax.dynamic_update_slice_in_dim(scores, votes, row[0], axis=2)

    outside = -jnp.inf if lse is None else 0.0
    scores = jnp.full((batch, heads, capacity + BLOCK_ROWS), outside, jnp.float32)  # the last block may pass the end
    return _fold(q, pools, names, view, limit, load_tile, layer, scale, step, scores)[:, :, :capacity]


def _fold(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    limit: jax.Array,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    step: Callable[[Any, jax.Array, jax.Array, jax.Array], Any],
    init: Any,
) -> Any:
    """Folds `step(carry, row [rows], logits [batch, kv_heads, group, queries, rows], seen)` over blocks of rows."""
    page_size = pools[names[0]].shape[1]
    columns = max(1, min(BLOCK_ROWS // page_size, view.table.shape[2]))
    block = columns * page_size
    view = pad_columns(view, columns)
    batch, queries, q_heads, dim = q.shape
    group = q_heads // view.num_heads
    query = q.astype(jnp.float32).reshape(batch, queries, view.num_heads, group, dim)
    query = query.transpose(0, 2, 3, 1, 4).reshape(batch, view.num_heads, group * queries, dim)
    num_blocks = (limit.max() + block - 1) // block

    def body(carry):
        i, inner = carry
        keys, _ = load_block(pools, names, view.head_pages(i * columns, columns), load_tile, layer)
        precision = jax.lax.Precision.HIGHEST
        logits = jnp.einsum("bhqd,bhsd->bhqs", query, keys.astype(jnp.float32), precision=precision)
        logits = logits.reshape(batch, view.num_heads, group, queries, block)
        row = i * block + jnp.arange(block, dtype=jnp.int32)
        seen = row[None, None, None, None, :] < limit[:, :, None, :, None]
        return i + 1, step(inner, row, logits * scale, seen)

    return jax.lax.while_loop(lambda carry: carry[0] < num_blocks, body, (jnp.int32(0), init))[1]
