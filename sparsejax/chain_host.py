"""Host memory of chains: rows that left the pool, copies of rows that are still in it, and what goes if it is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from sparsejax.cache.chain import Chain, ChainIds, Tier
from sparsejax.cache.chain_index import ChainIndex
from sparsejax.cache.radix_records import Lease
from sparsejax.chain_disk import Disk
from sparsejax.chain_rows import DeviceRows, Part, Rows, StoredRows, size_of, tier_of
from sparsejax.cost import prefill_cost
from sparsejax.memory import Memory, SwapSpace
from sparsejax.plans import Runner, SwappedRow
from sparsejax.settings import EngineSettings

STAGING_BYTES = 1 << 30
"""Host memory for rows on their way to and from disk that the host tier has no room for."""


class BlockMemory(Protocol):
    """Other host memory in the same budget, which gives way to chains.

    Attributes:
      used_bytes: of the budget.
    """

    used_bytes: int

    def give_way(self) -> bool:
        """Frees some. Returns False if there is nothing left."""
        ...


class HostTier:
    """Chains, and the rows of them that are off the device. See `chain_tiers.Tiers`."""

    def __init__(
        self,
        runner: Runner,
        memory: Memory,
        settings: EngineSettings,
        clock: Callable[[], float],
        ids: ChainIds,
        disk: Disk | None = None,
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._settings = settings
        self._clock = clock
        self.host = SwapSpace(settings.chain_host_bytes)
        self.staging = SwapSpace(STAGING_BYTES)
        self.disk = disk
        self.index = ChainIndex(
            ids,
            self.release,
            clock,
            cost=lambda tokens: prefill_cost(memory.geometry, 0, tokens),
            max_checkpoints=max(1, settings.chain_checkpoints),
        )
        self._bases: dict[str, StoredRows] = {}  # what active chains were before their turn
        self.unlease: Callable[[Lease], None] = lambda lease: None  # the radix cache's
        self.give_blocks: Callable[[], bool] = lambda: False
        self.spare_pages: Callable[[], int] = lambda: 0
        self.block_value: Callable[[], float | None] = lambda: None
        self.hosted: BlockMemory | None = None  # blocks of the radix cache in host memory
        self._late: dict[str, StoredRows | None] = {}  # idle chains to be copied, and what those copies are based on

    def lower(self, chain: Chain) -> bool:
        """Frees the host memory of an idle chain that is on disk too. Returns False if it is not."""
        if chain.tier is not Tier.HOST or not self._to_disk(chain.payload):
            return False
        self._place(chain, chain.payload)
        self.index.counts["moved_to_disk"] += 1
        return True

    @property
    def host_bytes(self) -> int:
        """Host memory in use, that of rows on their way to and from disk included."""
        return self.host.used_bytes + self.staging.used_bytes

    @property
    def disk_bytes(self) -> int:
        """Disk space in use."""
        return self.disk.used_bytes if self.disk is not None else 0

    def store(
        self, method: str, swapped: SwappedRow, lengths: np.ndarray, extra: int = 0, staged: bool = False
    ) -> StoredRows | None:
        """Whole rows that are in host memory from now on; None if it has no room for them."""
        columns = self._columns(lengths)
        part = Part(np.zeros_like(columns), columns, swapped.nbytes)
        if not self._hold(part, swapped, method, drop_chains=True, staged=staged):
            return None
        return owned(StoredRows(method, [part], lengths.copy(), extra))

    def _hold(self, part: Part, swapped: SwappedRow, method: str, drop_chains: bool, staged: bool) -> bool:
        """Counts a part's memory. Returns False if there is no room."""
        room = self.host.fits(part.nbytes) or self._make_room(part.nbytes, drop_chains)
        if room and self.host.put(method, part.num_pages, part.nbytes):
            part.space = self.host
        elif staged and (self.staging.fits(part.nbytes) or not self.staging.used_bytes):
            self.staging.used_bytes += part.nbytes
            part.space = self.staging
        else:
            return False
        part.swapped = swapped
        return True

    def make_host_room(self, method: str, pages: int, nbytes: int | None) -> bool:
        """Frees host memory until so many bytes, or what so many pages are expected to take, fit."""
        if nbytes is None:
            return self.host.has_room(method, pages) or self._make_room(None, True, method, pages)
        return self.host.fits(nbytes) or self._make_room(nbytes, True)

    def _make_room(self, nbytes: int | None, drop_chains: bool, method: str = "", pages: int = 0) -> bool:
        """Lets go of copies, moves chains to disk, at last drops them, least valuable first, until there is room."""

        def done() -> bool:
            return self.host.has_room(method, pages) if nbytes is None else self.host.fits(nbytes)

        if nbytes is not None and nbytes > self.host.capacity_bytes:
            return False
        for chain_id, base in list(self._bases.items()):
            if done():
                return True
            if not self._to_disk(base):
                self._let_go(self._bases.pop(chain_id))
        while not done() and self.hosted is not None and self.hosted.give_way():
            pass
        hosted = self.index.victims(Tier.HOST)
        for chain in self._by_value([*self._copied(), *(c for c in hosted if c.payload.visible)]):
            if done():
                return True
            if isinstance(chain.payload, DeviceRows):
                self._drop_copy(chain)
            else:
                self.lower(chain)
        for chain in hosted if drop_chains else ():
            if done():
                return True
            rows = chain.payload
            if chain.tier is Tier.HOST and not rows.visible and not any(part.leases for part in rows.parts):
                self.index.drop(chain, "evicted")
        return done()

    def _copied(self) -> list[Chain]:
        chains = self.index.chains.values()
        return [c for c in chains if isinstance(c.payload, DeviceRows) and c.payload.copy is not None]

    def _by_value(self, chains: list[Chain]) -> list[Chain]:
        """Least valuable first, for the bytes that their rows take off the device."""
        now = self._clock()

        def value(chain: Chain) -> float:
            rows: StoredRows = copy_of(chain.payload) or chain.payload
            return self.index.value(chain, now) * max(1, chain.size) / max(1, rows.nbytes)

        return sorted(chains, key=lambda c: (value(c), c.used_tick, c.chain_id))

    def _drop_copy(self, chain: Chain) -> None:
        """Frees the memory of the copy of a chain that is on the device."""
        rows = chain.payload
        if not self._to_disk(rows.copy) and not any(part.leases for part in rows.copy.parts):
            self._let_go(rows.copy)
            rows.copy = None

    def _to_disk(self, rows: StoredRows) -> bool:
        """Frees the memory of rows that are on disk too. Returns False if they are not, or have other owners."""
        if not rows.visible or any(part.leases or part.owners > 1 for part in rows.parts):
            return False
        for part in rows.parts:
            empty(part)
        return True

    def release(self, payload: Rows) -> None:
        """Nobody needs these rows any more."""
        if isinstance(payload, StoredRows):
            self._let_go(payload)
            return
        if payload.copy is not None:
            self._let_go(payload.copy)
        self._memory.take_up(payload.pages)
        payload.pages.release()
        if payload.lease is not None:
            self.unlease(payload.lease)
            payload.lease = None

    def _let_go(self, rows: StoredRows) -> None:
        for part in rows.parts:
            part.owners -= 1
            if not part.owners and not part.leases:
                empty(part)

    def _columns(self, lengths: np.ndarray) -> np.ndarray:
        return (-(-lengths // self._memory.geometry.page_size)).astype(np.int32)

    def _place(self, chain: Chain, rows: StoredRows) -> None:
        self.index.place(chain, rows, size_of(rows), tier_of(rows))

    def _replace(self) -> None:
        """Some rows came to memory: chains that share them are there too."""
        for chain in self.index.chains.values():
            rows = chain.payload
            if isinstance(rows, StoredRows) and tier_of(rows) is not chain.tier:
                self._place(chain, rows)


def owned(rows: StoredRows) -> StoredRows:
    """Counts a new record of these parts."""
    for part in rows.parts:
        part.owners += 1
    return rows


def empty(part: Part) -> None:
    """Gives a part's memory back."""
    if part.space is not None:
        part.space.take(part.nbytes)
    part.swapped = part.space = None


def copy_of(payload: Rows | None) -> StoredRows | None:
    """What is off the device too, of rows that are on it."""
    return payload.copy if isinstance(payload, DeviceRows) else None


def passing(chain: Chain) -> bool:
    """No client has asked to keep it, and no second turn has shown what it is: it is not worth a copy."""
    return chain.implicit and chain.turns < 2
