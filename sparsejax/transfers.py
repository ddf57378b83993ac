"""Jitted programs that move rows about: copy, fork, set up, export to other memory and import again. No model involved.

    state = copy_pages(state, source, target)
    exported = export_rows(state, head_pages)
    state = import_rows(state, head_pages, exported)
    parked = park_row(state, row)
    state = unpark_row(state, row, parked, table, lengths, position, counts, granularity=...)

The state is donated, except by exports, which gather into separate buffers. `to_host` and `to_device` move such buffers
through page-locked memory, at the full speed of the bus and while the device works (an H200: 51 GB/s both ways, where
copies to and from NumPy's memory reach 2 and 10).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from sparsejax.state import KVState


@functools.partial(jax.jit, donate_argnames=("state",))
def copy_pages(state: KVState, source: jax.Array, target: jax.Array) -> KVState:
    """Copies head-pages with their aux.

    Args:
      state: donated.
      source, target: int32 [n] head-pages; pad with 0, the null page.
    """
    copy = {name: array.at[target].set(array[source]) for name, array in state.pools.items()}
    aux = {name: array.at[target].set(array[source]) for name, array in state.page_aux.items()}
    return state.replace(pools=copy, page_aux=aux)


@functools.partial(jax.jit, static_argnames=("granularity",), donate_argnames=("state",))
def fork_row(state: KVState, source: jax.Array, target: jax.Array, updates: jax.Array, *, granularity: str) -> KVState:
    """Makes `target` a copy of row `source`: statistics, lengths, counts, and a table set by `updates`.

    Args:
      state: donated.
      source, target: int32 scalars.
      updates: int32 [n, 5] table entries of the target, as in `DecodeInputs`.
      granularity: of the method.
    """
    layer, head, row, column, page = updates.T
    table = state.tables[granularity].at[layer, head, row, column].set(page)
    lengths = state.lengths[granularity]
    return state.replace(
        row_aux={name: array.at[:, target].set(array[:, source]) for name, array in state.row_aux.items()},
        request_aux={name: array.at[target].set(array[source]) for name, array in state.request_aux.items()},
        tables={**state.tables, granularity: table},
        lengths={**state.lengths, granularity: lengths.at[:, :, target].set(lengths[:, :, source])},
        positions=state.positions.at[target].set(state.positions[source]),
        last_tokens=state.last_tokens.at[target].set(state.last_tokens[source]),
        counts=state.counts.at[target].set(state.counts[source]),
    )


@functools.partial(jax.jit, donate_argnames=("state",))
def setup_row(
    state: KVState, row: jax.Array, bias_ids: jax.Array, bias_values: jax.Array, stop_ids: jax.Array
) -> KVState:
    """Stores a new owner's logit bias and stop ids (see `KVState`)."""
    return state.replace(
        bias_ids=state.bias_ids.at[row].set(bias_ids),
        bias_values=state.bias_values.at[row].set(bias_values),
        stop_ids=state.stop_ids.at[row].set(stop_ids),
    )


class RowState(NamedTuple):
    """What belongs to a row beside its pages. Lengths are [layers, heads] of the granularity."""

    row_aux: dict[str, jax.Array]
    request_aux: dict[str, jax.Array]
    lengths: jax.Array
    position: jax.Array
    last_token: jax.Array
    counts: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    stop_ids: jax.Array


class ExportedPages(NamedTuple):
    """Head-pages off the pool: payload, positions and page aux, [n, ...] each."""

    pools: dict[str, jax.Array]
    page_aux: dict[str, jax.Array]


@jax.jit
def export_rows(state: KVState, head_pages: jax.Array) -> ExportedPages:
    """Gathers head-pages into separate buffers; the state is not donated and does not change.

    Args:
      state: the state.
      head_pages: int32 [n]; pad with 0.
    """
    pools = {name: array[head_pages] for name, array in state.pools.items()}
    return ExportedPages(pools, {name: array[head_pages] for name, array in state.page_aux.items()})


@functools.partial(jax.jit, donate_argnames=("state",))
def import_rows(state: KVState, head_pages: jax.Array, exported: ExportedPages) -> KVState:
    """Writes exported head-pages into the pool; padding goes to the null page.

    Args:
      state: donated.
      head_pages: int32 [n]; 0 for padding.
      exported: what `export_rows` gave.
    """
    pools = {name: array.at[head_pages].set(exported.pools[name]) for name, array in state.pools.items()}
    aux = {name: array.at[head_pages].set(exported.page_aux[name]) for name, array in state.page_aux.items()}
    return state.replace(pools=pools, page_aux=aux)


