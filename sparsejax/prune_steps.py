"""The jitted programs of pruning: rows are scored by what a text's queries attend to, and packed into other pages.

    state, scores = score_rows(statics, weights, state, scores, tokens, table, numbers)
    state = pack_rows(statics, state, source, rows, target)

The state is donated.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.forward import Statics
from sparsejax.method import Aux, ObserveContext
from sparsejax.models.spec import Weights
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.probe_steps import probing, run_probe
from sparsejax.state import KVState, layer_view
from sparsejax.steps import per_token

SCORES = "row_scores"
MOST_QUERIES, QUERY_STEP = 1024, 16
"""Queries, those of all query heads of a KV head together, that see the rows at once: no kernel takes more. Those of a
query head come in multiples, to which kernels pad them."""


def score_statics(statics: Statics) -> Statics:
    """The same model and storage under a method that scores rows."""
    return probing(statics, "score", observe=_observe)


def queries_at_once(group_size: int) -> int:
    """Queries of each query head that a kernel takes at once."""
    most = max(1, MOST_QUERIES // group_size)
    return most - most % QUERY_STEP or most


def _observe(params: Any, context: ObserveContext) -> tuple[Aux, Aux]:
    """Scores the rows before a chunk in one layer; what the chunk's own rows get is nobody's."""
    queries = context.queries.shape[1]
    size = min(queries, queries_at_once(context.geometry.group_size))
    index = jnp.arange(queries, dtype=jnp.int32)[None, None]
    valid, before = index < context.num_valid[:, None, None], context.start[:, :, None]
    own, limit = jnp.where(valid, before + index + 1, 0), jnp.where(valid, before, 0)

    def of(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, own, limit = part
        rows = q, context.pools, context.names, context.view
        how: dict[str, Any] = {"load_tile": context.load_tile, "layer": context.layer}
        how |= {"scale": context.geometry.scale, "implementation": context.implementation}
        lse = api.attention_lse(*rows, own, **how)
        return api.row_scores(*rows, limit, lse=lse, over="max", **how)[0].max(0)

    def parts(array: jax.Array, axis: int) -> jax.Array:
        extra = [(0, -queries % size if i == axis else 0) for i in range(array.ndim)]
        return jnp.stack(jnp.split(jnp.pad(array, extra), -(-queries // size), axis))

    found = jax.lax.map(of, (parts(context.queries, 1), parts(own, 2), parts(limit, 2))).max(0)
    return context.page_aux, {SCORES: jnp.maximum(context.row_aux[SCORES], found)}


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def score_rows(
    statics: Statics,
    weights: Weights,
    state: KVState,
    scores: jax.Array,
    tokens: jax.Array,
    table: jax.Array,
    numbers: jax.Array,
) -> tuple[KVState, jax.Array]:
    """The largest share of attention that a token's query gives each row, in any layer and query head.

    Args:
      statics: from `score_statics`.
      weights: the model's weights.
      state: donated. No row of it takes part.
      scores: float32 [capacity], of earlier texts; zeros at first.
      tokens: int32 [1, chunk].
      table: int32 [layers, heads, max_pages] of the granularity: the pages of the rows, then those that the tokens' own
        rows pass through.
      numbers: int32 [3]: rows, number of tokens, position of the first.

    Returns:
      the new state, and float32 [capacity]: the larger of `scores` and those of this text, 0 past the last row.
    """
    start = jnp.broadcast_to(numbers[0], (*table.shape[:2], 1))
    found = run_probe(
        statics, weights, state.pools, tokens, table[:, :, None], start, numbers[1:2], numbers[2], {SCORES: scores}
    )
    return state.replace(pools=found.pools), found.row_aux[SCORES]


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def pack_rows(statics: Statics, state: KVState, source: jax.Array, rows: jax.Array, target: jax.Array) -> KVState:
    """Copies rows to the beginning of other pages, as they are stored, with the method's arrays per row.

    Its arrays per page are for `recall_steps.build_page_aux`.

    Args:
      statics: what the program is compiled for.
      state: donated.
      source: int32 [layers, heads, max_pages] of the granularity.
      rows: int32 [columns * page_size], indexes into `source`, the same in all layers and heads.
      target: int32 [layers, heads, columns], none of them in `source`; 0 for what is not to be written.
    """
    geometry = statics.geometry

    def views(layer: jax.Array) -> tuple[PageView, PageView]:
        old, new = (
            layer_view(geometry, statics.method.granularity, table[:, :, None], lengths, layer)
            for table, lengths in ((source, source[:, :, :1]), (target, target[:, :, :1]))  # lengths are not read
        )
        return old, new

    arrays = {**state.pools, **{name: state.page_aux[name] for name in per_token(statics)}}
    moves = jnp.broadcast_to(rows, (geometry.num_layers, 1, len(rows)))
    moved = api.move_layers(arrays, moves, views, implementation=statics.implementation)
    page_aux = {name: moved.pop(name, array) for name, array in state.page_aux.items()}
    return state.replace(pools=moved, page_aux=page_aux)
