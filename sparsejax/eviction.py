"""What eviction methods share: the queries that vote, their votes, pooling, and the choice of rows.

Pure functions of arrays. A method decides what is scored, when, and how many rows stay; nothing here knows methods.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.method import DecodedContext, EvictContext, Written
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import explicit_view

LOWEST = -(2**31)
"""Key of rows that are not there, below that of every score."""

DIGIT_BITS = 2
"""Bits of a key that are found at once: fewer steps wait for one another, more keys are compared."""


def record_queries(ring: jax.Array, written: Written, window: int) -> jax.Array:
    """Keeps the last `window` queries of each request; a query at position p lies in slot p mod window.

    Those of decoded tokens are kept by `record_decoded`, for all layers at once.

    Args:
      ring: [num_layers, num_rows + 1, window, q_heads, head_dim].
      written: new rows, with queries.
      window: slots.
    """
    assert written.queries is not None
    size = min(window, written.keys.shape[1])
    index = written.num_valid[:, None] - size + jnp.arange(size, dtype=jnp.int32)[None]
    rows = jnp.where(index >= 0, written.rows[:, None], 0)  # row 0 swallows what does not exist
    index = jnp.maximum(index, 0)
    queries = jnp.take_along_axis(written.queries, index[:, :, None, None], axis=1)
    slots = jnp.take_along_axis(written.positions, index, axis=1) % window
    return ring.at[written.layer, rows, slots].set(queries)


def record_decoded(ring: jax.Array, context: DecodedContext, window: int) -> jax.Array:
    """Keeps the queries of a decode step where `record_queries` would."""
    rows = jnp.where(context.live, context.rows, 0)  # row 0 swallows padding
    return ring.at[:, rows, context.positions % window].set(context.queries)


def ring_positions(next_position: jax.Array, window: int, observed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logical positions of the queries in each slot, int32 [window], and which of them count: the last `observed`."""
    slots = jnp.arange(window, dtype=jnp.int32)
    last = next_position - 1
    positions = last - (last - slots) % window
    return positions, positions > last - jnp.minimum(observed, window)


def candidates(capacity: int, length: jax.Array, first: int, recent: int) -> jax.Array:
    """Rows that compete: neither the first ones nor the last ones. bool [capacity], [heads, capacity] for [heads]."""
    index = jnp.arange(capacity, dtype=jnp.int32)
    if length.ndim:
        index, length = index[None], length[:, None]
    return (index >= first) & (index < length - recent)


def window_votes(
    context: EvictContext,
    queries: jax.Array,
    query_positions: jax.Array,
    in_window: jax.Array,
    *,
    first: int,
    recent: int,
    probability: bool,
    everything: bool,
    shared: bool,
) -> jax.Array:
    """What the queries of an observation window think of each candidate row (arXiv 2404.14469).

    Args:
      context: the request in one layer.
      queries: [window, q_heads, head_dim].
      query_positions: int32 [window], logical.
      in_window: bool [window], which queries count.
      first, recent: rows at the beginning and at the end that do not compete.
      probability: votes are attention mass, averaged over the queries; else the largest logit.
      everything: attention is normalised over all rows that a query sees, else over the candidates among them.
      shared: one score for all heads, the largest over query heads; else one per KV head, the mean of its group.

    Returns:
      float32 [1 or kv_heads, capacity]; rows outside the candidates hold -inf (logits) or 0 (probability).
    """
    geometry = context.geometry
    lengths = context.view.lengths[0][:1] if shared else context.view.lengths[0]  # of each head, where they differ
    end = (lengths - recent)[None, :, None]
    # Rows end with the tokens of the window, so a query sees all but those that came after it.
    later = context.next_position - 1 - query_positions
    limit = jnp.where(in_window[None], lengths[:, None] - later[None], 0)[None]
    arrays = (queries[None], context.pools, context.names, context.view)
    how: dict[str, Any] = {"load_tile": context.load_tile, "layer": context.layer, "scale": geometry.scale}
    how["implementation"] = context.implementation
    lse, num_queries = None, 1.0
    if probability:
        domain = limit if everything else jnp.minimum(limit, end)
        lse = api.attention_lse(*arrays, domain, first=0 if everything else first, **how)
        num_queries = jnp.maximum(in_window.sum(), 1).astype(jnp.float32)
    group = "max" if shared else "sum"
    scores = api.row_scores(*arrays, jnp.minimum(limit, end), lse=lse, group=group, **how)[0] / num_queries
    scores = scores.max(0, keepdims=True) if shared else scores / geometry.group_size
    competing = candidates(scores.shape[1], lengths, first, recent)
    return jnp.where(competing, scores, 0.0 if probability else -jnp.inf)


