"""Where the rows of a chain are between its turns, in the pool or in host memory, and which go when room is short.

Order of loss: checkpoints, then idle chains, least valuable first (to the host, or away if that has no room), then
chains that wait for their turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from sparsejax.cache.chain import Chain, ChainIds, ChainState, Tier
from sparsejax.cache.chain_index import ChainIndex
from sparsejax.cache.pages import IntegrityError
from sparsejax.launches import call_runner
from sparsejax.memory import Memory, SwapSpace
from sparsejax.plans import ParkedRow, Runner, SwappedRow
from sparsejax.rows import RowPages, Sequence
from sparsejax.settings import EngineSettings


@dataclasses.dataclass(eq=False)
class DeviceRows:
    """Rows of a chain in the pool. Owns one reference of each page."""

    method: str
    pages: RowPages
    parked: ParkedRow


@dataclasses.dataclass(eq=False)
class HostRows:
    """Rows of a chain in host memory: `lengths` of them, of which the newest `extra` are to be taken back."""

    method: str
    num_pages: int
    swapped: SwappedRow
    lengths: np.ndarray
    extra: int = 0


class Tiers:
    """Moves the rows of chains between the tiers. The engine thread's.

    Args:
      runner: moves rows.
      memory: rows and pages.
      settings: budgets.
      clock: seconds, monotonic.
      ids: issues chain ids.
    """

    def __init__(
        self,
        runner: Runner,
        memory: Memory,
        settings: EngineSettings,
        clock: Callable[[], float],
        ids: ChainIds,
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._settings = settings
        self._clock = clock
        self.host = SwapSpace(settings.chain_host_bytes)
        self.index = ChainIndex(ids, self.release, clock, max_checkpoints=max(1, settings.chain_checkpoints))
        self._expired_s = clock()
        self._reclaimable = (-1, 0)  # as of so many changes of the index

    def reclaimable(self, seq: Sequence | None = None) -> int:
        """At most so many head-pages come free if every chain but that of `seq` leaves the device."""
        changes, found = self._reclaimable
        if changes != self.index.changes:  # asked for every waiting request in every step
            chains = self.index.chains.values()
            rows = [r for chain in chains for r in (chain.payload, *(c.payload for c in chain.checkpoints))]
            found = sum(size_of(r) for r in rows if isinstance(r, DeviceRows))
            self._reclaimable = self.index.changes, found
        own = seq.chain.payload if seq is not None and seq.chain is not None else None
        return found - (size_of(own) if isinstance(own, DeviceRows) else 0)

    def reclaim(
        self,
        keep: Chain | None = None,
        own_checkpoints: bool = False,
        forget: Callable[[Chain], bool] | None = None,
    ) -> bool:
        """One step towards free pages: checkpoints, then idle chains, then those that wait for their turn.

        Returns False if there is nothing left to take. Of `keep` at most checkpoints are taken, and these last. Those
        that wait go to the host; what has no room there is given up only by `forget`.
        """
        victims = [chain for chain in self.index.victims() if chain is not keep]
        for chain in (*victims, *self._others(keep, set(victims))):
            if chain.checkpoints and chain is not keep:
                return self.index.drop_checkpoints(chain) > 0
        if victims:
            # What no client has asked to keep is not worth a copy, unless a second turn has shown what it is.
            passing = victims[0].implicit and victims[0].turns < 2
            if passing or not self.demote(victims[0]):
                self.index.drop(victims[0], "evicted")
            return True
        waiting = [
            c
            for c in self.index.chains.values()
            if c.state is ChainState.RESTORING and c.tier is Tier.DEVICE and c.payload is not None and c is not keep
        ]
        waiting.sort(key=lambda c: -c.used_tick)
        if any(self.demote(chain) or (forget is not None and forget(chain)) for chain in waiting):
            return True
        return own_checkpoints and keep is not None and self.index.drop_checkpoints(keep) > 0

    def _others(self, keep: Chain | None, victims: set[Chain]) -> list[Chain]:
        return [c for c in self.index.chains.values() if c is not keep and c not in victims]

    def demote(self, chain: Chain) -> bool:
        """Copies a chain's rows to the host and frees its pages. Returns False if the host has no room."""
        rows = chain.payload
        assert isinstance(rows, DeviceRows)
        size = rows.pages.count
        if not self.make_host_room(rows.method, size, None):
            return False
        swapped = call_runner(self._runner.export_parked, rows.method, rows.pages.padded(-1), rows.parked)
        self.make_host_room(rows.method, size, swapped.nbytes)
        if not self.host.put(rows.method, size, swapped.nbytes):
            return False
        host = HostRows(rows.method, size, swapped, rows.pages.lengths.copy())
        self.index.place(chain, host, swapped.nbytes, Tier.HOST)
        self.release(rows)
        self.index.counts["demoted"] += 1
        return True

    def make_host_room(self, method: str, pages: int, nbytes: int | None) -> bool:
        """Drops the least valuable chains of the host until the bytes, or as many as are expected, fit."""
        while not (self.host.has_room(method, pages) if nbytes is None else self.host.fits(nbytes)):
            victims = self.index.victims(Tier.HOST)
            if not victims:
                return False
            self.index.drop(victims[0], "evicted")
        return True

    def expire(self) -> None:
        """Chains that were idle for too long go a tier down."""
        now = self._clock()
        if now - self._expired_s < 1.0:
            return
        self._expired_s = now
        for chain in self.index.expired(self._settings.chain_ttl_s):
            if chain.tier is Tier.HOST or not self.demote(chain):
                self.index.drop(chain, "expired")
            else:
                self.index.drop_checkpoints(chain)

    def release(self, payload: DeviceRows | HostRows) -> None:
        if isinstance(payload, HostRows):
            self.host.take(payload.swapped.nbytes)
        else:
            self._memory.take_up(payload.pages)
            payload.pages.release()

    def check_integrity(self, turns: list[Sequence]) -> None:
        """Re-adds pages and bytes. `turns` are the choices with a chain. Raises IntegrityError."""
        rows = []
        for chain in self.index.chains.values():
            rows += [chain.payload, *(c.payload for c in chain.checkpoints)]
        if sum(r.swapped.nbytes for r in rows if isinstance(r, HostRows)) != self.host.used_bytes:
            raise IntegrityError("the chains' host memory is miscounted")
        shelf = {id(r.pages) for r in rows if isinstance(r, DeviceRows)}
        shelf |= {id(seq.pages) for seq in turns if seq.parked is not None}
        if shelf != set(self._memory.shelf):
            raise IntegrityError("pages without a row belong to no chain")


def lengths_of(payload: DeviceRows | HostRows) -> np.ndarray:
    """Rows of each layer and head."""
    return payload.pages.lengths if isinstance(payload, DeviceRows) else payload.lengths - payload.extra


def size_of(payload: DeviceRows | HostRows) -> int:
    """What dropping it frees at most: head-pages, or bytes."""
    if isinstance(payload, HostRows):
        return payload.swapped.nbytes
    return payload.pages.head_pages


def tier_of(payload: DeviceRows | HostRows) -> Tier:
    """Where they are."""
    return Tier.DEVICE if isinstance(payload, DeviceRows) else Tier.HOST
