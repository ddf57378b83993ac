"""Where the rows of a chain are between its turns: the pool, host memory or disk, and which go when room is short.

Order of loss on the device: checkpoints, idle chains, least valuable first, prefixes that conversations share, and last
chains that wait for their turn. Chains go one tier down: to the host, from there to disk, if a snapshot of them is
there, and then away.

With a directory every finished turn is copied off the device and written in the background, so that leaving the device
costs nothing later; of pages that the turn before left and that have not changed, no second copy is made. Without one
copies are made ahead only while pages are short. Copies and what they are based on give way to whatever needs the
memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sparsejax.cache.chain import Chain, ChainState, Tier
from sparsejax.cache.pages import IntegrityError
from sparsejax.chain_host import owned, passing
from sparsejax.chain_rows import DeviceRows, Part, StoredRows, size_of, tier_of
from sparsejax.chain_snapshots import DiskTier
from sparsejax.errors import RequestError
from sparsejax.launches import call_runner
from sparsejax.plans import ParkedRow, SwappedRow
from sparsejax.rows import RowPages, Sequence

LEAVING_BYTES = 1 << 30
"""Copies of idle chains that may be under way, all in device memory; others come later."""
_MOST_PARTS = 8  # of one snapshot; then it is copied whole again
_SHORT = 0.5  # share of the pool that is held, from which on copies are made ahead


class Tiers(DiskTier):
    """Moves the rows of chains between the tiers. The engine thread's.

    Args:
      runner: moves rows.
      memory: rows and pages.
      settings: budgets.
      clock: seconds, monotonic.
      ids: issues chain ids.
      disk: the third tier, if there is one.

    Attributes:
      host: memory of the host tier.
      staging: memory of rows on their way to or from disk.
      fields: gives what a method's fingerprint is made of.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._expired_s = self._clock()
        self._reclaimable = (-1, 0)  # as of so many changes of the index
        self._first: tuple[int, float, list[Chain]] = (-1, 0.0, [])  # as of so many changes: those that go first
        self._held: dict[Chain, tuple[int, int]] = {}  # version of each chain, and its head-pages on the device
        self._leaving: list[SwappedRow] = []  # copies under way, which take device memory until they are there

    # Room on the device.

    def reclaimable(self, seq: Sequence | None = None) -> int:
        """At most so many head-pages come free if every chain but that of `seq` leaves the device."""
        changes, found = self._reclaimable
        if changes != self.index.changes:  # asked for every waiting request in every step
            held, known = {}, self._held
            for chain in self.index.chains.values():
                version, pages = known.get(chain, (-1, 0))
                if version != chain.version:
                    rows = (chain.payload, *(c.payload for c in chain.checkpoints))
                    pages = sum(size_of(r) for r in rows if isinstance(r, DeviceRows))
                held[chain] = chain.version, pages
            found = sum(pages for _, pages in held.values())
            self._held, self._reclaimable = held, (self.index.changes, found)
        own = seq.chain.payload if seq is not None and seq.chain is not None else None
        return found + self.spare_pages() - (size_of(own) if isinstance(own, DeviceRows) else 0)

    def reclaim(
        self,
        keep: Chain | None = None,
        own_checkpoints: bool = False,
        forget: Callable[[Chain], bool] | None = None,
    ) -> bool:
        """One step towards free pages: blocks nobody has, checkpoints, idle chains, shared prefixes, waiting turns.

        Of a block and an idle chain the less valuable one goes first. Returns False if there is nothing left to take.
        Of `keep` at most checkpoints are taken, and these last. Those that wait go to the host; what has no room there
        is given up only by `forget`.
        """
        block = self.block_value()
        if block is not None:
            first = self._first_victim(keep)
            spare = first is None or block <= self.index.value(first, self._clock())
            if spare and self.give_blocks():
                return True
        victims = [chain for chain in self.index.victims() if chain is not keep]
        others = (*victims, *self._others(keep, set(victims)))
        for chain in others:
            if any(c.kind != "prefix" for c in chain.checkpoints):
                return self.index.drop_checkpoints(chain, prefixes=False) > 0
        twin = _twin(others)
        if twin is not None:
            return self.index.drop_checkpoints(twin) > 0
        if victims:
            if passing(victims[0]) or not self.demote(victims[0]):
                self.index.drop(victims[0], "evicted")
            return True
        for chain in others:  # a conversation on the host comes back, what new ones begin with does not
            if chain.checkpoints:
                return self.index.drop_checkpoints(chain) > 0
        waiting = [
            c
            for c in self.index.chains.values()
            if c.state is ChainState.RESTORING and c.tier is Tier.DEVICE and c.payload is not None and c is not keep
        ]
        waiting.sort(key=lambda c: -c.used_tick)
        if any(self.demote(chain) or (forget is not None and forget(chain)) for chain in waiting):
            return True
        return own_checkpoints and keep is not None and self.index.drop_checkpoints(keep) > 0

    def _first_victim(self, keep: Chain | None) -> Chain | None:
        """The idle chain that goes first, looked for again only if chains have changed, or a second later.

        Blocks go one page at a time: with each of them all chains would be sorted.
        """
        changes, looked_s, first = self._first
        if changes != self.index.changes or self._clock() - looked_s > 1.0:
            first = self.index.victims()[:2]
            self._first = self.index.changes, self._clock(), first
        return next((chain for chain in first if chain is not keep), None)

    def _others(self, keep: Chain | None, victims: set[Chain]) -> list[Chain]:
        return [c for c in self.index.chains.values() if c is not keep and c not in victims]

    def demote(self, chain: Chain) -> bool:
        """Frees a chain's pages; its rows are copied to the host if they are not yet. Returns False if that is full."""
        rows = chain.payload
        assert isinstance(rows, DeviceRows)
        stored = rows.copy
        if stored is None or not (stored.in_memory or stored.visible):
            pages = rows.pages.count
            persist = self._persistent(chain)
            if not self.make_host_room(rows.method, pages, None) and not persist:
                return False
            swapped = call_runner(self._runner.export_parked, rows.method, rows.pages.padded(-1), rows.parked)
            whole = self.store(rows.method, swapped, rows.pages.lengths, staged=persist)
            if whole is None:
                return False
            if stored is not None:
                self._let_go(stored)
            stored = whole
            if persist and not self._save(chain, stored) and stored.parts[0].space is self.staging:
                self._let_go(stored)
                rows.copy = None
                return False
        stored.bounced = chain.busy
        rows.copy = None
        self._place(chain, stored)
        self.release(rows)
        self.index.counts["demoted"] += 1
        return True

    # Turns.

    def begin(self, chain: Chain, rows: StoredRows | None) -> None:
        """A turn begins to write what was `rows`: they are what it can go back to, and what its copy is based on."""
        late = self._late.pop(chain.chain_id, None)
        if late is not None:
            self._let_go(late)
        if rows is not None:
            self._bases[chain.chain_id] = rows

    def take_base(self, chain: Chain) -> StoredRows | None:
        """What an active chain was before its turn, if that can still be had. The caller owns it."""
        base = self._bases.pop(chain.chain_id, None)
        if base is not None and (base.in_memory or base.visible):
            return base
        if base is not None:
            self._let_go(base)
        return None

    def keep(self, chain: Chain) -> None:
        """Copies an idle chain off the device, if that is wanted: what changed in its last turn. Waits for nothing."""
        base = self._bases.pop(chain.chain_id, None)
        if isinstance(chain.payload, DeviceRows) and not self.may_leave():
            self._late[chain.chain_id] = base
        else:
            self._keep(chain, base)

    def keep_late(self, at_once: bool = False) -> None:
        """Copies chains for which there were too many copies under way."""
        while self._late and (at_once or self.may_leave()):
            chain_id = next(iter(self._late))
            base, chain = self._late.pop(chain_id), self.index.chains[chain_id]
            if chain.state is ChainState.IDLE and isinstance(chain.payload, DeviceRows):
                self._keep(chain, base)
            elif base is not None:
                self._let_go(base)

    @property
    def unsettled(self) -> bool:
        """Something is under way, or has to be yet."""
        return bool(self._late) or (self.disk is not None and self.disk.pending.total() > 0)

    def leaving(self, swapped: SwappedRow) -> None:
        """A copy is under way."""
        self._leaving.append(swapped)

    def may_leave(self) -> bool:
        """Another copy may be under way."""
        self._leaving = [swapped for swapped in self._leaving if not self._runner.arrived(swapped)]
        return sum(swapped.nbytes for swapped in self._leaving) < LEAVING_BYTES

    def _keep(self, chain: Chain, base: StoredRows | None) -> None:
        rows = chain.payload
        persist = self._persistent(chain)
        if isinstance(rows, DeviceRows):
            if rows.copy is None and (persist or (self._short() and not passing(chain))):
                rows.copy = self._copy_out(chain, rows, base, persist)
            stored = rows.copy
        else:
            stored = rows
        if persist and stored is not None and not self._save(chain, stored):
            self._unstage(chain, stored)
        if base is not None:
            self._let_go(base)

    def _short(self) -> bool:
        pool = self._memory.pool
        return pool.free_head_pages < (1.0 - _SHORT) * pool.num_head_pages

    def _copy_out(self, chain: Chain, rows: DeviceRows, base: StoredRows | None, persist: bool) -> StoredRows | None:
        pages, method = rows.pages, rows.method
        columns, parts = pages.columns.copy(), []
        start = np.zeros_like(columns)
        fixed = not self._runner.limits.methods[method].private_rows
        if base is not None and fixed and base.readable(chain.chain_id) and len(base.parts) < _MOST_PARTS:
            same = np.minimum(pages.unchanged // pages.page_size, columns).astype(np.int32)
            copied = sum(part.num_pages for part in base.parts) + int((columns - same).sum())
            if same.any() and copied <= 2 * pages.count:
                start, parts = same, list(base.parts)
        part = Part(start, columns, 0)
        table = part.pages(pages.padded(0), columns)
        try:
            swapped = call_runner(self._runner.export_parked, method, table, rows.parked)
        except RequestError:
            return None
        self.leaving(swapped)
        part.nbytes = swapped.nbytes
        if not self._hold(part, swapped, method, drop_chains=False, staged=persist):
            return None
        pages.mark()
        self.index.counts["pages_copied"] += part.num_pages
        self.index.counts["pages_unchanged"] += pages.count - part.num_pages
        return owned(StoredRows(method, [*parts, part], pages.lengths.copy()))

    def fork(self, rows: StoredRows) -> StoredRows:
        """A second record of the same parts."""
        return owned(dataclasses.replace(rows, parts=list(rows.parts), visible=False, loading=False, bounced=False))

    def restore(self, rows: StoredRows, pages: RowPages) -> ParkedRow:
        """Copies rows in memory to `pages`, which have room for them. Raises RequestError."""
        method, table, columns = rows.method, pages.padded(0), pages.columns.copy()
        parked: Any = None
        for part in rows.parts:
            parked = call_runner(self._runner.import_parked, method, part.pages(table, columns), part.swapped)
        if rows.extra:
            parked = call_runner(self._runner.trim, method, parked, rows.extra)
            pages.truncate(rows.extra)
        if not rows.extra:
            pages.mark()
        return parked

    def advance(self, waiting: Iterable[Sequence]) -> None:
        """Brings the rows of queued turns nearer, in their order, as far as there is room for them."""
        for seq in waiting:
            chain = seq.chain
            if chain is None or seq.begun or not isinstance(chain.payload, StoredRows):
                continue
            rows = chain.payload
            if not rows.in_memory:
                if not rows.loading and not self._load(rows):
                    return
            elif not rows.bounced and not self._promote(chain, rows):
                return

    def bring(self, chain: Chain) -> bool:
        """One step towards an idle chain being on the device. Returns whether it is there."""
        rows = chain.payload
        if isinstance(rows, StoredRows) and not rows.in_memory and not rows.loading:
            self._load(rows)
        elif isinstance(rows, StoredRows) and rows.in_memory:
            self._promote(chain, rows)
        return isinstance(chain.payload, DeviceRows)

    def _promote(self, chain: Chain, rows: StoredRows) -> bool:
        granularity, began_s = self._runner.limits.methods[rows.method].granularity, self._clock()
        pages = self._memory.restore_aside(granularity, rows.lengths)
        if pages is None:
            return False
        try:
            parked = self.restore(rows, pages)
        except RequestError:
            self._memory.take_up(pages)
            pages.release()
            rows.bounced = True  # once more when the row is there
            return True
        payload = DeviceRows(rows.method, pages, parked, rows)
        self.index.place(chain, payload, size_of(payload), Tier.DEVICE)
        rows.moved_s += self._clock() - began_s
        self.index.counts["promoted"] += 1
        return True

    # Time.

    def expire(self) -> None:
        """Chains that were idle for too long go a tier down."""
        now = self._clock()
        if now - self._expired_s < 1.0:
            return
        self._expired_s = now
        for chain in self.index.expired(self._settings.chain_ttl_s):
            if chain.tier is Tier.DEVICE and not passing(chain) and self.demote(chain):
                self.index.drop_checkpoints(chain)
            elif self.lower(chain):
                continue
            elif chain.tier is Tier.HOST and any(part.leases for part in chain.payload.parts):
                continue  # it is being written
            elif chain.tier is not Tier.DISK or now - max(chain.used_s, chain.placed_s) > self._disk_ttl_s(chain):
                self.index.drop(chain, "expired")

    def _disk_ttl_s(self, chain: Chain) -> float:
        return self._settings.chain_disk_ttl_s if chain.ttl_s is None else chain.ttl_s

    def check_integrity(self, turns: list[Sequence]) -> None:
        """Re-adds pages and bytes. `turns` are the choices with a chain. Raises IntegrityError."""
        rows: list[Any] = [*self._bases.values(), *(base for base in self._late.values() if base is not None)]
        for chain in self.index.chains.values():
            rows += [chain.payload, *(c.payload for c in chain.checkpoints)]
            if chain.payload is not None and tier_of(chain.payload) is not chain.tier:
                raise IntegrityError(f"chain {chain.chain_id} is not in tier {chain.tier.name}")
        if not set(self._bases) <= {c.chain_id for c in self.index.chains.values() if c.state is ChainState.ACTIVE}:
            raise IntegrityError("something is kept to go back to that no turn may go back to")
        stored = [r for r in rows if isinstance(r, StoredRows)]
        stored += [r.copy for r in rows if isinstance(r, DeviceRows) and r.copy is not None]
        owners: dict[Part, int] = {}
        for record in stored:
            for part in record.parts:
                owners[part] = owners.get(part, 0) + 1
        if any(part.owners != count for part, count in owners.items()):
            raise IntegrityError("a part of a chain's rows has other owners than it counts")
        for space, name in ((self.host, "host memory"), (self.staging, "staging memory")):
            held = sum(part.nbytes for part in owners if part.space is space)
            if space is self.host and self.hosted is not None:
                held += self.hosted.used_bytes
            leased = self.disk is not None and self.disk.pending.total() > 0  # parts of chains that have ended
            if held > space.used_bytes or (held < space.used_bytes and not leased):
                raise IntegrityError(f"the chains' {name} is miscounted: {space.used_bytes} for {held} B")
        if self.disk is not None:
            there = sum(s.nbytes for s in self.disk.snapshots.values())
            if there != self.disk.used_bytes or (self.disk.reserved_bytes and not self.disk.pending):
                raise IntegrityError("the chains' disk space is miscounted")
        shelf = {id(r.pages) for r in rows if isinstance(r, DeviceRows)}
        shelf |= {id(seq.pages) for seq in turns if seq.parked is not None}
        if shelf != set(self._memory.shelf):
            raise IntegrityError("pages without a row belong to no chain")


def _twin(chains: Iterable[Chain]) -> Chain | None:
    """A chain with a shared prefix that another one keeps too."""
    known: set[tuple[bytes, bytes]] = set()
    for chain in chains:
        for checkpoint in chain.checkpoints:
            if checkpoint.kind == "prefix":
                prefix = chain.seed, chain.ledger[: checkpoint.processed].tobytes()
                if prefix in known:
                    return chain
                known.add(prefix)
    return None
