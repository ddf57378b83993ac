"""Where the rows of a chain are between its turns: the pool, host memory or disk, and which go when room is short.

Order of loss on the device: checkpoints, then idle chains, least valuable first, then chains that wait for their turn.
Each goes one tier down: to the host, from there to disk, if a snapshot of it is there, and then away.

With a directory every finished turn is copied off the device and written in the background, so that leaving the device
costs nothing later; of pages that the turn before left and that have not changed, no second copy is made. Without one
copies are made ahead only while pages are short. Copies and what they are based on give way to whatever needs the
memory.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from sparsejax.cache.chain import Chain, ChainIds, ChainState, Quality, Tier
from sparsejax.cache.chain_index import ChainIndex
from sparsejax.cache.chain_store import Record, Snapshot
from sparsejax.cache.pages import IntegrityError
from sparsejax.chain_disk import Disk, Job
from sparsejax.chain_rows import DeviceRows, Part, Rows, StoredRows, size_of, tier_of
from sparsejax.errors import RequestError
from sparsejax.launches import call_runner
from sparsejax.memory import Memory, SwapSpace
from sparsejax.plans import ParkedRow, Runner, SwappedRow
from sparsejax.rows import RowPages, Sequence
from sparsejax.settings import EngineSettings

STAGING_BYTES = 1 << 30
"""Host memory for rows on their way to and from disk that the host tier has no room for."""
_MOST_PARTS = 8  # of one snapshot; then it is copied whole again
_SHORT = 0.5  # share of the pool that is held, from which on copies are made ahead


class Tiers:
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
        self.fields: Callable[[str], Mapping[str, Any]] = lambda method: {}
        self.index = ChainIndex(ids, self.release, clock, max_checkpoints=max(1, settings.chain_checkpoints))
        self.index.on_gone = self._gone
        self._bases: dict[str, StoredRows] = {}  # what active chains were before their turn
        self._expired_s = clock()
        self._reclaimable = (-1, 0)  # as of so many changes of the index
        self._held: dict[Chain, tuple[int, int]] = {}  # version of each chain, and its head-pages on the device

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
            if _passing(victims[0]) or not self.demote(victims[0]):
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

    def lower(self, chain: Chain) -> bool:
        """Frees the host memory of an idle chain that is on disk too. Returns False if it is not."""
        if chain.tier is not Tier.HOST or not self._to_disk(chain.payload):
            return False
        self._place(chain, chain.payload)
        self.index.counts["moved_to_disk"] += 1
        return True

    # Host memory.

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
        return _owned(StoredRows(method, [part], lengths.copy(), extra))

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
            rows = chain.payload.copy if isinstance(chain.payload, DeviceRows) else chain.payload
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
            _empty(part)
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

    def _let_go(self, rows: StoredRows) -> None:
        for part in rows.parts:
            part.owners -= 1
            if not part.owners and not part.leases:
                _empty(part)

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

    # Turns.

    def begin(self, chain: Chain, rows: StoredRows | None) -> None:
        """A turn begins to write what was `rows`: they are what it can go back to, and what its copy is based on."""
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
        rows, base = chain.payload, self._bases.pop(chain.chain_id, None)
        persist = self._persistent(chain)
        if isinstance(rows, DeviceRows):
            if rows.copy is None and (persist or (self._short() and not _passing(chain))):
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
        part.nbytes = swapped.nbytes
        if not self._hold(part, swapped, method, drop_chains=False, staged=persist):
            return None
        pages.mark()
        self.index.counts["pages_copied"] += part.num_pages
        self.index.counts["pages_unchanged"] += pages.count - part.num_pages
        return _owned(StoredRows(method, [*parts, part], pages.lengths.copy()))

    def fork(self, rows: StoredRows) -> StoredRows:
        """A second record of the same parts."""
        return _owned(dataclasses.replace(rows, parts=list(rows.parts), visible=False, loading=False, bounced=False))

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

    # Disk.

    def _persistent(self, chain: Chain) -> bool:
        return self.disk is not None and not _passing(chain)

    def _save(self, chain: Chain, rows: StoredRows) -> bool:
        """Has a snapshot written. Returns False if there is no room for it, or too much is under way."""
        disk = self.disk
        assert disk is not None
        nbytes = disk.needs(chain.chain_id, rows, len(chain.ledger))
        if disk.full or not self._make_disk_room(nbytes, chain):
            self.index.counts["not_persisted"] += 1
            return False
        now_s, wall_s = self._clock(), time.time()
        record = Record(
            chain_id=chain.chain_id,
            seed=chain.seed,
            fingerprint=chain.fingerprint,
            fields=self.fields(chain.method),
            method=chain.method,
            tenant=chain.tenant,
            ledger=chain.ledger,
            processed=chain.processed,
            turns=chain.turns,
            lengths=rows.lengths,
            extra=rows.extra,
            quality=dataclasses.asdict(chain.quality),
            named=chain.named,
            parent_id=chain.parent_id,
            priority=chain.priority,
            ttl_s=chain.ttl_s,
            gap_s=chain.gap_s,
            created_s=wall_s - (now_s - chain.created_s),
            used_s=wall_s - (now_s - chain.used_s),
        )
        disk.save(record, rows)
        return True

    def _make_disk_room(self, nbytes: int, keep: Chain | None) -> bool:
        """Deletes snapshots until so many bytes are free: those of no use here, chains on disk, then mere copies."""
        disk = self.disk
        assert disk is not None
        if nbytes > disk.capacity_bytes:
            return False
        strangers = sorted(disk.incompatible, key=lambda i: disk.snapshots[i].record.used_s)
        for chain_id in strangers:
            if disk.fits(nbytes):
                return True
            disk.forget(chain_id)
            self.index.counts["incompatible_deleted"] += 1
        for chain in self.index.victims(Tier.DISK):
            if disk.fits(nbytes):
                return True
            if chain is not keep and not disk.pending[chain.chain_id]:
                self.index.drop(chain, "evicted")
        now = self._clock()
        for chain in sorted(self.index.chains.values(), key=lambda c: (self.index.value(c, now), c.used_tick)):
            if disk.fits(nbytes):
                return True
            idle = chain.state is ChainState.IDLE and chain.tier is not Tier.DISK
            if idle and chain is not keep and chain.chain_id in disk.snapshots and not disk.pending[chain.chain_id]:
                self._forget_saved(chain)
                self.index.counts["snapshots_deleted"] += 1
        return disk.fits(nbytes)

    def _forget_saved(self, chain: Chain) -> None:
        assert self.disk is not None
        self.disk.forget(chain.chain_id)
        rows = chain.payload.copy if isinstance(chain.payload, DeviceRows) else chain.payload
        if rows is None:
            return
        rows.visible = False
        for part in rows.parts:
            part.saved.pop(chain.chain_id, None)
        if isinstance(chain.payload, DeviceRows) and not rows.in_memory:
            self._let_go(rows)
            chain.payload.copy = None

    def _load(self, rows: StoredRows) -> bool:
        """Has rows read into host memory. Returns False if there is no room for them yet."""
        disk = self.disk
        missing = [part for part in rows.parts if part.swapped is None]
        if any(part.leases for part in missing):
            return True  # another chain reads them
        nbytes = sum(part.nbytes for part in missing)
        room = self.host.fits(nbytes) or self._make_room(nbytes, drop_chains=True)
        if not room and self.staging.used_bytes and not self.staging.fits(nbytes):
            return False
        space = self.host if room else self.staging
        for part in missing:
            part.space = space
            space.used_bytes += part.nbytes
        assert disk is not None
        rows.moved_s -= self._clock()  # until `_loaded`
        disk.load(rows)
        return True

    def poll(self) -> list[Job]:
        """Takes over what was read and written meanwhile. Returns the loads: whoever waits for them has to be told."""
        if self.disk is None:
            return []
        loads = []
        for job in self.disk.poll(self.index.chains.__contains__):
            if job.kind == "save":
                self._saved(job)
            elif job.kind == "load":
                self._loaded(job)
                loads.append(job)
        return loads

    def _saved(self, job: Job) -> None:
        rows, chain = job.rows, self.index.chains.get(job.chain_id)
        assert rows is not None
        ok = job.error is None and chain is not None
        self.index.counts["persisted" if job.error is None else "persist_failed"] += 1
        current = chain is not None and rows in (chain.payload, _copy_of(chain.payload), self._bases.get(job.chain_id))
        rows.visible = ok and current
        for part in job.parts:
            if not part.owners and not part.leases:
                _empty(part)
        if chain is not None and current:
            self._unstage(chain, rows)

    def _unstage(self, chain: Chain, rows: StoredRows) -> None:
        """Rows that were only on their way leave the memory; what is then nowhere is lost."""
        for part in rows.parts:
            if part.space is self.staging and not part.leases:
                if not rows.visible and self.host.fits(part.nbytes):
                    self.staging.take(part.nbytes)
                    self.host.used_bytes += part.nbytes
                    part.space = self.host
                else:
                    _empty(part)
        payload, lost = chain.payload, not (rows.in_memory or rows.visible)
        if isinstance(payload, DeviceRows):
            if lost and payload.copy is rows:
                self._let_go(rows)
                payload.copy = None
        elif payload is rows:
            if lost and chain.state is ChainState.IDLE:
                self.index.drop(chain, "evicted")
            elif chain.tier is not tier_of(rows):
                self._place(chain, rows)
        elif lost and self._bases.get(chain.chain_id) is rows:
            self._let_go(self._bases.pop(chain.chain_id))

    def _loaded(self, job: Job) -> None:
        rows = job.rows
        assert rows is not None
        rows.loading = False
        rows.moved_s += self._clock()
        swapped: list[SwappedRow | None] = job.result or [None] * len(job.parts)
        for part, found in zip(job.parts, swapped, strict=True):
            assert part.space is not None
            part.swapped = found
            if found is not None:
                part.space.used_bytes += found.nbytes - part.nbytes
                part.nbytes = found.nbytes
            if found is None or (not part.owners and not part.leases):
                _empty(part)
        self.index.counts["loaded" if job.error is None else "load_failed"] += 1
        for chain in [c for c in self.index.chains.values() if c.payload is rows]:
            if job.corrupt and self.disk is not None:
                self.disk.dropped.append((chain.chain_id, str(job.error)))
                if chain.state is ChainState.IDLE:
                    self.index.drop(chain, "corrupt")
        self._replace()

    def _gone(self, chain: Chain) -> None:
        """A chain has ended: nothing of it stays anywhere."""
        base = self._bases.pop(chain.chain_id, None)
        if base is not None:
            self._let_go(base)
        if self.disk is None:
            return
        self.disk.forget(chain.chain_id)
        for other in list(self.index.chains.values()):  # forks that were never read share its parts
            rows = other.payload
            if isinstance(rows, StoredRows) and not rows.in_memory:
                for part in rows.parts:
                    part.saved.pop(chain.chain_id, None)
                lost = any(part.swapped is None and not part.saved and not part.leases for part in rows.parts)
                if lost and other.state is ChainState.IDLE:
                    self.index.drop(other, "evicted")

    def adopt(self, method_of: Callable[[Snapshot], str | list[str]]) -> None:
        """Takes over the snapshots of earlier boots.

        Args:
          method_of: the method of this engine that can use a snapshot, or the fields of the fingerprint that differ.
        """
        disk = self.disk
        if disk is None:
            return
        now_s, wall_s = self._clock(), time.time()
        for snapshot in sorted(disk.snapshots.values(), key=lambda s: s.record.used_s):
            record, found = snapshot.record, method_of(snapshot)
            if isinstance(found, list):
                disk.incompatible[record.chain_id] = found
                continue
            parts = [Part(p.start, p.stop, p.memory_bytes, saved={record.chain_id: p}) for p in snapshot.parts]
            rows = _owned(StoredRows(found, parts, record.lengths, record.extra, visible=True))
            chain = Chain(
                record.chain_id, record.seed, record.fingerprint, found, record.tenant, ChainState.IDLE, Tier.DISK
            )
            chain.ledger, chain.processed = record.ledger, record.processed
            chain.payload, chain.size = rows, size_of(rows)
            known = {field.name for field in dataclasses.fields(Quality)}
            chain.quality = Quality(**{name: value for name, value in record.quality.items() if name in known})
            chain.turns, chain.named = record.turns, record.named
            chain.parent_id, chain.priority, chain.ttl_s = record.parent_id, record.priority, record.ttl_s
            chain.gap_s = record.gap_s
            chain.created_s = now_s - max(0.0, wall_s - record.created_s)
            chain.used_s = now_s - max(0.0, wall_s - record.used_s)
            self.index.restore(chain)
        if disk.used_bytes > disk.capacity_bytes:
            self._make_disk_room(0, None)

    def wait(self, timeout_s: float) -> None:
        """Until something was read or written, or the time is over."""
        if self.disk is not None:
            self.disk.wait(timeout_s)

    # Time.

    def expire(self) -> None:
        """Chains that were idle for too long go a tier down."""
        now = self._clock()
        if now - self._expired_s < 1.0:
            return
        self._expired_s = now
        for chain in self.index.expired(self._settings.chain_ttl_s):
            if chain.tier is Tier.DEVICE and not _passing(chain) and self.demote(chain):
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
        rows: list[Any] = list(self._bases.values())
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


def _owned(rows: StoredRows) -> StoredRows:
    for part in rows.parts:
        part.owners += 1
    return rows


def _empty(part: Part) -> None:
    """Gives a part's memory back."""
    if part.space is not None:
        part.space.take(part.nbytes)
    part.swapped = part.space = None


def _copy_of(payload: Rows | None) -> StoredRows | None:
    return payload.copy if isinstance(payload, DeviceRows) else None


def _passing(chain: Chain) -> bool:
    """No client has asked to keep it, and no second turn has shown what it is: it is not worth a copy."""
    return chain.implicit and chain.turns < 2
