"""The disk tier as the engine thread sees it: what is there, what is under way, how many bytes are left.

A background thread reads and writes, in the order in which it was asked to. What it has done is told by `poll`.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sparsejax.cache.chain import ChainIds
from sparsejax.cache.chain_store import ChainStore, CorruptError, NewPart, Record, SavedPart, Snapshot
from sparsejax.chain_rows import Part, StoredRows
from sparsejax.plans import Runner, SwappedRow

log = logging.getLogger("sparsejax.chains")

MOST_JOBS = 256
"""That may wait for the thread; a snapshot beyond them is not written."""
CLOSE_S = 30.0
"""That the last snapshots may take when the engine is closed."""
_OVERHEAD_BYTES = 64 * 1024  # of one part's files, and of a record


@dataclasses.dataclass(eq=False)
class Job:
    """Work for the thread, and what became of it.

    Attributes:
      kind: "save", "load" or "remove".
      chain_id: whose.
      rows: what is saved or loaded.
      parts: of these, what is new, or what is to be read.
      reserved_bytes: of disk, for what is new.
      run: the work.
      result, error: set once it was done.
    """

    kind: str
    chain_id: str
    run: Callable[[], Any]
    rows: StoredRows | None = None
    parts: tuple[Part, ...] = ()
    reserved_bytes: int = 0
    result: Any = None
    error: Exception | None = None

    @property
    def corrupt(self) -> bool:
        """It will fail again."""
        return isinstance(self.error, (CorruptError, KeyError))


class Worker:
    """A thread that does one job after the other."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._done: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._told = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Started with the first job."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="sparsejax-chains", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def poll(self) -> list[Job]:
        """Those that were done since the last call."""
        self._told.clear()
        done = []
        while not self._done.empty():
            done.append(self._done.get_nowait())
        return done

    def wait(self, timeout_s: float) -> None:
        """Until something is done, or the time is over."""
        self._told.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Ends the thread behind what was submitted. Returns False if it is still at it."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            perform(job)
            self._done.put(job)
            self._told.set()


def perform(job: Job) -> None:
    """Does a job; what goes wrong is kept for who asked."""
    try:
        job.result = job.run()
    except Exception as error:
        job.error = error


