"""Float32 oracles in plain jnp: materialise everything, mask, softmax. Slow on purpose; kernels are judged by these."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools, explicit_view, load_block

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


def _logits(q, pools, names, view, limit, load_tile, layer, scale):
    """Logits [batch, kv_heads, group, queries, rows], and which count [batch, kv_heads or 1, 1, queries, rows]."""
    k, _ = _rows(view, pools, names, load_tile, layer)
    batch, queries, q_heads, dim = q.shape
    heads = k.shape[1]
    q = q.astype(jnp.float32).reshape(batch, queries, heads, q_heads // heads, dim)
    precision = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("bqhgd,bhsd->bhgqs", q, k.astype(jnp.float32), precision=precision) * scale
    return logits, (jnp.arange(k.shape[2])[None, None, None, :] < limit[..., None])[:, :, None]


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
    """Oracle of `api.attention_lse`."""
    logits, seen = _logits(q, pools, names, view, limit, load_tile, layer, scale)
    seen &= (jnp.arange(logits.shape[4]) >= first)[None, None, None, None, :]
    lse = jax.nn.logsumexp(jnp.where(seen, logits, -jnp.inf), axis=-1)
    lse = jnp.where(seen.any(-1), lse, NEG)
    return jnp.moveaxis(lse, 3, 1).reshape(q.shape[:3])


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
    """Oracle of `api.row_scores`."""
    logits, seen = _logits(q, pools, names, view, limit, load_tile, layer, scale)
    if lse is None:
        votes = jnp.where(seen, logits, -jnp.inf).max(3)
    else:
        lse = jnp.moveaxis(lse.reshape(*q.shape[:2], *logits.shape[1:3]), 1, 3)
        shares = jnp.where(seen, jnp.exp(jnp.minimum(logits - lse[..., None], 0.0)), 0.0)
        votes = shares.max(3) if over == "max" else shares.sum(3)
    return votes.max(2) if group == "max" else votes.sum(2)


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
    """Oracle of `api.observed_decode_attention`: one head of a row at a time. Not to be traced."""
    out, lse = decode_attention(q, pools, names, view, load_tile, layer, scale)
    limit, how = view.lengths[:, :, None], (load_tile, layer, scale)
    mass = row_scores(q[:, None], pools, names, view, limit, lse[:, None], "sum", *how)
    pages, page_size = view.head_pages(0, view.table.shape[2]), scores.shape[1]
    for b, h in itertools.product(*map(range, pages.shape[:2])):
        row = jnp.arange(int(view.lengths[b, h % view.lengths.shape[1]]))
        gained = mass[b].sum(0) if shared else mass[b, h]
        at = pages[b, h, row // page_size], row % page_size
        scores = scores.at[at].set(jnp.where(row < len(row) - 1, scores[at], 0.0) + gained[: len(row)])
    return out, scores


def key_similarity(
    pools: Pools, names: tuple[str, ...], view: PageView, threshold: float, load_tile: LoadTile, layer: jax.Array
) -> jax.Array:
    """Oracle of `api.key_similarity`, of resident rows only. Not to be traced."""
    keys = _rows(view, pools, names, load_tile, layer)[0][0, :, : int(view.lengths.max())].astype(jnp.float32)
    units = keys / (jnp.linalg.norm(keys, axis=-1, keepdims=True) + 1e-8)
    cosine = jnp.einsum("hid,hjd->hij", units, units, precision=jax.lax.Precision.HIGHEST)
    column = jnp.arange(cosine.shape[1])[None, None, :]
    cosine = jnp.where(column == column.swapaxes(1, 2), 0.0, cosine)
    last = jnp.where(cosine > threshold, column, 0).max(2, keepdims=True)
    return jnp.where(column == last, 0.0, cosine).mean(1)


def move_rows(pools: Pools, rows: jax.Array, source: PageView, target: PageView) -> dict[str, jax.Array]:
    """Oracle of `api.move_rows`: one row at a time. Not to be traced."""
    page_size = next(iter(pools.values())).shape[1]
    batch, heads = source.table.shape[0], source.num_heads
    old, new = (view.head_pages(0, view.table.shape[2]) for view in (source, target))
    moved = dict(pools)
    for b, h, i in itertools.product(range(batch), range(heads), range(rows.shape[2])):
        row = int(rows[b, h % rows.shape[1], i])
        at = old[b, h, row // page_size], row % page_size
        to = new[b, h, i // page_size], i % page_size
        moved = {name: pool.at[to].set(pools[name][at]) for name, pool in moved.items()}
    return moved


def logit_threshold(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Oracle of `api.logit_threshold`: a sort of one row at a time."""

    def one(logits, temperature, top_k, top_p, min_p):
        vocab = logits.shape[0]
        below = (logits.max() - logits) / jnp.maximum(temperature, 1e-6)
        below = jnp.where((jnp.exp(-below) >= min_p) | (below == 0), below, jnp.inf)
        by_count, by_mass = (top_k > 0) & (top_k < vocab), top_p < 1
        limit = jnp.sort(below)[jnp.where(by_count, top_k, vocab) - 1]
        below = jnp.where(below <= limit, below, jnp.inf)
        order = jnp.sort(below)
        mass = jnp.cumsum(jnp.exp(-order))
        limit = jnp.where(by_mass, order[jnp.argmax(mass >= top_p * mass[-1])], jnp.inf)
        least = jnp.where((below <= limit) & (below < jnp.inf), logits, jnp.inf).min()
        asks = (temperature > 0) & (by_count | by_mass | (min_p > 0))
        return jnp.where(asks & (least < jnp.inf), least, -jnp.inf)

    return jax.vmap(one)(logits, temperature, top_k, top_p, min_p)