@functools.partial(jax.jit, static_argnames=("granularity",))
def export_row_state(state: KVState, row: jax.Array, *, granularity: str) -> RowState:
    """Everything of a row but its pages."""
    return RowState(
        {name: array[:, row] for name, array in state.row_aux.items()},
        {name: array[row] for name, array in state.request_aux.items()},
        state.lengths[granularity][:, :, row],
        state.positions[row],
        state.last_tokens[row],
        state.counts[row],
        state.bias_ids[row],
        state.bias_values[row],
        state.stop_ids[row],
    )


@functools.partial(jax.jit, static_argnames=("granularity",), donate_argnames=("state",))
def import_row_state(
    state: KVState, row: jax.Array, exported: RowState, table: jax.Array, *, granularity: str
) -> KVState:
    """Restores a row; `table` int32 [layers, heads, max_pages] is its whole new table."""
    return state.replace(
        row_aux={name: array.at[:, row].set(exported.row_aux[name]) for name, array in state.row_aux.items()},
        request_aux={name: array.at[row].set(exported.request_aux[name]) for name, array in state.request_aux.items()},
        tables={**state.tables, granularity: state.tables[granularity].at[:, :, row].set(table)},
        lengths={**state.lengths, granularity: state.lengths[granularity].at[:, :, row].set(exported.lengths)},
        positions=state.positions.at[row].set(exported.position),
        last_tokens=state.last_tokens.at[row].set(exported.last_token),
        counts=state.counts.at[row].set(exported.counts),
        bias_ids=state.bias_ids.at[row].set(exported.bias_ids),
        bias_values=state.bias_values.at[row].set(exported.bias_values),
        stop_ids=state.stop_ids.at[row].set(exported.stop_ids),
    )


def to_host(tree: Any) -> Any:
    """The arrays in host memory, once their copies have arrived; nothing waits for them."""
    return _moved(tree, "pinned_host")


def to_device(tree: Any) -> Any:
    """The reverse of `to_host`."""
    return _moved(tree, "device")


def _moved(tree: Any, memory_kind: str) -> Any:
    def move(array: jax.Array) -> jax.Array:
        return jax.device_put(array, array.sharding.with_memory_kind(memory_kind))

    return jax.tree.map(move, tree)


class ParkedState(NamedTuple):
    """What the host can't know of a row: the method's statistics."""

    row_aux: dict[str, jax.Array]
    request_aux: dict[str, jax.Array]


@jax.jit
def park_row(state: KVState, row: jax.Array) -> ParkedState:
    """The statistics of a row, in buffers of their own; the state is not donated and does not change."""
    return ParkedState(
        {name: array[:, row] for name, array in state.row_aux.items()},
        {name: array[row] for name, array in state.request_aux.items()},
    )


@functools.partial(jax.jit, static_argnames=("granularity",), donate_argnames=("state",))
def unpark_row(
    state: KVState,
    row: jax.Array,
    parked: ParkedState,
    table: jax.Array,
    lengths: jax.Array,
    position: jax.Array,
    counts: jax.Array,
    *,
    granularity: str,
) -> KVState:
    """Gives a row what was parked.

    Args:
      state: donated.
      row: int32 scalar.
      parked: from `park_row`.
      table: int32 [layers, heads, max_pages], the whole table.
      lengths: int32 [layers, heads].
      position: int32 scalar, of the next token.
      counts: int32 [vocab], see `KVState`.
      granularity: of the method.
    """
    return state.replace(
        row_aux={name: array.at[:, row].set(parked.row_aux[name]) for name, array in state.row_aux.items()},
        request_aux={name: array.at[row].set(parked.request_aux[name]) for name, array in state.request_aux.items()},
        tables={**state.tables, granularity: state.tables[granularity].at[:, :, row].set(table)},
        lengths={**state.lengths, granularity: state.lengths[granularity].at[:, :, row].set(lengths)},
        positions=state.positions.at[row].set(position),
        counts=state.counts.at[row].set(counts),
    )
