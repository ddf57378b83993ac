"""Importance minus redundancy of resident rows (arXiv 2505.24133): what some methods that evict while decoding rank by.

Nothing here holds an array of rows x rows: similarities exist one tile at a time, and only as far as rows are resident.
"""

from __future__ import annotations

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
    rows = heads * capacity * (4 * window + 8)
    tile = heads * tile_rows * (tile_rows + 4 * geometry.head_dim)
    return 4 * (rows + tile)


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
    of all keys less what was set to 0, so similarities are only searched for that column, from the last one down.

    Args:
      context: the request in one layer.
      tile: rows of a tile, a multiple of the page size.

    Returns:
      float32 [kv_heads, capacity]; rows past the end hold 0.
    """
    pools, names, length, layer = context.pools, context.names, context.length, context.layer
    heads, page_size = context.geometry.num_kv_heads, context.geometry.page_size
    columns = tile // page_size
    view = pad_columns(context.view, columns)
    capacity = view.table.shape[2] * page_size
    num_tiles = (length + tile - 1) // tile
    step = jnp.arange(tile, dtype=jnp.int32)

    def load(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys [kv_heads, tile, head_dim], 0 past the end, and the inverses of their norms."""
        keys, _ = load_block(pools, names, view.head_pages(index * columns, columns), context.load_tile, layer)
        keys = jnp.where((index * tile + step < length)[None, :, None], keys[0], 0)
        return keys, _inverse_norm(keys)

    def add_keys(index: jax.Array, total: jax.Array) -> jax.Array:
        keys, inverse = load(index)
        return total + (keys.astype(jnp.float32) * inverse[..., None]).sum(1)

    total = jax.lax.fori_loop(0, num_tiles, add_keys, jnp.zeros((heads, context.geometry.head_dim), jnp.float32))

    def last_similar(index: jax.Array, keys: jax.Array, inverse: jax.Array) -> jax.Array:
        """The largest similar row of each, int32 [kv_heads, tile]; 0 without any."""
        row = index * tile + step

        def search(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            other, last = state
            against, scale = load(other)
            cosine = jnp.einsum(
                "hrd,hcd->hrc",
                keys,
                against,
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            column = other * tile + step
            similar = cosine * inverse[..., None] * scale[:, None] > SIMILAR
            similar &= (column[None, :] != row[:, None])[None]
            return other - 1, jnp.maximum(last, jnp.where(similar, column[None, None], -1).max(2))

        def missing(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (state[0] >= 0) & ((state[1] < 0) & (row < length)[None]).any()

        start = num_tiles - 1, jnp.full((heads, tile), -1, jnp.int32)
        return jnp.maximum(jax.lax.while_loop(missing, search, start)[1], 0)

    # What was set to 0 is added up in fixed point: the order of a float scatter is not fixed on GPUs.
    bits = 29 - capacity.bit_length()
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]

    def add_rows(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, dropped = carry
        keys, inverse = load(index)
        last = last_similar(index, keys, inverse)
        pages = view.pages_at(last[None] // page_size)
        found = {name: pools[name][pages, last[None] % page_size] for name in names}
        match = context.load_tile(found, layer)[0][0]
        unit, match = (x.astype(jnp.float32) * _inverse_norm(x)[..., None] for x in (keys, match))
        cosine = jnp.where(last == (index * tile + step)[None], 0.0, (unit * match).sum(2))
        dropped = dropped.at[head, last].add(jnp.round(cosine * 2.0**bits).astype(jnp.int32))
        own = (unit * (total[:, None] - unit)).sum(2)
        return jax.lax.dynamic_update_slice(sums, own, (0, index * tile)), dropped

    empty = jnp.zeros((heads, capacity), jnp.float32)
    sums, dropped = jax.lax.fori_loop(0, num_tiles, add_rows, (empty, empty.astype(jnp.int32)))
    mean = (sums - dropped.astype(jnp.float32) * 2.0**-bits) / length.astype(jnp.float32)
    valid = jnp.arange(capacity, dtype=jnp.int32) < length
    mean = jnp.where(valid[None], mean, -jnp.inf)
    mass = jnp.exp(mean - mean.max(1, keepdims=True))
    return (mass / mass.sum(1, keepdims=True))[:, : context.view.table.shape[2] * page_size]


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