class Disk:
    """Snapshots of chains in one directory. The engine thread's.

    Args:
      store: the directory.
      runner: turns rows into arrays and back.
      capacity_bytes: of all snapshots.
      worker: does the work.

    Attributes:
      snapshots: the newest whole one of each chain.
      incompatible: of these, those that this engine can't use, with the fields of the fingerprint that differ.
      dropped: chains whose snapshot could not be read, and why.
      used_bytes, reserved_bytes: of snapshots that are there, and that are under way.
    """

    def __init__(self, store: ChainStore, runner: Runner, capacity_bytes: int, worker: Worker | None = None) -> None:
        self._store = store
        self._runner = runner
        self._worker = worker or Worker()
        self.capacity_bytes = capacity_bytes
        self.snapshots: dict[str, Snapshot] = {s.record.chain_id: s for s in store.found}
        self.incompatible: dict[str, list[str]] = {}
        self.dropped: list[tuple[str, str]] = list(store.dropped)
        self.used_bytes = sum(s.nbytes for s in store.found)
        self.reserved_bytes = 0
        self.pending: collections.Counter[str] = collections.Counter()
        self._undeleted: set[str] = set()  # what could not be deleted; it must not come back with the next boot
        for name, reason in store.dropped:
            log.warning("%s in %s was dropped: %s", name, store.path, reason)

    @property
    def ids(self) -> ChainIds:
        """Issues ids that later boots recognise."""
        return self._store.ids

    def fits(self, nbytes: int) -> bool:
        """So many bytes more can be written."""
        return self.used_bytes + self.reserved_bytes + nbytes <= self.capacity_bytes

    @property
    def full(self) -> bool:
        """Too much is under way to take on more."""
        return self.pending.total() >= MOST_JOBS

    def needs(self, chain_id: str, rows: StoredRows, tokens: int) -> int:
        """Most bytes that a snapshot of these rows adds."""
        new = [part.nbytes for part in rows.parts if chain_id not in part.saved]
        return _OVERHEAD_BYTES * (1 + len(new)) + 4 * tokens + sum(n + n // 64 for n in new)

    def save(self, record: Record, rows: StoredRows) -> None:
        """Makes these rows the chain's snapshot. The caller has made room."""
        chain_id, method = record.chain_id, rows.method
        reserved = self.needs(chain_id, rows, len(record.ledger))
        new = tuple(part for part in rows.parts if chain_id not in part.saved)
        work = [(part, part.swapped) for part in rows.parts]
        most = reserved + sum(part.saved[chain_id].nbytes for part in rows.parts if chain_id in part.saved)

        def run() -> Snapshot:
            parts: list[SavedPart | NewPart] = []
            for part, swapped in work:
                saved = part.saved.get(chain_id)
                if saved is None:
                    assert swapped is not None
                    arrays = self._runner.pack(method, swapped)
                    parts.append(NewPart(part.start, part.stop, arrays, part.nbytes))
                else:
                    parts.append(saved)
            snapshot = self._store.write(record, parts, most)
            for (part, _), saved_part in zip(work, snapshot.parts, strict=True):
                part.saved[chain_id] = saved_part
            return snapshot

        self._delete_again()
        self.reserved_bytes += reserved
        self._submit(Job("save", chain_id, run, rows, new, reserved))

    def load(self, rows: StoredRows) -> None:
        """Reads what of these rows is not in memory. The caller has made room."""
        method = rows.method
        missing = tuple(part for part in rows.parts if part.swapped is None)
        where = [next(iter(part.saved.items()), None) for part in missing]

        def run() -> list[SwappedRow]:
            found = []
            for place in where:
                if place is None:
                    raise CorruptError("its snapshot was deleted")
                try:
                    found.append(self._runner.unpack(method, self._store.read(*place)))
                except (CorruptError, OSError):
                    raise
                except ValueError as error:
                    raise CorruptError(str(error)) from error
            return found

        rows.loading = True
        self._submit(Job("load", next((place[0] for place in where if place), ""), run, rows, missing))

    def forget(self, chain_id: str) -> None:
        """Deletes a chain's snapshot."""
        snapshot = self.snapshots.pop(chain_id, None)
        self.incompatible.pop(chain_id, None)
        if snapshot is not None:
            self.used_bytes -= snapshot.nbytes
        if snapshot is not None or self.pending[chain_id]:
            self._delete(chain_id)

    def _delete(self, chain_id: str) -> None:
        self._submit(Job("remove", chain_id, lambda: self._store.remove(chain_id)))

    def _delete_again(self) -> None:
        while self._undeleted:
            self._delete(self._undeleted.pop())

    def _submit(self, job: Job) -> None:
        for part in job.parts:
            part.leases += 1
        self.pending[job.chain_id] += 1
        self._worker.submit(job)

    def poll(self, alive: Callable[[str], bool]) -> Sequence[Job]:
        """Jobs that are done; their bytes are counted, their leases over. `alive` says if there is such a chain."""
        done = self._worker.poll()
        for job in done:
            self.pending[job.chain_id] -= 1
            if not self.pending[job.chain_id]:
                del self.pending[job.chain_id]
            for part in job.parts:
                part.leases -= 1
            self.reserved_bytes -= job.reserved_bytes
            if job.kind == "save" and job.error is None and alive(job.chain_id):  # else it is being removed
                old = self.snapshots.get(job.chain_id)
                self.used_bytes += job.result.nbytes - (old.nbytes if old else 0)
                self.snapshots[job.chain_id] = job.result
            if job.kind == "remove" and job.error is not None:
                self._undeleted.add(job.chain_id)
            if job.error is not None:
                log.warning("chain %s: %s failed: %s", job.chain_id, job.kind, job.error)
        return done

    def wait(self, timeout_s: float) -> None:
        """Until something is done, or the time is over."""
        self._worker.wait(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Finishes what is under way and lets go of the directory."""
        self._delete_again()
        if not self._worker.close(timeout_s):
            log.error("snapshots of chains were not all written within %.0f s", timeout_s)
        self._store.close()