def select_pages(
    scores: jax.Array, view: PageView, num_scored: int, width: int, budget: int, page_size: int, shared: bool
) -> PageView:
    """Oracle of `api.select_pages`: every page's rank by comparing it with all others."""
    lengths = jnp.broadcast_to(view.lengths, scores.shape[:2])[:, :, None]
    num_pages = (lengths + page_size - 1) // page_size
    column = jnp.arange(scores.shape[2])[None, None, :]
    scores = jnp.where((column < num_pages) & ~jnp.isnan(scores), scores, -jnp.inf)
    if shared:
        scores = jnp.broadcast_to(scores.max(1, keepdims=True), scores.shape)
    mine, other = scores[..., :, None], scores[..., None, :]
    better = (other > mine) | (other == mine) & (column[..., None, :] < column[..., :, None])
    rank = (better & (column < num_pages - 1)[..., None, :]).sum(-1)
    chosen = (column < num_pages - 1) & (rank < num_scored) | (column == num_pages - 1)
    whole = (lengths <= budget) | (num_pages <= num_scored + 1)
    chosen = jnp.where(whole, column < num_pages, chosen)
    first = jnp.argsort(~chosen, axis=-1, stable=True)  # chosen columns, then the others
    first = jnp.pad(first, ((0, 0), (0, 0), (0, max(0, width - first.shape[2]))))[..., :width]
    slot = jnp.arange(width)[None, None, :]
    pages = jnp.where(slot < chosen.sum(-1, keepdims=True), view.pages_at(first), 0)
    read = jnp.where(whole, lengths, num_scored * page_size + lengths - (num_pages - 1) * page_size)
    return explicit_view(pages.astype(jnp.int32), read[:, :, 0])


def merge(parts: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Joins attention over disjoint key sets: [(out [..., head_dim], lse [...])] -> (out, lse)."""
    lses = jnp.stack([lse for _, lse in parts])
    total = jax.nn.logsumexp(lses, axis=0)
    weights = jnp.exp(lses - total[None])
    outs = jnp.stack([out.astype(jnp.float32) for out, _ in parts])
    return (weights[..., None] * outs).sum(0), total
