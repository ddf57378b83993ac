"""The jitted programs of recall: dropped rows are packed, scored by a turn's queries, and stand in front of a row.

    state, dropped = spill_step(statics, state, inputs, asked, phase=..., kept=..., width=...)
    packed = pack_rows(statics, state, dropped, first, pages=...)
    state, queries, total = probe_rows(statics, weights, state, tokens, numbers, updates)
    logits, rows, total = page_logits(statics, queries, total, keys, counts)
    votes, rows = page_votes(logits, rows, total, heads=...)
    state = adopt_pages(state, packed, head_pages)
    state = build_page_aux(statics, state, table, lengths)
    state = set_table(state, row, table, lengths, shift, granularity=..., counters=...)

The state is donated, except where rows are packed.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.forward import Statics, load_tile
from sparsejax.geometry import Geometry
from sparsejax.method import Aux, ObserveContext, Phase, Written
from sparsejax.models.spec import Weights
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import POSITIONS
from sparsejax.probe_steps import probing, run_probe
from sparsejax.state import KVState, layer_view
from sparsejax.steps import MaintainInputs, compact, per_token, update_tables

QUERIES, MASS = "probe_queries", "probe_mass"
VOTERS = 16
"""Queries at the end of a prompt that say which dropped rows it needs. More of them say less: most look elsewhere."""
COLUMNS = 8
"""Pages of a head whose aux is built at once."""


class Dropped(NamedTuple):
    """What a compaction left behind.

    Attributes:
      rows: int32 [num_layers, kv_heads, width], the rows that stayed, ascending; the first ones of each head count.
      table: int32 [layers, heads, columns] of the granularity, where all rows were.
      lengths, kept: int32 [layers, heads], rows before and after.
    """

    rows: jax.Array
    table: jax.Array
    lengths: jax.Array
    kept: jax.Array


class PackedPages(NamedTuple):
    """Dropped rows in pages of their own, as they were stored: [num_layers, kv_heads, pages, page_size, ...].

    Attributes:
      pools: payload and positions.
      page_aux: the method's arrays per stored row.
    """

    pools: dict[str, jax.Array]
    page_aux: dict[str, jax.Array]


@functools.partial(jax.jit, static_argnames=("statics", "phase", "kept", "width"), donate_argnames=("state",))
def spill_step(
    statics: Statics, state: KVState, inputs: MaintainInputs, asked: jax.Array, *, phase: Phase, kept: int, width: int
) -> tuple[KVState, Dropped]:
    """A compaction that drops whole pages: a few rows more stay than the method asks for, the newest of the others.

    Args:
      statics: what the program is compiled for; the method must evict.
      state: donated.
      inputs: as for `steps.maintain_step`; each head drops a multiple of the page size.
      asked: int32 [layers, heads], rows that the method keeps; at most page_size - 1 fewer than `inputs.kept`.
      phase: what was just finished.
      kept: the most rows that the method keeps of those heads where something is due.
      width: of `Dropped.rows`, at least `kept` + page_size - 1: one `pack_rows` serves all compactions.

    Returns:
      the new state, and where the dropped rows still are until their pages are written again.
    """
    name = statics.method.granularity.value
    table, lengths = state.tables[name][:, :, inputs.row], state.lengths[name][:, :, inputs.row]
    state, rows = compact(statics, state, inputs, phase, kept, asked)
    rows = jnp.broadcast_to(rows, (rows.shape[0], statics.geometry.num_kv_heads, rows.shape[2]))
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, width - rows.shape[2])))
    return state, Dropped(rows, table, lengths, jnp.minimum(inputs.kept, lengths))


@functools.partial(jax.jit, static_argnames=("statics", "pages"))
def pack_rows(statics: Statics, state: KVState, dropped: Dropped, first: jax.Array, *, pages: int) -> PackedPages:
    """Gathers some pages of dropped rows, in row order.

    Args:
      statics: what the program is compiled for.
      state: not donated; no page of the row may have been written since the compaction.
      dropped: from `spill_step`.
      first: int32 scalar, the first page.
      pages: how many. What is past a head's last page is anything.
    """
    geometry, grain = statics.geometry, statics.method.granularity
    page = geometry.page_size
    index = first * page + jnp.arange(pages * page, dtype=jnp.int32)
    table, lengths, kept = dropped.table[:, :, None], dropped.lengths[:, :, None], dropped.kept[:, :, None]
    arrays = {**state.pools, **{name: state.page_aux[name] for name in per_token(statics)}}

    def of(layer: jax.Array) -> dict[str, jax.Array]:
        view = layer_view(geometry, grain, table, lengths, layer)
        stays = layer_view(geometry, grain, table, kept, layer).lengths[0][:, None]  # [heads or 1, 1]
        rows = dropped.rows[layer]
        step = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
        before = jnp.where(step < stays, rows - step, jnp.iinfo(jnp.int32).max)  # dropped rows before each that stayed
        row = index[None] + jax.vmap(lambda line: jnp.searchsorted(line, index, side="right"))(before).astype(jnp.int32)
        row = jnp.clip(row, 0, view.table.shape[2] * page - 1)[None]
        head_pages, offsets = view.pages_at(row // page)[0], (row % page)[0]
        found = {name: array[head_pages, offsets] for name, array in arrays.items()}
        return {name: rows.reshape(rows.shape[0], pages, page, *rows.shape[2:]) for name, rows in found.items()}

    found = jax.lax.map(of, jnp.arange(geometry.num_layers, dtype=jnp.int32))
    return PackedPages({name: found[name] for name in state.pools}, {name: found[name] for name in per_token(statics)})


@functools.partial(jax.jit, donate_argnames=("state",))
def adopt_pages(state: KVState, packed: PackedPages, head_pages: jax.Array) -> KVState:
    """Writes packed rows into pages of the pool.

    Args:
      state: donated.
      packed: from `pack_rows`.
      head_pages: int32 [num_layers, kv_heads, pages]; 0 for what is not to be written.
    """

    def write(arrays: dict[str, jax.Array], rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: a.at[head_pages].set(rows[name]) if name in rows else a for name, a in arrays.items()}

    return state.replace(pools=write(state.pools, packed.pools), page_aux=write(state.page_aux, packed.page_aux))


def _record(params: Any, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written) -> tuple[Aux, Aux]:
    assert written.queries is not None
    return page_aux, {**row_aux, QUERIES: row_aux[QUERIES].at[written.layer].set(written.queries[0])}


def _sum_up(params: Any, context: ObserveContext) -> tuple[Aux, Aux]:
    """What the queries make of the rows that the chain still has, and of the tokens before them."""
    index = jnp.arange(context.queries.shape[1], dtype=jnp.int32)[None, None]
    limit = jnp.where(index < context.num_valid[:, None, None], context.start[:, :, None] + index + 1, 0)
    lse = api.attention_lse(
        context.queries,
        context.pools,
        context.names,
        context.view,
        limit,
        load_tile=context.load_tile,
        layer=context.layer,
        scale=context.geometry.scale,
        implementation=context.implementation,
    )
    return context.page_aux, {**context.row_aux, MASS: context.row_aux[MASS].at[context.layer].set(lse[0])}


def probe_statics(statics: Statics) -> Statics:
    """The same model and storage under a method that only takes queries down."""
    return probing(statics, "probe", on_write=_record, observe=_sum_up)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def probe_rows(
    statics: Statics, weights: Weights, state: KVState, tokens: jax.Array, numbers: jax.Array, updates: jax.Array
) -> tuple[KVState, jax.Array, jax.Array]:
    """Runs tokens behind a row for the sake of their queries, and forgets them: lengths and positions stay.

    Args:
      statics: from `probe_statics`.
      weights: the model's weights.
      state: donated.
      tokens: int32 [1, chunk].
      numbers: int32 [3]: row, number of tokens, position of the first.
      updates: as in `steps.DecodeInputs`; pages for all tokens must be in the table.

    Returns:
      the new state; of the last VOTERS tokens the queries [num_layers, VOTERS, q_heads, head_dim], and float32
      [num_layers, VOTERS, q_heads] the log-sum-exp of their logits with all they see; -inf where there is no token.
    """
    geometry, name = statics.geometry, statics.method.granularity.value
    state = update_tables(statics, state, updates)
    rows, num_new = numbers[:1], numbers[1:2]
    table, start = state.tables[name][:, :, rows], state.lengths[name][:, :, rows]
    shape = geometry.num_layers, tokens.shape[1], geometry.num_q_heads, geometry.head_dim
    aux = {QUERIES: jnp.zeros(shape, geometry.dtype), MASS: jnp.zeros(shape[:3], jnp.float32)}
    cache = run_probe(statics, weights, state.pools, tokens, table, start, num_new, numbers[2], aux)
    last = num_new - VOTERS + jnp.arange(VOTERS, dtype=jnp.int32)
    queries, total = (jnp.take(cache.row_aux[name], jnp.maximum(last, 0), axis=1) for name in (QUERIES, MASS))
    return state.replace(pools=cache.pools), queries, jnp.where(last[None, :, None] >= 0, total, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("statics",))
def page_logits(
    statics: Statics,
    queries: jax.Array,
    total: jax.Array,
    keys: dict[str, jax.Array],
    counts: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What queries think of some pages, as the log-sum-exp of the logits with their rows.

    Args:
      statics: what the program is compiled for.
      queries, total: from `probe_rows`; `total` may have seen other pages.
      keys: the storage's `key_arrays` of packed pages, [num_layers, kv_heads, pages, page_size, ...].
      counts: int32 [num_layers, kv_heads], pages that are there.

    Returns:
      float32 [num_layers, VOTERS, q_heads, pages]; int16 of this shape, the row of each page that matches best; and
      `total` with these pages.
    """
    geometry, storage = statics.geometry, statics.storage
    heads, (pages, page) = geometry.num_kv_heads, next(iter(keys.values())).shape[2:4]
    others = {name: spec for name, spec in storage.payload(storage.params, geometry).items() if name not in keys}

    def of(layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = {name: array[layer].reshape(1, heads, pages * page, *array.shape[4:]) for name, array in keys.items()}
        rows |= {
            name: jnp.zeros((1, heads, pages * page, *spec.shape[1:]), spec.dtype) for name, spec in others.items()
        }
        decoded, _ = load_tile(statics)(rows, layer)
        asked = queries[layer].astype(jnp.float32).reshape(VOTERS, heads, -1, geometry.head_dim)
        logits = jnp.einsum(
            "wgmd,gnd->wgmn", asked, decoded[0].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        logits = geometry.scale * logits.reshape(*logits.shape[:3], pages, page)
        there = jnp.arange(pages, dtype=jnp.int32)[None] < counts[layer][:, None]
        found = jnp.where(there[None, :, None], jax.nn.logsumexp(logits, axis=-1), -jnp.inf)
        return found.reshape(VOTERS, -1, pages), logits.argmax(-1).astype(jnp.int16).reshape(VOTERS, -1, pages)

    found, rows = jax.lax.map(of, jnp.arange(geometry.num_layers, dtype=jnp.int32))
    return found, rows, jnp.where(total > -jnp.inf, jnp.logaddexp(total, jax.nn.logsumexp(found, axis=-1)), total)


@functools.partial(jax.jit, static_argnames=("heads",))
def page_votes(logits: jax.Array, rows: jax.Array, total: jax.Array, *, heads: int) -> tuple[jax.Array, jax.Array]:
    """The attention that each page would get, squared and summed over queries: those that look at many count little.

    Args:
      logits, rows: from `page_logits`.
      total: from the last `page_logits` of all pages; -inf where there is no query.
      heads: KV heads.

    Returns:
      float32 [num_layers, kv_heads, pages], and int32 of this shape: the row that the surest query looks at.
    """
    share = jnp.where(total[..., None] > -jnp.inf, jnp.exp(2.0 * (logits - total[..., None])), 0.0)

    def by_page(array: jax.Array) -> jax.Array:
        """[num_layers, kv_heads, pages, queries of the head]."""
        split = array.reshape(*array.shape[:2], heads, -1, array.shape[3])
        return jnp.moveaxis(split, (2, 4), (1, 2)).reshape(array.shape[0], heads, array.shape[3], -1)

    share, rows = by_page(share), by_page(rows)
    surest = share.argmax(-1, keepdims=True)
    return share.sum(-1), jnp.take_along_axis(rows, surest, axis=3)[..., 0].astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def build_page_aux(statics: Statics, state: KVState, table: jax.Array, lengths: jax.Array) -> KVState:
    """Builds the method's arrays per page for full pages that came from elsewhere. Other arrays stay as they are.

    Args:
      statics: what the program is compiled for; the method must have `on_write`.
      state: donated.
      table: int32 [layers, heads, max_pages] of the granularity.
      lengths: int32 [layers, heads], multiples of the page size.
    """
    geometry, method = statics.geometry, statics.method
    assert method.on_write is not None
    page = geometry.page_size
    kept = [name for name, spec in method.aux_specs(geometry).items() if spec.per == "page"]
    table, lengths = table[:, :, None], lengths[:, :, None]
    table = jnp.pad(table, ((0, 0), (0, 0), (0, 0), (0, -table.shape[3] % COLUMNS)))
    index = jnp.arange(COLUMNS * page, dtype=jnp.int32)
    blocks = (lengths.max() + COLUMNS * page - 1) // (COLUMNS * page)

    def body(step: jax.Array, page_aux: dict[str, jax.Array]) -> dict[str, jax.Array]:
        layer, block = step // blocks, step % blocks
        view = layer_view(geometry, method.granularity, table, lengths, layer)
        head_pages = view.head_pages(block * COLUMNS, COLUMNS)  # [1, kv_heads, columns]
        left = jnp.clip(view.lengths - block * COLUMNS * page, 0, COLUMNS * page)
        head_pages = jnp.where(index[None, None, ::page] < left[..., None], head_pages, 0)
        target, offsets = jnp.repeat(head_pages, page, axis=2), (index % page)[None, None]
        rows = {name: array[target, offsets] for name, array in state.pools.items()}
        positions = rows.pop(POSITIONS)
        keys, _ = load_tile(statics)(rows, layer)
        written = Written(
            phase="pack",
            rows=jnp.zeros(1, jnp.int32),
            layer=layer,
            keys=jnp.moveaxis(keys, 1, 2),
            queries=None,
            positions=positions[:, 0],
            head_pages=target.swapaxes(1, 2),
            offsets=offsets.swapaxes(1, 2),
            num_valid=left.max(1),
            implementation=statics.implementation,
            next_positions=jnp.zeros(1, jnp.int32),
        )
        assert method.on_write is not None
        built, _ = method.on_write(method.params, geometry, page_aux, state.row_aux, written)
        return {**page_aux, **{name: built[name] for name in kept}}

    page_aux = jax.lax.fori_loop(0, geometry.num_layers * blocks, body, dict(state.page_aux))
    return state.replace(page_aux=page_aux)


@functools.partial(jax.jit, static_argnames=("granularity", "counters"), donate_argnames=("state",))
def set_table(
    state: KVState,
    row: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    shift: jax.Array,
    *,
    granularity: str,
    counters: tuple[str, ...],
) -> KVState:
    """Replaces a row's table and lengths: other pages stand before its own, or no longer do.

    Args:
      state: donated.
      row: int32 scalar.
      table: int32 [layers, heads, max_pages].
      lengths: int32 [layers, heads].
      shift: int32 [num_layers], rows that came before its own; negative for rows that went.
      granularity: of the method.
      counters: its arrays that count a row's stored rows (see `AuxSpec`).
    """
    row_aux = {
        name: array.at[:, row].add(shift.reshape(-1, *(1,) * (array.ndim - 2))) if name in counters else array
        for name, array in state.row_aux.items()
    }
    return state.replace(
        row_aux=row_aux,
        tables={**state.tables, granularity: state.tables[granularity].at[:, :, row].set(table)},
        lengths={**state.lengths, granularity: state.lengths[granularity].at[:, :, row].set(lengths)},
    )
