"""Rows that left the device: pages and statistics in host memory, and the same as named arrays for files."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from sparsejax import transfers
from sparsejax.plans import SwappedRow
from sparsejax.state import KVState


class Exported:
    """A row on its way to host memory. Device buffers live until their copies have arrived.

    Attributes:
      arrays: `RowState` or `ParkedState`, and a list of `ExportedPages` of one size each, the last one padded.
      num_head_pages: without padding.
    """

    def __init__(
        self,
        row_state: transfers.RowState | transfers.ParkedState,
        blocks: list[transfers.ExportedPages],
        num_head_pages: int,
    ) -> None:
        self.arrays: Any = transfers.to_host((row_state, blocks))
        self.num_head_pages = num_head_pages


def swapped(exported: Exported) -> SwappedRow:
    """With its size."""
    return SwappedRow(exported, sum(leaf.nbytes for leaf in jax.tree.leaves(exported.arrays)))


def pack(row: SwappedRow) -> dict[str, np.ndarray]:
    """What continues a row, by name: pages without padding, and what a method keeps beside them. Waits for the copy.

    Dtypes that NumPy does not know are given as unsigned integers of their size.
    """
    exported: Exported = row.payload
    row_state, blocks = exported.arrays
    arrays = {}
    for kind in ("row_aux", "request_aux"):
        arrays |= {f"{kind}.{name}": np.asarray(array) for name, array in getattr(row_state, kind).items()}
    for kind in ("pools", "page_aux"):
        for name in getattr(blocks[0], kind) if blocks else ():
            whole = np.concatenate([np.asarray(getattr(block, kind)[name]) for block in blocks])
            arrays[f"{kind}.{name}"] = whole[: exported.num_head_pages]
    return {name: _plain(array) for name, array in arrays.items()}


def unpack(arrays: dict[str, np.ndarray], state: KVState, block_size: int) -> SwappedRow:
    """The reverse of `pack`, in page-locked memory.

    Args:
      arrays: from `pack`.
      state: whose dtypes and shapes they must have.
      block_size: head-pages of one block.

    Raises:
      ValueError: they are not of this state.
    """
    like = {
        "row_aux": {name: (array.dtype, (array.shape[0], *array.shape[2:])) for name, array in state.row_aux.items()},
        "request_aux": {name: (array.dtype, array.shape[1:]) for name, array in state.request_aux.items()},
        "pools": {name: (array.dtype, array.shape[1:]) for name, array in state.pools.items()},
        "page_aux": {name: (array.dtype, array.shape[1:]) for name, array in state.page_aux.items()},
    }
    found: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in like}
    for key, array in arrays.items():
        kind, _, name = key.partition(".")
        if name not in like.get(kind, {}):
            raise ValueError(f"{key} is no array of this engine")
        dtype, shape = like[kind][name]
        if array.dtype.itemsize != dtype.itemsize or array.shape[len(array.shape) - len(shape) :] != shape:
            raise ValueError(f"{key} is {array.dtype}{array.shape}, not {dtype}{shape}")
        found[kind][name] = array.view(dtype)
    sizes = {len(array) for kind in ("pools", "page_aux") for array in found[kind].values()}
    if len(sizes) > 1 or (sizes and found["pools"].keys() != like["pools"].keys()):
        raise ValueError("the pages have not all their arrays")
    count = sizes.pop() if sizes else 0
    host = next(iter(state.pools.values())).sharding.with_memory_kind("pinned_host")
    blocks = [
        transfers.ExportedPages(
            *(
                {name: jax.device_put(_block(array, start, block_size), host) for name, array in found[kind].items()}
                for kind in ("pools", "page_aux")
            )
        )
        for start in range(0, count, block_size)
    ]
    row_state = transfers.ParkedState(
        *(
            {name: jax.device_put(array, host) for name, array in found[kind].items()}
            for kind in ("row_aux", "request_aux")
        )
    )
    return swapped(Exported(row_state, blocks, count))


def _plain(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _block(array: np.ndarray, start: int, size: int) -> np.ndarray:
    block = np.zeros((size, *array.shape[1:]), array.dtype)
    part = array[start : start + size]
    block[: len(part)] = part
    return block
