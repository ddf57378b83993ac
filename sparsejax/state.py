"""The device state of an engine: one pytree, donated to every step and updated in place."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from sparsejax.arrays import ArraySpec, tree_empty, tree_nbytes
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import Method
from sparsejax.pallas_kernels.layout import POSITIONS, PageView
from sparsejax.storage import Storage

MAX_BIAS = 256
MAX_STOP_IDS = 32
IN_PROMPT = 1 << 30
"""Bit of `KVState.counts` that marks tokens of the prompt; the bits below count generated ones."""


class KVState(struct.PyTreeNode):
    """Everything that lives between steps.

    Row 0 of every per-row array and page 0 of every granularity are null: padding reads and writes them.

    Attributes:
      pools: the storage's payload and "positions" (int32, of each row), [num_head_pages, page_size, ...].
      page_aux: method arrays per head-page, [num_head_pages, ...], or per stored row, [num_head_pages, page_size, ...].
      row_aux: method arrays per layer and row, [num_layers, num_rows + 1, ...].
      request_aux: method arrays per row, [num_rows + 1, ...].
      tables: page tables by granularity, int32 [layers, heads, num_rows + 1, max_pages].
      lengths: resident rows by granularity, int32 [layers, heads, num_rows + 1].
      positions: int32 [num_rows + 1], logical position of the next token.
      last_tokens: int32 [num_rows + 1], sampled but not yet appended.
      counts: int32 [num_rows + 1, vocab], generated tokens and the `IN_PROMPT` bit, for penalties.
      bias_ids, bias_values: [num_rows + 1, MAX_BIAS] logit bias; unused entries add 0 to id 0.
      stop_ids: int32 [num_rows + 1, MAX_STOP_IDS] ids that `min_tokens` masks; unused entries are -1.
    """

    pools: dict[str, jax.Array]
    page_aux: dict[str, jax.Array]
    row_aux: dict[str, jax.Array]
    request_aux: dict[str, jax.Array]
    tables: dict[str, jax.Array]
    lengths: dict[str, jax.Array]
    positions: jax.Array
    last_tokens: jax.Array
    counts: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    stop_ids: jax.Array


@dataclasses.dataclass(frozen=True)
class StateSize:
    """How much to allocate: resident rows (null row not counted), sequence pages (null page counted), vocabulary."""

    num_rows: int
    num_sequence_pages: int
    vocab_size: int


def state_specs(geometry: Geometry, size: StateSize, methods: tuple[Method, ...], storage: Storage) -> KVState:
    """The state's arrays as specs, for methods that share a storage.

    Raises:
      MethodError: two methods declare one aux name with different specs.
    """
    num_head_pages = size.num_sequence_pages * geometry.head_pages_per_sequence_page
    rows = size.num_rows + 1
    pools = {
        name: dataclasses.replace(spec, shape=(num_head_pages, *spec.shape), axes=("head_page", *spec.axes))
        for name, spec in storage.payload(storage.params, geometry).items()
    }
    pools[POSITIONS] = ArraySpec((num_head_pages, geometry.page_size), "int32", ("head_page", "row"))
    entries = {
        "page": ((num_head_pages,), ("head_page",)),
        "token": ((num_head_pages, geometry.page_size), ("head_page", "row")),
        "row": ((geometry.num_layers, rows), ("layer", "request")),
        "request": ((rows,), ("request",)),
    }
    aux: dict[str, dict[str, ArraySpec]] = {per: {} for per in entries}
    for method in methods:
        for name, spec in method.aux_specs(geometry).items():
            shape, axes = entries[spec.per]
            array = ArraySpec((*shape, *spec.shape), spec.dtype or geometry.dtype, axes)
            if aux[spec.per].setdefault(name, array) != array:
                raise MethodError(f"{method.name} and another served method need different {name!r} arrays")
    used = {method.granularity for method in methods}
    tables, lengths = {}, {}
    for granularity in Granularity:
        if granularity in used:
            shape = (*geometry.table_shape(granularity), rows)
            tables[granularity.value] = ArraySpec((*shape, geometry.max_pages), "int32")
            lengths[granularity.value] = ArraySpec(shape, "int32")
    specs: dict[str, Any] = {
        "pools": pools,
        "page_aux": aux["page"] | aux["token"],
        "row_aux": aux["row"],
        "request_aux": aux["request"],
        "tables": tables,
        "lengths": lengths,
        "positions": ArraySpec((rows,), "int32"),
        "last_tokens": ArraySpec((rows,), "int32"),
        "counts": ArraySpec((rows, size.vocab_size), "int32"),
        "bias_ids": ArraySpec((rows, MAX_BIAS), "int32"),
        "bias_values": ArraySpec((rows, MAX_BIAS), "float32"),
        "stop_ids": ArraySpec((rows, MAX_STOP_IDS), "int32", fill=-1),
    }
    return KVState(**specs)  # a state of specs has the same tree as a state of arrays


def empty_state(geometry: Geometry, size: StateSize, methods: tuple[Method, ...], storage: Storage) -> KVState:
    """A fresh state: nothing resident."""
    return tree_empty(state_specs(geometry, size, methods, storage))


def sequence_page_nbytes(geometry: Geometry, methods: tuple[Method, ...], storage: Storage) -> int:
    """Bytes that one more sequence page costs, page aux and positions included."""
    one = state_specs(geometry, StateSize(0, 1, 1), methods, storage)
    return tree_nbytes((one.pools, one.page_aux))


def fixed_nbytes(
    geometry: Geometry, num_rows: int, vocab_size: int, methods: tuple[Method, ...], storage: Storage
) -> int:
    """Bytes of the per-row state, independent of the number of pages."""
    specs = state_specs(geometry, StateSize(num_rows, 0, vocab_size), methods, storage)
    return tree_nbytes(specs)


def layer_view(
    geometry: Geometry, granularity: Granularity, table: jax.Array, lengths: jax.Array, layer: jax.Array
) -> PageView:
    """The pages of some rows in one layer.

    Args:
      geometry: shapes.
      granularity: of the table.
      table: int32 [layers or 1, heads or 1, batch, columns].
      lengths: int32 [layers or 1, heads or 1, batch].
      layer: int32 scalar.
    """
    if table.shape[0] == 1:
        table, lengths = table[0], lengths[0]
    else:
        table = jax.lax.dynamic_index_in_dim(table, layer, 0, keepdims=False)
        lengths = jax.lax.dynamic_index_in_dim(lengths, layer, 0, keepdims=False)
    heads = jnp.arange(geometry.num_kv_heads, dtype=jnp.int32)
    if granularity is Granularity.SEQUENCE:
        stride, offset = geometry.head_pages_per_sequence_page, layer * geometry.num_kv_heads + heads
    elif granularity is Granularity.LAYER:
        # A layer page id already says which layer's share of a slab it is, so only heads remain.
        stride, offset = geometry.num_kv_heads, heads
    else:
        stride, offset = 1, jnp.zeros_like(heads)
    return PageView(table.swapaxes(0, 1), stride, offset, lengths.swapaxes(0, 1))
