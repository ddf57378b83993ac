"""Chains on disk: when a snapshot is written, read or deleted, and what that means for their rows in memory."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from sparsejax.cache import row_layout
from sparsejax.cache.chain import Chain, ChainState, Quality, Tier
from sparsejax.cache.chain_store import Record, Snapshot
from sparsejax.chain_disk import Job
from sparsejax.chain_host import HostTier, copy_of, empty, owned, passing
from sparsejax.chain_rows import DeviceRows, Part, StoredRows, size_of, tier_of
from sparsejax.plans import SwappedRow

log = logging.getLogger("sparsejax.chains")


class DiskTier(HostTier):
    """The same with a directory, if there is one. See `chain_tiers.Tiers`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fields: Callable[[str], Mapping[str, Any]] = lambda method: {}
        self.index.on_gone = self._gone

    def _persistent(self, chain: Chain) -> bool:
        return self.disk is not None and not passing(chain)

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
            cuts=row_layout.as_record(chain.cuts),
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
        current = chain is not None and rows in (chain.payload, copy_of(chain.payload), self._bases.get(job.chain_id))
        rows.visible = ok and current
        for part in job.parts:
            if not part.owners and not part.leases:
                empty(part)
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
                    empty(part)
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
                empty(part)
        self.index.counts["loaded" if job.error is None else "load_failed"] += 1
        for chain in [c for c in self.index.chains.values() if c.payload is rows]:
            if job.corrupt and self.disk is not None:
                self.disk.dropped.append((chain.chain_id, str(job.error)))
                if chain.state is ChainState.IDLE:
                    self.index.drop(chain, "corrupt")
        self._replace()

    def _gone(self, chain: Chain) -> None:
        """A chain has ended: nothing of it stays anywhere."""
        for kept in (self._bases, self._late):
            base = kept.pop(chain.chain_id, None)
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
                log.warning("chain %s is of another engine: %s", record.chain_id, ", ".join(found))
                continue
            parts = [Part(p.start, p.stop, p.memory_bytes, saved={record.chain_id: p}) for p in snapshot.parts]
            rows = owned(StoredRows(found, parts, record.lengths, record.extra, visible=True))
            chain = Chain(
                record.chain_id, record.seed, record.fingerprint, found, record.tenant, ChainState.IDLE, Tier.DISK
            )
            chain.ledger, chain.processed = record.ledger, record.processed
            chain.payload, chain.size, chain.cuts = rows, size_of(rows), row_layout.from_record(record.cuts)
            known = {field.name for field in dataclasses.fields(Quality)}
            quality: dict[str, Any] = {name: value for name, value in record.quality.items() if name in known}
            chain.quality = Quality(**quality)
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
