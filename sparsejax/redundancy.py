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
from sparsejax.pallas_kernels.layout import few_rows

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
    tile = heads * tile_rows * (few_rows(tile_rows, geometry.page_size) + 6 * geometry.head_dim)
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
    """A softmax over the rows of how similar each resident key is to the others; see `api.key_similarity`.

    Args:
      context: the request in one layer.
      tile: rows of a tile, a multiple of the page size.

    Returns:
      float32 [kv_heads, capacity]; rows past the end hold 0.
    """
    mean = api.key_similarity(
        context.pools,
        context.names,
        context.view,
        threshold=SIMILAR,
        tile_rows=tile,
        load_tile=context.load_tile,
        layer=context.layer,
        implementation=context.implementation,
    )
    valid = jnp.arange(mean.shape[1], dtype=jnp.int32) < context.length
    mean = jnp.where(valid[None], mean, -jnp.inf)
    mass = jnp.exp(mean - mean.max(1, keepdims=True))
    return mass / mass.sum(1, keepdims=True)


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
