"""The rows of a chain between its turns: pages of the pool, or parts in host memory and on disk."""

from __future__ import annotations

import dataclasses

import numpy as np

from sparsejax.cache.chain import Tier
from sparsejax.cache.chain_store import SavedPart
from sparsejax.cache.radix_records import Lease
from sparsejax.memory import SwapSpace
from sparsejax.plans import ParkedRow, SwappedRow
from sparsejax.rows import RowPages


@dataclasses.dataclass(eq=False)
class Part:
    """Some pages of a chain, and the state that it had when they were copied.

    Attributes:
      start, stop: int32 [layers, heads], the columns of each head that it holds.
      nbytes: host memory that it takes while it is there.
      swapped: in host memory, or None.
      space: where that memory is counted, or None.
      saved: on disk, by the chain in whose folder.
      owners: records that name it.
      leases: writers and readers that need its memory.
    """

    start: np.ndarray
    stop: np.ndarray
    nbytes: int
    swapped: SwappedRow | None = None
    space: SwapSpace | None = None
    saved: dict[str, SavedPart] = dataclasses.field(default_factory=dict)
    owners: int = 0
    leases: int = 0

    @property
    def num_pages(self) -> int:
        return int((self.stop - self.start).sum())

    def pages(self, table: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Where its pages belong: int32 [layers, heads, width], -1 for those it has not, 0 for those nobody needs.

        Args:
          table: int32 [layers, heads, width], the pages of the row.
          columns: int32 [layers, heads], how many of them each head has.
        """
        width = max(int(self.stop.max()), table.shape[-1])
        whole = np.zeros((*table.shape[:2], width), np.int32)
        whole[..., : table.shape[-1]] = table
        column = np.arange(width)
        whole[column >= columns[..., None]] = 0
        whole[(column < self.start[..., None]) | (column >= self.stop[..., None])] = -1
        return whole


@dataclasses.dataclass(eq=False)
class StoredRows:
    """Rows of a chain off the device: `lengths` of them, of which the newest `extra` are to be taken back.

    Attributes:
      method: whose.
      parts: later ones replace pages of earlier ones; the state is that of the last one.
      lengths: int32 [layers, heads].
      extra: see above.
      visible: a restart would find them.
      loading: their parts on disk are being read.
      bounced: they were on the device ahead of their turn and had to leave it.
      moved_s: seconds that bringing them nearer has taken since the turn before.
    """

    method: str
    parts: list[Part]
    lengths: np.ndarray
    extra: int = 0
    visible: bool = False
    loading: bool = False
    bounced: bool = False
    moved_s: float = 0.0

    @property
    def in_memory(self) -> bool:
        return all(part.swapped is not None for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Host memory that they take, or would."""
        return sum(part.nbytes for part in self.parts)

    def readable(self, chain_id: str) -> bool:
        """Nothing of it is lost."""
        return all(part.swapped is not None or chain_id in part.saved for part in self.parts)


@dataclasses.dataclass(eq=False)
class DeviceRows:
    """Rows of a chain in the pool. Owns one reference of each page.

    Attributes:
      copy: the same rows off the device, if that was made.
      lease: of those of its pages that others may begin with.
    """

    method: str
    pages: RowPages
    parked: ParkedRow
    copy: StoredRows | None = None
    lease: Lease | None = None


Rows = DeviceRows | StoredRows


def lengths_of(payload: Rows) -> np.ndarray:
    """Rows of each layer and head."""
    return payload.pages.lengths if isinstance(payload, DeviceRows) else payload.lengths - payload.extra


def size_of(payload: Rows) -> int:
    """What dropping it frees at most: head-pages, or bytes."""
    return payload.pages.head_pages if isinstance(payload, DeviceRows) else payload.nbytes


def tier_of(payload: Rows) -> Tier:
    """Where they are."""
    if isinstance(payload, DeviceRows):
        return Tier.DEVICE
    return Tier.HOST if payload.in_memory else Tier.DISK
