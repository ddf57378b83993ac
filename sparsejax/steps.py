"""The jitted programs that run a model: decode one token, prefill a chunk, maintain. Pure functions of a state.

    state, outputs = decode_step(statics, weights, state, inputs)
    state, outputs = prefill_chunk(statics, weights, state, inputs)
    state, ok = replay_chunk(statics, weights, state, tokens, rows, updates)
    counts = count_step(statics, state, row, observed, phase=..., kept=...)
    state = maintain_step(statics, state, inputs, phase=..., kept=...)

The state is donated: use the returned one. Shapes are static (the batch bucket, the chunk bucket, the table width);
lengths and page counts are data, so a growing context never recompiles. What happens in a layer is in
`sparsejax.forward`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.eviction import keep_more
from sparsejax.forward import Batch, Cache, Statics, layers, load_tile, payload_names
from sparsejax.method import EvictContext, Phase, Written
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import Weights
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import POSITIONS, PageView
from sparsejax.sampling import greedy_inputs as greedy_inputs
from sparsejax.sampling import sample_rows
from sparsejax.state import IN_PROMPT, KVState, layer_view


class DecodeInputs(NamedTuple):
    """One decode step of a batch bucket. Padding has row 0 everywhere.

    Attributes:
      rows: int32 [batch, 2]: row, token to append (-1: the row's last sampled token).
      ints, floats: sampling parameters, columns as in `sparsejax.sampling`.
      updates: int32 [n, 5]: (layer, head, row, column, page) table entries to set first.
    """

    rows: jax.Array
    ints: jax.Array
    floats: jax.Array
    updates: jax.Array


class PrefillInputs(NamedTuple):
    """One prompt chunk for each row of a bucket. Padding has row 0 and no tokens.

    Attributes:
      tokens: int32 [batch, chunk].
      rows: int32 [batch, 4]: row, number of tokens, first chunk of a new owner (0/1), sample (0/1).
      ints, floats, updates: as in `DecodeInputs`.
    """

    tokens: jax.Array
    rows: jax.Array
    ints: jax.Array
    floats: jax.Array
    updates: jax.Array


class MaintainInputs(NamedTuple):
    """One compaction.

    Attributes:
      row: int32 scalar.
      kept: int32 [layers, heads] (axes of the granularity): rows to keep; the length where nothing is due.
      new_pages: int32 [layers, heads, columns]: pages for the kept rows, 0 past the end and where nothing is due.
      observed: int32 scalar, tokens processed in this phase since it began or since the last compaction.
    """

    row: jax.Array
    kept: jax.Array
    new_pages: jax.Array
    observed: jax.Array


class StepOutputs(NamedTuple):
    """What a step gives back.

    Attributes:
      packed: int32 [batch, 3 + 2 * NUM_LOGPROBS]: token (-1 for rows that did not sample), ok (0/1), then float32 bits
        of its logprob, the ids and the float32 bits of the best logprobs. One small array, so one copy to the host.
      logits: float32 [batch, vocab].
    """

    packed: jax.Array
    logits: jax.Array


def update_tables(statics: Statics, state: KVState, updates: jax.Array) -> KVState:
    """Sets page table entries, `updates` as in `DecodeInputs`."""
    name = statics.method.granularity.value
    layer, head, row, column, page = updates.T
    table = state.tables[name].at[layer, head, row, column].set(page)
    return state.replace(tables={**state.tables, name: table})


def _decode_logits(
    statics: Statics, weights: Weights, state: KVState, rows: jax.Array, updates: jax.Array
) -> tuple[KVState, jax.Array]:
    name = statics.method.granularity.value
    state = update_tables(statics, state, updates)
    rows, forced = rows.T
    live = (rows != 0).astype(jnp.int32)
    tokens = jnp.where(forced >= 0, forced, state.last_tokens[rows])
    table, start = state.tables[name][:, :, rows], state.lengths[name][:, :, rows]
    batch = Batch(rows, table, start, live, state.positions[rows][:, None], tokens[:, None])
    model = get_architecture(statics.spec.architecture)
    cache = Cache(state.pools, state.page_aux, state.row_aux, state.request_aux)
    stream, cache = layers(statics, "decode", weights, model.embed(statics.spec, weights, tokens), batch, cache)
    state = state.replace(
        pools=cache.pools,
        page_aux=cache.page_aux,
        row_aux=cache.row_aux,
        request_aux=cache.request_aux,
        lengths={**state.lengths, name: state.lengths[name].at[:, :, rows].add(live[None, None, :])},
        positions=state.positions.at[rows].add(live),
    )
    return state, model.logits(statics.spec, weights, stream, statics.implementation)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def decode_logits(
    statics: Statics, weights: Weights, state: KVState, rows: jax.Array, updates: jax.Array
) -> tuple[KVState, jax.Array]:
    """Appends one token to each row of a batch: `decode_step` without its sampling.

    Args:
      statics: what the program is compiled for.
      weights: the model's weights.
      state: donated.
      rows, updates: as in `DecodeInputs`; every row needs a page for its next token.

    Returns:
      the new state, and float32 [batch, vocab].
    """
    return _decode_logits(statics, weights, state, rows, updates)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def replay_chunk(
    statics: Statics, weights: Weights, state: KVState, tokens: jax.Array, rows: jax.Array, updates: jax.Array
) -> tuple[KVState, jax.Array]:
    """Runs tokens behind a row for the sake of what the method's `observe` sees of them, and forgets them.

    Lengths, positions and token counts stay as they were: what was stored behind the row is not part of it.

    Args:
      statics: what the program is compiled for; the method must observe.
      weights: the model's weights.
      state: donated.
      tokens: int32 [batch, chunk].
      rows: int32 [batch, 3]: row, number of tokens, which replay this is. Padding has row 0 and no tokens.
      updates: as in `DecodeInputs`; pages for all tokens must be in the table.

    Returns:
      the new state, and bool [batch]: False where the model's last hidden state is not finite.
    """
    name = statics.method.granularity.value
    state = update_tables(statics, state, updates)
    rows, num_new, part = rows.T
    table, start = state.tables[name][:, :, rows], state.lengths[name][:, :, rows]
    positions = state.positions[rows][:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    batch = Batch(rows, table, start, num_new, positions, tokens, part)
    model = get_architecture(statics.spec.architecture)
    cache = Cache(state.pools, state.page_aux, state.row_aux, state.request_aux)
    stream, cache = layers(statics, "replay", weights, model.embed(statics.spec, weights, tokens), batch, cache)
    ok = jnp.isfinite(stream.x + stream.delta).all(-1)
    return state.replace(pools=cache.pools, page_aux=cache.page_aux, row_aux=cache.row_aux), ok


def _where_rows(again: jax.Array, array: jax.Array, rows: jax.Array) -> jax.Array:
    """An array per request, with zeros for the rows of a batch that have a new owner (`again` is 0)."""
    mine = array[rows]
    stays = (again != 0).reshape((-1,) + (1,) * (mine.ndim - 1))
    return array.at[rows].set(jnp.where(stays, mine, jnp.zeros((), mine.dtype)))


def _prefill_logits(
    statics: Statics, weights: Weights, state: KVState, tokens: jax.Array, rows: jax.Array, updates: jax.Array
) -> tuple[KVState, jax.Array]:
    name = statics.method.granularity.value
    state = update_tables(statics, state, updates)
    rows, num_new, first, _ = rows.T
    chunk = tokens.shape[1]
    again = 1 - first
    start = state.lengths[name][:, :, rows] * again[None, None, :]
    position = state.positions[rows] * again
    step = jnp.arange(chunk, dtype=jnp.int32)
    batch = Batch(rows, state.tables[name][:, :, rows], start, num_new, position[:, None] + step[None, :], tokens)
    model = get_architecture(statics.spec.architecture)
    kept = {name: _where_rows(again, array, rows) for name, array in state.request_aux.items()}
    cache = Cache(state.pools, state.page_aux, state.row_aux, kept)
    stream, cache = layers(statics, "prefill", weights, model.embed(statics.spec, weights, tokens), batch, cache)
    seen = jnp.where(step[None, :] < num_new[:, None], rows[:, None], 0)
    counts = state.counts.at[rows].multiply(again[:, None])
    counts = counts.at[seen, tokens].set(counts[seen, tokens] | IN_PROMPT)
    state = state.replace(
        pools=cache.pools,
        page_aux=cache.page_aux,
        row_aux=cache.row_aux,
        request_aux=cache.request_aux,
        lengths={**state.lengths, name: state.lengths[name].at[:, :, rows].set(start + num_new[None, None, :])},
        positions=state.positions.at[rows].set(position + num_new),
        counts=counts,
    )
    return state, model.logits(statics.spec, weights, stream, statics.implementation)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def prefill_logits(
    statics: Statics, weights: Weights, state: KVState, tokens: jax.Array, rows: jax.Array, updates: jax.Array
) -> tuple[KVState, jax.Array]:
    """Appends a prompt chunk to each row of a batch: `prefill_chunk` without its sampling.

    Args:
      statics: what the program is compiled for.
      weights: the model's weights.
      state: donated.
      tokens, rows, updates: as in `PrefillInputs`; pages for all new tokens must be in the table.

    Returns:
      the new state, and float32 [batch, vocab] of each row's last token.
    """
    return _prefill_logits(statics, weights, state, tokens, rows, updates)


@functools.partial(jax.jit, static_argnames=("mode", "implementation"), donate_argnames=("state",))
def sample_step(
    state: KVState,
    logits: jax.Array,
    rows: jax.Array,
    ints: jax.Array,
    floats: jax.Array,
    *,
    mode: int | None = None,
    implementation: str | None = None,
) -> tuple[KVState, jax.Array]:
    """Samples from the logits of `decode_logits` or `prefill_logits`.

    A program of its own: it is the same for every method, and a batch that needs less of it can be given a program that
    does less. An accelerator pays for a branch taken on the device with a round trip to the host.

    Args:
      state: donated.
      logits: float32 [batch, vocab].
      rows: int32 [batch, 2]: row, sample (0/1). Rows that don't sample keep their last token.
      ints, floats: sampling parameters, columns as in `sparsejax.sampling`.
      mode: GREEDY or SAMPLE of `sparsejax.sampling` if every row needs at most that and none wants logprobs; None
        serves every batch.
      implementation: kernel implementation, None or "auto" to choose.

    Returns:
      the new state, and `StepOutputs.packed`.
    """
    return sample_rows(state, logits, rows[:, 0], rows[:, 1] != 0, ints, floats, mode, implementation)


@functools.partial(jax.jit, static_argnames=("statics", "mode"), donate_argnames=("state",))
def decode_step(
    statics: Statics, weights: Weights, state: KVState, inputs: DecodeInputs, *, mode: int | None = None
) -> tuple[KVState, StepOutputs]:
    """Appends one token to each row of a batch and samples the next.

    Args:
      statics: what the program is compiled for.
      weights: the model's weights.
      state: donated.
      inputs: rows, sampling parameters and page table updates; every row needs a page for its next token.
      mode: see `sample_step`.

    Returns:
      the new state, and the sampled tokens.
    """
    state, logits = _decode_logits(statics, weights, state, inputs.rows, inputs.updates)
    rows = inputs.rows[:, 0]
    sampling = inputs.ints, inputs.floats, mode, statics.implementation
    state, packed = sample_rows(state, logits, rows, rows != 0, *sampling)
    return state, StepOutputs(packed, logits)


@functools.partial(jax.jit, static_argnames=("statics", "mode"), donate_argnames=("state",))
def prefill_chunk(
    statics: Statics, weights: Weights, state: KVState, inputs: PrefillInputs, *, mode: int | None = None
) -> tuple[KVState, StepOutputs]:
    """Appends a prompt chunk to each row of a batch; rows whose prompt ends here sample their first token.

    Args:
      statics: what the program is compiled for.
      weights: the model's weights.
      state: donated.
      inputs: tokens, rows, sampling parameters and page table updates; pages for all new tokens must be in the table.
      mode: see `sample_step`.

    Returns:
      the new state, and the sampled tokens.
    """
    state, logits = _prefill_logits(statics, weights, state, inputs.tokens, inputs.rows, inputs.updates)
    rows, wanted = inputs.rows[:, 0], inputs.rows[:, 3] != 0
    sampling = inputs.ints, inputs.floats, mode, statics.implementation
    state, packed = sample_rows(state, logits, rows, wanted, *sampling)
    return state, StepOutputs(packed, logits)


class _Eviction(NamedTuple):
    """One request before a compaction: what `EvictContext` takes of it.

    Attributes:
      table, lengths: int32 [layers, heads, 1, columns] and [layers, heads, 1] of the granularity.
    """

    statics: Statics
    state: KVState
    row: jax.Array
    observed: jax.Array
    phase: Phase
    kept: int
    table: jax.Array
    lengths: jax.Array

    @classmethod
    def of(
        cls, statics: Statics, state: KVState, row: jax.Array, observed: jax.Array, phase: Phase, kept: int
    ) -> _Eviction:
        name = statics.method.granularity.value
        table, lengths = state.tables[name][:, :, row][:, :, None], state.lengths[name][:, :, row][:, :, None]
        return cls(statics, state, row, observed, phase, kept, table, lengths)

    @property
    def cache(self) -> Cache:
        state = self.state
        return Cache(state.pools, state.page_aux, state.row_aux, state.request_aux)

    def view(self, layer: jax.Array) -> PageView:
        method = self.statics.method
        return layer_view(self.statics.geometry, method.granularity, self.table, self.lengths, layer)

    def context(self, layer: jax.Array, counts: jax.Array, survey: jax.Array | None) -> EvictContext:
        cache, view = self.cache, self.view(layer)
        return EvictContext(
            geometry=self.statics.geometry,
            phase=self.phase,
            kept=self.kept,
            counts=counts,
            layer=layer,
            row=self.row,
            view=view,
            length=view.lengths[0].max(),
            observed=self.observed,
            next_position=self.state.positions[self.row],
            pools=cache.pools,
            names=payload_names(cache),
            load_tile=load_tile(self.statics),
            page_aux=cache.page_aux,
            row_aux={aux_name: array[layer, self.row] for aux_name, array in cache.row_aux.items()},
            request_aux={aux_name: array[self.row] for aux_name, array in cache.request_aux.items()},
            survey=survey,
            implementation=self.statics.implementation,
        )

    def survey(self) -> jax.Array | None:
        """What all layers say together, before any is compacted."""
        method = self.statics.method
        survey = method.survey
        if survey is None:
            return None
        counts = jnp.full(self.lengths.shape[1], self.kept, jnp.int32)

        def of(layer):
            return survey(method.params, self.context(layer, counts, None))

        def add(layer, total):
            return jnp.maximum(total, of(layer)) if method.survey_reduction == "max" else total + of(layer)

        return jax.lax.fori_loop(1, self.statics.geometry.num_layers, add, of(jnp.int32(0)))


@functools.partial(jax.jit, static_argnames=("statics", "phase", "kept"))
def count_step(
    statics: Statics, state: KVState, row: jax.Array, observed: jax.Array, *, phase: Phase, kept: int
) -> jax.Array:
    """How many rows each head of a request keeps in a compaction: what the host needs to plan it.

    Args:
      statics: what the program is compiled for; the method must count.
      state: read only.
      row, observed: as in `MaintainInputs`.
      phase: what was just finished.
      kept: the most rows that a head keeps.

    Returns:
      int32 [layers, kv_heads].
    """
    method = statics.method
    assert method.count_rows is not None
    eviction = _Eviction.of(statics, state, row, observed, phase, kept)
    survey, most = eviction.survey(), jnp.full(statics.geometry.num_kv_heads, kept, jnp.int32)

    def of(layer):
        assert method.count_rows is not None
        return method.count_rows(method.params, eviction.context(layer, most, survey))

    return jax.lax.map(of, jnp.arange(statics.geometry.num_layers, dtype=jnp.int32))


@functools.partial(jax.jit, static_argnames=("statics", "phase", "kept"), donate_argnames=("state",))
def maintain_step(statics: Statics, state: KVState, inputs: MaintainInputs, *, phase: Phase, kept: int) -> KVState:
    """Evicts rows of one request and packs those that stay into fresh pages.

    The method says which rows stay; their payload is copied as stored, aux is rebuilt, table and lengths are replaced.
    Where layers or heads keep different numbers, those with nothing due keep their pages. The old pages of the others
    are free once this has been submitted.

    Args:
      statics: what the program is compiled for; the method must evict.
      state: donated.
      inputs: row, rows to keep, fresh pages, observed tokens.
      phase: what was just finished.
      kept: the most rows that any layer or head keeps of those where something is due.
    """
    return compact(statics, state, inputs, phase, kept)[0]


def compact(
    statics: Statics, state: KVState, inputs: MaintainInputs, phase: Phase, kept: int, asked: jax.Array | None = None
) -> tuple[KVState, jax.Array]:
    """`maintain_step`, untraced.

    Args:
      statics, state, inputs, phase, kept: see there.
      asked: int32 [layers, heads], rows that the method keeps where `inputs.kept` are up to a page more than that.

    Returns:
      the new state, and the rows that stayed, int32 [num_layers, kv_heads, most]; the first ones of each head count.
    """
    geometry, method = statics.geometry, statics.method
    name = method.granularity.value
    row = inputs.row
    eviction = _Eviction.of(statics, state, row, inputs.observed, phase, kept)
    table, lengths = eviction.table, eviction.lengths
    num_columns = inputs.new_pages.shape[2]
    kept_lengths = inputs.kept[:, :, None]
    due = kept_lengths < lengths
    new_table = jnp.zeros_like(table).at[:, :, 0, :num_columns].set(inputs.new_pages)
    most = kept if asked is None else kept + geometry.page_size - 1
    index = jnp.arange(most, dtype=jnp.int32)
    columns, offsets = (index // geometry.page_size)[None, None, :], (index % geometry.page_size)[None, None, :]
    survey = eviction.survey()
    keep_rows = method.keep_rows
    assert keep_rows is not None

    def new_view(layer: jax.Array, lengths: jax.Array = kept_lengths) -> PageView:
        return layer_view(geometry, method.granularity, new_table, lengths, layer)

    def views(layer: jax.Array) -> tuple[PageView, PageView]:
        return eviction.view(layer), new_view(layer)

    def choose(layer: jax.Array) -> jax.Array:
        """The rows of one layer that stay, int32 [heads or 1, most]."""
        old, new = views(layer)
        wanted = new if asked is None else new_view(layer, asked[:, :, None])
        context = eviction.context(layer, jnp.minimum(wanted.lengths[0], kept), survey)
        keep = keep_rows(method.params, context)
        if asked is not None:
            keep = keep_more(keep, context.counts, new.lengths[0], old.lengths[0], most)
        return keep

    def pack(layer: jax.Array, cache: Cache) -> Cache:
        """Rebuilds what belongs to the rows of one layer."""
        new = new_view(layer)
        # Read where they went, not where they came from: then nothing needs the pools as they were.
        target = new.pages_at(columns)  # [1, kv_heads, kept]
        target = jnp.where(index[None, None] < new.lengths[:, :, None], target, 0)
        rows = {pool: array[target, offsets] for pool, array in cache.pools.items()}
        positions = rows.pop(POSITIONS)
        keys, values = load_tile(statics)(rows, layer)
        if method.rotary == "row":
            moved_up = index[None, None] - stayed[layer][None]
            keys = get_architecture(statics.spec.architecture).turn(statics.spec, keys, moved_up)
            payload = statics.storage.encode(statics.storage.params, geometry, layer, keys, values)
            turned = {pool: cache.pools[pool].at[target, offsets].set(rows) for pool, rows in payload.items()}
            cache = cache._replace(pools=cache.pools | turned)
        if method.on_write is None:
            return cache
        written = Written(
            phase="pack",
            rows=row[None],
            layer=layer,
            keys=jnp.moveaxis(keys, 1, 2),
            queries=None,
            positions=positions[:, 0],
            head_pages=target.swapaxes(1, 2),
            offsets=offsets.swapaxes(1, 2),
            num_valid=new.lengths.max(1),
            implementation=statics.implementation,
            next_positions=eviction.state.positions[row][None],
        )
        page_aux, row_aux = method.on_write(method.params, geometry, cache.page_aux, cache.row_aux, written)
        return cache._replace(page_aux=dict(page_aux), row_aux=dict(row_aux))

    stayed = jax.lax.map(choose, jnp.arange(geometry.num_layers, dtype=jnp.int32))
    cache = eviction.cache
    rows = {**cache.pools, **{aux_name: cache.page_aux[aux_name] for aux_name in per_token(statics)}}
    rows = api.move_layers(rows, stayed, views, implementation=statics.implementation)
    page_aux = {aux_name: rows.pop(aux_name, array) for aux_name, array in cache.page_aux.items()}
    cache = cache._replace(pools=rows, page_aux=page_aux)
    if method.on_write is not None or method.rotary == "row":
        cache = jax.lax.fori_loop(0, geometry.num_layers, pack, cache)
    now = jnp.where(due[..., None], new_table, table)[:, :, 0]
    state = state.replace(
        pools=cache.pools,
        page_aux=cache.page_aux,
        row_aux=cache.row_aux,
        tables={**state.tables, name: state.tables[name].at[:, :, row].set(now)},
        lengths={**state.lengths, name: state.lengths[name].at[:, :, row].set(inputs.kept)},
    )
    return state, jnp.broadcast_to(stayed, (geometry.num_layers, geometry.num_kv_heads, most))


def per_token(statics: Statics) -> list[str]:
    """Names of the method's arrays that have an entry for each stored row."""
    specs = statics.method.aux_specs(statics.geometry)
    return [name for name, spec in specs.items() if spec.per == "token"]


def table_updates(row: int, pages: np.ndarray, first_column: int = 0, width: int | None = None) -> np.ndarray:
    """The `updates` that give a row pages.

    Args:
      row: row id, from 1.
      pages: int [layers, heads, columns] page ids (axes of the method's granularity; [1, 1, columns] for a sequence).
      first_column: table column of the first page.
      width: pads with updates of the null row, so that one compiled program takes any number of them.

    Returns:
      int32 [width or number of pages, 5].
    """
    layer, head, column = np.indices(pages.shape, np.int32).reshape(3, -1)
    updates = np.stack([layer, head, np.full_like(layer, row), column + first_column, pages.reshape(-1)], axis=1)
    if width is not None and len(updates) > width:
        raise ValueError(f"{len(updates)} page table updates do not fit width={width}")
    return np.pad(updates, ((0, (width or len(updates)) - len(updates)), (0, 0))).astype(np.int32)
