"""Importance minus redundancy of resident rows (arXiv 2505.24133): what some methods that evict while decoding rank by.

Nothing here holds an array of rows x rows: similarities exist one tile at a time, and only as far as rows are resident.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import eviction
from sparsejax.geometry import Geometry
from sparsejax.method import EvictContext
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import load_block, pad_columns

SIMILAR = 0.5
"""Cosine above which two keys count as similar."""

MAX_TILE_ROWS = 2048


def workspace_nbytes(geometry: Geometry, window: int, tile_rows: int) -> int:
    """Bytes that `joint_scores` takes at most for the longest request, with `window` queries and tiles of so many rows.

    Counted are what the logits of the window become in turn, the values of each row, and one tile of similarities with
    its keys.
    """
    heads, capacity = geometry.num_kv_heads, geometry.max_pages * geometry.page_size
    rows = heads * capacity * (4 * window + 12)
    tile = heads * tile_rows * (_few_rows(tile_rows, geometry.page_size) + 6 * geometry.head_dim)
    return 4 * (rows + tile)


def _few_rows(tile: int, page_size: int) -> int:
    """Rows that a tile of rows is compared with at a time."""
    return max(tile // 4 // page_size, 1) * page_size


def tile_rows(geometry: Geometry, window: int, limit_nbytes: int) -> int | None:
    """Rows of the largest tile that fits into a workspace, a multiple of the page size; None if none does."""
    rows = geometry.page_size
    if workspace_nbytes(geometry, window, rows) > limit_nbytes:
        return None
    while rows < min(MAX_TILE_ROWS, geometry.max_model_len):
        if workspace_nbytes(geometry, window, 2 * rows) > limit_nbytes:
            break
        rows *= 2
    return rows


def importance(
    context: EvictContext, queries: jax.Array, in_window: jax.Array, *, first: int, recent: int, kernel: int
) -> jax.Array:
    """Attention of some queries to the candidates, averaged over the queries, the largest of each neighbourhood.

    The query heads of a KV head vote with the largest of their logits, before the softmax over the candidates.

    Args:
      context: the request in one layer.
      queries: [window, q_heads, head_dim]; all came after the candidates.
      in_window: bool [window], which queries count, at least one.
      first, recent: rows at the beginning and at the end that are no candidates.
      kernel: odd width of the neighbourhood in candidates.

    Returns:
      float32 [kv_heads, capacity], -inf for rows that are no candidates.
    """
    window = queries.shape[0]
    one = context.view
    view = one._replace(
        table=jnp.broadcast_to(one.table, (window, *one.table.shape[1:])),
        lengths=jnp.broadcast_to(one.lengths, (window, *one.lengths.shape[1:])),
    )
    limit = jnp.where(in_window, context.length - recent, 0)[:, None, None]
    logits = api.row_scores(
        queries[:, None],
        context.pools,
        context.names,
        view,
        limit,
        load_tile=context.load_tile,
        layer=context.layer,
        scale=context.geometry.scale,
        implementation=context.implementation,
    )
    competing = eviction.candidates(logits.shape[2], context.length, first, recent)[None]
    logits = jnp.where(competing[None], logits, -jnp.inf)
    peak = jnp.where(in_window[:, None, None], logits.max(2, keepdims=True), 0.0)
    mass = jnp.where(in_window[:, None, None], jnp.exp(logits - peak), 0.0)
    mass = mass / jnp.maximum(mass.sum(2, keepdims=True), 1e-30)
    mean = mass.sum(0) / jnp.maximum(in_window.sum(), 1).astype(jnp.float32)
    mean = eviction.pool_scores(jnp.where(competing, mean, -jnp.inf), kernel, "max")
    return jnp.where(competing, mean, -jnp.inf)


def key_redundancy(context: EvictContext, tile: int) -> jax.Array:
    """How similar each resident key is to the others, a softmax over the rows; the newest of similar ones counts less.

    With C the cosines of all pairs, 0 on the diagonal, and for each row i the largest column of those above `SIMILAR`
    (column 0 without any) set to 0, this is the softmax of C's column means. A column's sum is its product with the sum
    of all keys less what was set to 0, so similarities are only searched for that column. In most heads nearly every
    key has a similar one among the newest: all are compared with those, and only the others with all.

    Args:
      context: the request in one layer.
      tile: rows of a tile, a multiple of the page size.

    Returns:
      float32 [kv_heads, capacity]; rows past the end hold 0.
    """
    length, heads, page_size = context.length, context.geometry.num_kv_heads, context.geometry.page_size
    view = pad_columns(context.view, tile // page_size)
    capacity = view.table.shape[2] * page_size
    num_tiles = (length + tile - 1) // tile
    few = _few_rows(tile, page_size)
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]

    def load(page: jax.Array, count: int) -> _Keys:
        """`count` rows from a page on."""
        pages = view.head_pages(page, count // page_size)
        keys, _ = load_block(context.pools, context.names, pages, context.load_tile, context.layer)
        row = page * page_size + jnp.arange(count, dtype=jnp.int32)
        keys = jnp.where((row < length)[None, :, None], keys[0], 0)
        return _Keys(jnp.broadcast_to(row[None], (heads, count)), keys, _inverse_norm(keys))

    def load_tile_of(index: jax.Array) -> _Keys:
        return load(index * (tile // page_size), tile)

    def load_rows(row: jax.Array) -> _Keys:
        """Resident rows [kv_heads, n]."""
        pages = view.pages_at(row[None] // page_size)
        found = {name: context.pools[name][pages, row[None] % page_size] for name in context.names}
        keys = context.load_tile(found, context.layer)[0][0]
        return _Keys(row, keys, _inverse_norm(keys))

    newest = load(jnp.maximum((length + page_size - 1) // page_size - few // page_size, 0), few)

    def look_at_newest(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, last = carry
        keys = load_tile_of(index)
        last = jax.lax.dynamic_update_slice(last, _last_similar(keys, newest), (0, index * tile))
        return total + keys.units().sum(1), last

    empty = jnp.zeros((heads, capacity), jnp.float32)
    total = jnp.zeros((heads, context.geometry.head_dim), jnp.float32)
    total, last = jax.lax.fori_loop(0, num_tiles, look_at_newest, (total, empty.astype(jnp.int32)))

    def missing(last: jax.Array) -> jax.Array:
        return (last < 0) & (jnp.arange(capacity, dtype=jnp.int32) < length)[None]

    def look_at_all(last: jax.Array) -> jax.Array:
        """Finds the last similar row of the next few that miss one; 0 without any."""
        wanted = missing(last)
        place = jnp.where(wanted, jnp.cumsum(wanted, axis=1, dtype=jnp.int32) - 1, few)  # those past `few` wait
        every = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), wanted.shape)
        row = jnp.full((heads, few), capacity, jnp.int32).at[head, place].set(every, mode="drop")
        keys = load_rows(jnp.minimum(row, length - 1))

        def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            other, found = state
            return other - 1, jnp.maximum(found, _last_similar(keys, load_tile_of(other)))

        def searching(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (state[0] >= 0) & (state[1] < 0).any()

        start = num_tiles - 1, jnp.where(row < capacity, -1, 0)  # from the last tile down: what is found is the last
        found = jax.lax.while_loop(searching, step, start)[1]
        return last.at[head, row].set(jnp.maximum(found, 0), mode="drop")

    last = jnp.maximum(jax.lax.while_loop(lambda last: missing(last).any(), look_at_all, last), 0)

    # What was set to 0 is added up in fixed point: the order of a float scatter is not fixed on GPUs.
    bits = 29 - capacity.bit_length()

    def add_rows(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, dropped = carry
        keys = load_tile_of(index)
        match = load_rows(jax.lax.dynamic_slice(last, (0, index * tile), (heads, tile)))
        units = keys.units()
        cosine = jnp.where(match.row == keys.row, 0.0, (units * match.units()).sum(2))
        dropped = dropped.at[head, match.row].add(jnp.round(cosine * 2.0**bits).astype(jnp.int32))
        own = (units * (total[:, None] - units)).sum(2)
        return jax.lax.dynamic_update_slice(sums, own, (0, index * tile)), dropped

    sums, dropped = jax.lax.fori_loop(0, num_tiles, add_rows, (empty, empty.astype(jnp.int32)))
    mean = (sums - dropped.astype(jnp.float32) * 2.0**-bits) / length.astype(jnp.float32)
    valid = jnp.arange(capacity, dtype=jnp.int32) < length
    mean = jnp.where(valid[None], mean, -jnp.inf)
    mass = jnp.exp(mean - mean.max(1, keepdims=True))
    return (mass / mass.sum(1, keepdims=True))[:, : context.view.table.shape[2] * page_size]


class _Keys(NamedTuple):
    """Keys of some rows.

    Attributes:
      row: int32 [kv_heads, n].
      keys: [kv_heads, n, head_dim].
      inverse: float32 [kv_heads, n], of their norms.
    """

    row: jax.Array
    keys: jax.Array
    inverse: jax.Array

    def units(self) -> jax.Array:
        """float32 [kv_heads, n, head_dim]."""
        return self.keys.astype(jnp.float32) * self.inverse[..., None]


def _last_similar(keys: _Keys, others: _Keys) -> jax.Array:
    """The largest row of `others` that is similar to each of `keys` and another one, int32 [kv_heads, n]; else -1."""
    cosine = jnp.einsum(
        "hrd,hcd->hrc",
        keys.keys,
        others.keys,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    similar = cosine * keys.inverse[..., None] * others.inverse[:, None] > SIMILAR
    similar &= others.row[:, None] != keys.row[..., None]
    return jnp.where(similar, others.row[:, None], -1).max(2)


def _inverse_norm(keys: jax.Array) -> jax.Array:
    keys = keys.astype(jnp.float32)
    return 1.0 / (jnp.sqrt((keys * keys).sum(-1)) + 1e-8)


def joint_scores(
    context: EvictContext,
    queries: jax.Array,
    in_window: jax.Array,
    *,
    first: int,
    recent: int,
    kernel: int,
    weight: float,
    tile: int,
) -> jax.Array:
    """weight * importance - (1 - weight) * redundancy of the candidates.

    Args:
      weight: of importance, in [0, 1].
      Others as in `importance` and `key_redundancy`.

    Returns:
      float32 [kv_heads, capacity], -inf for rows that are no candidates.
    """
    votes = importance(context, queries, in_window, first=first, recent=recent, kernel=kernel)
    score = weight * jnp.maximum(votes, 0.0) - (1.0 - weight) * key_redundancy(context, tile)
    return jnp.where(jnp.isfinite(votes), score, -jnp.inf)