def pool_scores(scores: jax.Array, kernel: int, pool_type: str) -> jax.Array:
    """Stride-1 pooling along the last axis, same length. Zero padding counts in the divisor of 'avg'."""
    if kernel == 1:
        return scores
    window, strides = (1, kernel), (1, 1)
    if pool_type == "max":
        return jax.lax.reduce_window(scores, -jnp.inf, jax.lax.max, window, strides, "SAME")
    return jax.lax.reduce_window(scores, 0.0, jax.lax.add, window, strides, "SAME") / kernel


def pool_candidates(
    scores: jax.Array, length: jax.Array, kernel: int, pool_type: str, *, first: int, recent: int
) -> jax.Array:
    """`pool_scores` over the candidates alone: what does not compete lends nothing to its neighbours."""
    if kernel == 1:
        return scores
    competing = jnp.atleast_2d(candidates(scores.shape[1], length, first, recent))
    return pool_scores(jnp.where(competing, scores, -jnp.inf if pool_type == "max" else 0.0), kernel, pool_type)


def choose_rows(
    scores: jax.Array,
    length: jax.Array,
    kept: int,
    *,
    first: int = 0,
    recent: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """The rows that stay: the first and the last ones, and the best of the rest, ties to the lower row.

    Args:
      scores: float32 [1 or kv_heads, capacity], NaN as -inf.
      length: int32 scalar, rows before, more than `kept`.
      kept: rows that stay, `first` and `recent` included.
      first, recent: rows at the beginning and at the end that stay whatever their score.
      implementation: as in `pallas_kernels.api`.

    Returns:
      int32 [1 or kv_heads, kept], ascending.
    """
    competing = candidates(scores.shape[1], length, first, recent)[None]
    wanted = jnp.where(competing, scores, jnp.inf)
    # Rows as pages of one row, behind them one more that is chosen anyway: the last page always is.
    wanted = jnp.pad(wanted, ((0, 0), (0, 1)))[None]
    table = jnp.broadcast_to(jnp.arange(wanted.shape[2], dtype=jnp.int32)[None, None], wanted.shape)
    view = explicit_view(table, jnp.full((1, 1), length + 1, jnp.int32))
    chosen = api.select_pages(
        wanted, view, num_scored=kept, width=kept + 1, budget=0, page_size=1, implementation=implementation
    )
    return chosen.table[0, :, :kept]


def choose_counted_rows(
    scores: jax.Array, length: jax.Array, kept: int, counts: jax.Array, *, first: int = 0, recent: int = 0
) -> jax.Array:
    """`choose_rows` for heads that keep different numbers of rows.

    Args:
      scores: float32 [heads, capacity], NaN as -inf.
      length: int32 scalar or [heads], rows before.
      kept: the most rows that a head may keep.
      counts: int32 [heads] rows that each keeps, at least `first` + `recent` and at most `kept` and `length`.
      first, recent: rows at the beginning and at the end that stay whatever their score.

    Returns:
      int32 [heads, kept]; the first `counts` of each head ascending, then the last row again and again.
    """
    heads, capacity = scores.shape
    index = jnp.arange(capacity, dtype=jnp.int32)
    length = jnp.broadcast_to(length, (heads,))
    keys = _row_keys(scores, length, first, recent)

    digits = jnp.arange(1, 1 << DIGIT_BITS, dtype=jnp.int32)

    def step(i, threshold):
        shift = 32 - DIGIT_BITS * (i + 1)
        tried = threshold[:, None] + (digits << shift)[None]  # wraps around for the first digit, from LOWEST upwards
        enough = (keys[:, None] >= tried[:, :, None]).sum(2, dtype=jnp.int32) >= counts[:, None]
        return threshold + (enough.sum(1, dtype=jnp.int32) << shift)  # what holds for a digit holds for lower ones

    # The key of the last row that stays, digit by digit: counts are data, and a sort would cost more.
    lowest = jnp.full(heads, LOWEST, jnp.int32)
    threshold = jax.lax.fori_loop(0, 32 // DIGIT_BITS, step, lowest)[:, None]
    above, equal = keys > threshold, keys == threshold
    missing = counts[:, None] - above.sum(1, keepdims=True, dtype=jnp.int32)
    stays = above | equal & (jnp.cumsum(equal, axis=1, dtype=jnp.int32) <= missing)
    place = jnp.where(stays, jnp.cumsum(stays, axis=1, dtype=jnp.int32) - 1, kept)  # `kept` is out of bounds: dropped
    rows = jnp.broadcast_to(jnp.maximum(length - 1, 0)[:, None], (heads, kept))
    return rows.at[jnp.arange(heads)[:, None], place].set(index[None], mode="drop")


def keep_more(rows: jax.Array, counts: jax.Array, kept: jax.Array, lengths: jax.Array, most: int) -> jax.Array:
    """The same rows and, of the others, the last ones.

    Args:
      rows: int32 [heads or 1, n], ascending; the first `counts` of each head count.
      counts: int32 [heads or 1], rows of each head.
      kept: int32 [heads or 1], rows to stay, at least `counts`.
      lengths: int32 [heads or 1], rows before.
      most: the most rows that a head may keep.

    Returns:
      int32 [heads or 1, most]; the first `kept` of each head ascending.
    """
    index = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    dropped = (lengths - kept)[:, None]
    # So many rows are dropped that all behind the last of them stay; before it those that were chosen.
    chosen = ((rows - index < dropped) & (index < counts[:, None])).sum(1, dtype=jnp.int32, keepdims=True)
    index = jnp.arange(most, dtype=jnp.int32)[None]
    rows, _, _ = jnp.broadcast_arrays(rows, counts[:, None], dropped)
    padded = jnp.pad(rows, ((0, 0), (0, max(0, most - rows.shape[1]))))[:, :most]
    return jnp.where(index < chosen, padded, dropped + index)


def head_budgets(
    scores: jax.Array,
    lengths: jax.Array,
    total: int,
    floor: int,
    ceiling: int,
    *,
    first: int = 0,
    recent: int = 0,
) -> jax.Array:
    """How many rows each head of a layer keeps, if the best rows of all heads stay (arXiv 2407.11550).

    Args:
      scores: float32 [heads, capacity], NaN as -inf.
      lengths: int32 scalar or [heads], rows before.
      total: rows that stay in all heads together, at least heads * (`first` + `recent`).
      floor, ceiling: least and most rows of a head, where it has so many; heads * floor <= total <= heads * ceiling.
      first, recent: rows at the beginning and at the end of each head that stay whatever their score.

    Returns:
      int32 [heads] that add up to `total`, or to as many rows as the ceiling and the lengths allow. Ties go to the
      lower head, and within it to the lower row.
    """
    heads = scores.shape[0]
    lengths = jnp.broadcast_to(lengths, (heads,))
    keys = _row_keys(scores, lengths, first, recent)
    least, most = jnp.minimum(floor, lengths), jnp.minimum(ceiling, lengths)
    wanted = jnp.minimum(total, most.sum())

    def counts_from(least_key):
        return jnp.clip((keys >= least_key).sum(1, dtype=jnp.int32), least, most)

    def step(i, threshold):
        candidate = threshold ^ (jnp.int32(1) << (31 - i))  # as in `choose_counted_rows`, over all heads
        return jnp.where(counts_from(candidate).sum() >= wanted, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, step, jnp.int32(LOWEST))
    above = jnp.clip((keys > threshold).sum(1, dtype=jnp.int32), least, most)
    room = counts_from(threshold) - above
    before = jnp.cumsum(room, dtype=jnp.int32) - room
    return above + jnp.clip(wanted - above.sum() - before, 0, room)


def _row_keys(scores: jax.Array, lengths: jax.Array, first: int, recent: int) -> jax.Array:
    """int32 [heads, capacity] in the order of the scores; protected rows above all, rows past the end below all."""
    capacity = scores.shape[1]
    competing = candidates(capacity, lengths, first, recent)
    keys = jnp.where(competing, _ordered_keys(scores), jnp.int32(2**31 - 1))
    return jnp.where(jnp.arange(capacity, dtype=jnp.int32)[None] < lengths[:, None], keys, LOWEST)


def _ordered_keys(scores: jax.Array) -> jax.Array:
    """int32 in the order of the scores, all above LOWEST; NaN as -inf, -0.0 as +0.0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores > -jnp.inf, scores, -jnp.inf), jnp.int32)
    bits = jnp.where(bits == LOWEST, 0, bits)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)
