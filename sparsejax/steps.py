"""The jitted programs that run a model: decode one token, prefill a chunk, maintain. Pure functions of a state.

    state, outputs = decode_step(statics, weights, state, inputs)
    state, outputs = prefill_chunk(statics, weights, state, inputs)
    state = maintain_step(statics, state, plan, kind=..., phase=..., kept=...)

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

from sparsejax.forward import Batch, Cache, Statics, layers, load_tile, payload_names
from sparsejax.method import EvictContext, Phase, Written
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import Weights
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import POSITIONS
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
      new_pages: int32 [layers, heads, columns] (axes of the granularity): pages for the kept rows.
      observed: int32 scalar, tokens processed in this phase since it began or since the last compaction.
    """

    row: jax.Array
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


def _update_tables(statics: Statics, state: KVState, updates: jax.Array) -> KVState:
    name = statics.method.granularity.value
    layer, head, row, column, page = updates.T
    table = state.tables[name].at[layer, head, row, column].set(page)
    return state.replace(tables={**state.tables, name: table})


def _decode_logits(
    statics: Statics, weights: Weights, state: KVState, rows: jax.Array, updates: jax.Array
) -> tuple[KVState, jax.Array]:
    name = statics.method.granularity.value
    state = _update_tables(statics, state, updates)
    rows, forced = rows.T
    live = (rows != 0).astype(jnp.int32)
    tokens = jnp.where(forced >= 0, forced, state.last_tokens[rows])
    table, start = state.tables[name][:, :, rows], state.lengths[name][:, :, rows]
    batch = Batch(rows, table, start, live, state.positions[rows][:, None])
    model = get_architecture(statics.spec.architecture)
    cache = Cache(state.pools, state.page_aux, state.row_aux)
    stream, cache = layers(statics, "decode", weights, model.embed(statics.spec, weights, tokens), batch, cache)
    state = state.replace(
        pools=cache.pools,
        page_aux=cache.page_aux,
        row_aux=cache.row_aux,
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


def _prefill_logits(
    statics: Statics, weights: Weights, state: KVState, tokens: jax.Array, rows: jax.Array, updates: jax.Array
) -> tuple[KVState, jax.Array]:
    name = statics.method.granularity.value
    state = _update_tables(statics, state, updates)
    rows, num_new, first, _ = rows.T
    chunk = tokens.shape[1]
    again = 1 - first
    start = state.lengths[name][:, :, rows] * again[None, None, :]
    position = state.positions[rows] * again
    step = jnp.arange(chunk, dtype=jnp.int32)
    batch = Batch(rows, state.tables[name][:, :, rows], start, num_new, position[:, None] + step[None, :])
    model = get_architecture(statics.spec.architecture)
    cache = Cache(state.pools, state.page_aux, state.row_aux)
    stream, cache = layers(statics, "prefill", weights, model.embed(statics.spec, weights, tokens), batch, cache)
    seen = jnp.where(step[None, :] < num_new[:, None], rows[:, None], 0)
    counts = state.counts.at[rows].multiply(again[:, None])
    counts = counts.at[seen, tokens].set(counts[seen, tokens] | IN_PROMPT)
    state = state.replace(
        pools=cache.pools,
        page_aux=cache.page_aux,
        row_aux=cache.row_aux,
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


@functools.partial(jax.jit, static_argnames=("statics", "phase", "kept"), donate_argnames=("state",))
def maintain_step(statics: Statics, state: KVState, inputs: MaintainInputs, *, phase: Phase, kept: int) -> KVState:
    """Evicts one request down to `kept` rows per layer and head and packs them into fresh pages.

    The method says which rows stay; their payload is copied as stored, aux is rebuilt, table and lengths are replaced.
    The old pages are free once this has been submitted.

    Args:
      statics: what the program is compiled for; the method must evict.
      state: donated.
      inputs: row, fresh pages, observed tokens.
      phase: what was just finished.
      kept: rows to keep, fewer than the request holds.
    """
    geometry, method = statics.geometry, statics.method
    keep_rows = method.keep_rows
    assert keep_rows is not None
    name = method.granularity.value
    row = inputs.row
    table, lengths = state.tables[name][:, :, row][:, :, None], state.lengths[name][:, :, row][:, :, None]
    num_columns = inputs.new_pages.shape[2]
    new_table = jnp.zeros_like(table).at[:, :, 0, :num_columns].set(inputs.new_pages)
    kept_lengths = jnp.full_like(lengths, kept)
    index = jnp.arange(kept, dtype=jnp.int32)
    columns, offsets = (index // geometry.page_size)[None, None, :], (index % geometry.page_size)[None, None, :]

    def body(layer, cache: Cache) -> Cache:
        old = layer_view(geometry, method.granularity, table, lengths, layer)
        new = layer_view(geometry, method.granularity, new_table, kept_lengths, layer)
        context = EvictContext(
            geometry=geometry,
            phase=phase,
            kept=kept,
            layer=layer,
            view=old,
            length=old.lengths[0, 0],
            observed=inputs.observed,
            next_position=state.positions[row],
            pools=cache.pools,
            names=payload_names(cache),
            load_tile=load_tile(statics),
            row_aux={aux_name: array[layer, row] for aux_name, array in cache.row_aux.items()},
            implementation=statics.implementation,
        )
        keep = keep_rows(method.params, context)[None]  # [1, heads or 1, kept]
        pools = api.move_rows(cache.pools, keep, old, new, implementation=statics.implementation)
        cache = cache._replace(pools=pools)
        if method.on_write is None:
            return cache
        # Read where they went, not where they came from: then nothing needs the pools as they were.
        target = new.pages_at(columns)  # [1, kv_heads, kept]
        rows = {pool: array[target, offsets] for pool, array in pools.items()}
        positions = rows.pop(POSITIONS)
        keys, _ = load_tile(statics)(rows, layer)
        written = Written(
            phase="pack",
            rows=row[None],
            layer=layer,
            keys=jnp.moveaxis(keys, 1, 2),
            queries=None,
            positions=positions[:, 0],
            head_pages=target.swapaxes(1, 2),
            offsets=offsets.swapaxes(1, 2),
            num_valid=jnp.full((1,), kept, jnp.int32),
            implementation=statics.implementation,
        )
        page_aux, row_aux = method.on_write(method.params, geometry, cache.page_aux, cache.row_aux, written)
        return cache._replace(page_aux=dict(page_aux), row_aux=dict(row_aux))

    cache = jax.lax.fori_loop(0, geometry.num_layers, body, Cache(state.pools, state.page_aux, state.row_aux))
    return state.replace(
        pools=cache.pools,
        page_aux=cache.page_aux,
        row_aux=cache.row_aux,
        tables={**state.tables, name: state.tables[name].at[:, :, row].set(new_table[:, :, 0])},
        lengths={**state.lengths, name: state.lengths[name].at[:, :, row].set(kept)},
    )


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
