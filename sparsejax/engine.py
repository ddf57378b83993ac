"""The engine thread: the only thread that changes anything.

Other threads hand requests, cancellations and stops over through one queue and read `snapshot`, an immutable record
that is replaced once per iteration. Events are delivered by calling each request's `on_event` on the engine thread,
so that callback must only pass the event on (for example `loop.call_soon_threadsafe(queue.put_nowait, event)`).
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, NamedTuple, TypeVar

from sparsejax import chain_reports, prefix_reports
from sparsejax.caches import Caches
from sparsejax.chain_disk import CLOSE_S, Disk
from sparsejax.chains import Chains
from sparsejax.errors import EngineDeadError, QueueFullError, RequestError, ShuttingDownError
from sparsejax.metrics import EngineMetrics
from sparsejax.plans import Runner, RunnerLimits
from sparsejax.request import Request, TokenEvent
from sparsejax.rows import Group
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings

__all__ = ["Engine", "EngineSettings", "EngineSnapshot", "Health", "RowSnapshot"]

T = TypeVar("T")

log = logging.getLogger("sparsejax.engine")

_DISK_INTERVAL_S = 0.2  # the same, while something is copied, read or written
_CHAINS_INTERVAL_S = 5.0  # between two looks at the chains of an idle engine
_GAUGES_INTERVAL_S = 0.5  # between two counts of the chains of a busy engine
_ROWS_INTERVAL_S = 0.05  # between two looks at every row of a busy engine

Health = Literal["ok", "draining", "failed", "closed"]


class RowSnapshot(NamedTuple):
    """One resident choice. Sizes in tokens; resident is the longest head, read is what a decode step reads."""

    request_id: str
    index: int
    method: str
    state: str
    seen_tokens: int
    resident_tokens: int
    read_tokens: int
    output_tokens: int


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """The engine at the end of an iteration. Counts of choices, not of requests; pages are head-pages.

    While the engine is busy `rows` and `chain_pages` (at most so many are held by idle chains) may be 0.05 s older than
    the rest. `last_step_s` is `time.monotonic()` at the end of the iteration; `last_step_age_s` grows while a busy
    engine is stuck.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    free_pages: int = 0
    total_pages: int = 0
    chain_pages: int = 0
    free_rows: int = 0
    rows: tuple[RowSnapshot, ...] = ()
    steps: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    swapped_bytes: int = 0
    busy: bool = False
    last_step_s: float = dataclasses.field(default_factory=time.monotonic)
    failure: str | None = None

    @property
    def kv_usage(self) -> float:
        """Share of the pages in use, 0 to 1. Those of idle chains come free when they are needed, and don't count."""
        used = max(0, self.total_pages - self.free_pages - self.chain_pages)
        return used / self.total_pages if self.total_pages else 0.0

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the last iteration ended, 0 while there is nothing to do."""
        return time.monotonic() - self.last_step_s if self.busy else 0.0


class Engine:
    """Runs requests on a runner. Starts its thread at once; use it as a context manager or call `close`.

    Args:
      runner: executes plans.
      settings: limits and targets.
      metrics: counters to feed; made if not given.
      disk: where chains outlive the engine, which closes it.
      instruction: token ids that make the model repeat what it has read.
    """

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings | None = None,
        metrics: EngineMetrics | None = None,
        disk: Disk | None = None,
        instruction: tuple[int, ...] = (),
    ) -> None:
        self.settings = settings or EngineSettings()
        self.metrics = metrics or EngineMetrics()
        self.limits: RunnerLimits = runner.limits
        self.max_waiting = self.settings.max_waiting or max(64, 4 * self.limits.num_rows)
        self._scheduler = Scheduler(runner, self.settings, self.metrics, disk=disk, instruction=instruction)
        self._scheduler.on_admitted = self._on_admitted
        self._scheduler.on_finished = self._on_finished
        self._inbox: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        # Guards what other threads share with the engine thread: who is live, who waits, and the engine's state.
        self._lock = threading.Condition()
        self._live: set[str] = set()
        self._waiting: set[str] = set()
        self._health: Health = "ok"
        self._failure: BaseException | None = None
        self._last_status_s = time.monotonic()
        self._status_tokens = 0.0
        self._rows: tuple[RowSnapshot, ...] = ()
        self._rows_s = 0.0
        self._chain_pages = 0
        self._gauges_s = 0.0
        self._snapshot = EngineSnapshot()
        self._publish(busy=False)
        self._thread = threading.Thread(target=self._run, name="sparsejax-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Any thread.

    def submit(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None:
        """Queues a request. Each choice gets events and, exactly once, a last one with a finish reason.

        Args:
          request: see `Request`; its id must not be in use.
          on_event: called on the engine thread; must be quick and must not block. If it raises, the request is
            cancelled.

        Raises:
          RequestError: bad field, too long, too large for the cache, queue full, or draining.
          EngineDeadError: the engine has failed.
        """
        group = self._scheduler.prepare(request, on_event)
        with self._lock:
            if self._failure is not None:
                raise EngineDeadError(f"the engine has failed: {self._failure}") from self._failure
            if self._health != "ok":
                raise ShuttingDownError("the server is shutting down", retry_after_s=5.0)
            if request.request_id in self._live:
                raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFullError(
                    f"{len(self._waiting)} requests are waiting, at most {self.max_waiting} may", retry_after_s=1.0
                )
            self._live.add(request.request_id)
            self._waiting.add(request.request_id)
            self._inbox.put(("add", group))

    def cancel(self, request_id: str) -> None:
        """Ends every unfinished choice with reason "cancelled". Does nothing if the request is unknown or finished."""
        self._inbox.put(("cancel", request_id))

    def stop(self, request_id: str, index: int = 0, visible_tokens: int | None = None) -> None:
        """Ends one choice with reason "stop", because its consumer found a stop string. Else like `cancel`.

        `visible_tokens` of its output lie before the stop string, whole: a chain goes on behind them.
        """
        self._inbox.put(("stop", request_id, index, visible_tokens))

    def consult(self, function: Callable[[Caches], T]) -> Future[T]:
        """Has the engine thread call a function with the caches, between two steps: to look at or change what is kept.

        The answer fails with what the function raises, or with `EngineDeadError` if the engine does.
        """
        answer: Future[T] = Future()
        with self._lock:
            if self._failure is not None or self._health == "closed":
                answer.set_exception(EngineDeadError("the engine has ended"))
            else:
                self._inbox.put(("consult", function, answer))
        return answer

    def ask(self, function: Callable[[Chains], T]) -> Future[T]:
        """`consult`, of the chains alone: to list, drop, pin or move them."""
        return self.consult(lambda caches: function(caches.chains))

    def peek(self, function: Callable[[Caches], T]) -> T:
        """Calls a function with the caches at once, in the calling thread, while the engine's may be changing them.

        Only for functions that are written for it, such as `radix_control.routed`. Raises EngineDeadError.
        """
        if self._failure is not None or self._health == "closed":
            raise EngineDeadError("the engine has ended")
        return function(self._scheduler.caches)

    @property
    def snapshot(self) -> EngineSnapshot:
        """The engine as of its last iteration. Never blocks."""
        return self._snapshot

    @property
    def health(self) -> Health:
        return self._health

    @property
    def failure(self) -> BaseException | None:
        """What killed the engine, or None."""
        return self._failure

    def drain(self, timeout_s: float | None = None) -> bool:
        """Takes no new requests and waits for the live ones. Returns False if some are left after `timeout_s`."""
        with self._lock:
            if self._health == "ok":
                self._health = "draining"
            return self._lock.wait_for(lambda: not self._live, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancels what is left, writes what chains there are to be written and ends the thread. Idempotent."""
        with self._lock:
            if self._health != "failed":
                self._health = "closed"
        self._inbox.put(("close",))
        if threading.current_thread() is not self._thread:
            if self._scheduler.chains.tiers.disk is not None:
                timeout_s += CLOSE_S
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.error("the engine thread did not end within %.0f s; the device may hang", timeout_s)

    # The engine thread.

    def _run(self) -> None:
        try:
            busy = False
            while self._receive(block=not busy):
                busy = self._scheduler.step()
                if not busy:
                    self._scheduler.check_integrity()
                self._publish(busy)
                self._log_status(busy)
            self._scheduler.prunes.close()
            for request_id in list(self._scheduler.groups):
                self._scheduler.cancel(request_id)
            self._publish(busy=False)
        except BaseException as error:
            self._die(error)
        finally:
            self._scheduler.chains.close()

    def _receive(self, block: bool) -> bool:
        """Takes over what other threads asked for. Returns False when the engine shall close."""
        while True:
            try:
                # Chains grow old while nothing is asked for.
                chains = self._scheduler.chains
                idle = _CHAINS_INTERVAL_S if chains.index.chains else None
                if chains.tiers.unsettled:
                    idle = _DISK_INTERVAL_S
                message = self._inbox.get(block, idle)
            except queue.Empty:
                return True
            block = False
            if message[0] == "close":
                return False
            getattr(self._scheduler, message[0])(*message[1:])

    def _on_admitted(self, group: Group) -> None:
        with self._lock:
            self._waiting.discard(group.request_id)

    def _on_finished(self, group: Group) -> None:
        with self._lock:
            self._waiting.discard(group.request_id)
            self._live.discard(group.request_id)
            self._lock.notify_all()

    def _die(self, error: BaseException) -> None:
        """The device or the books are broken: everybody hears it, nobody waits for ever."""
        log.critical("the engine has failed", exc_info=error)
        with self._lock:
            self._failure, self._health = error, "failed"
        dead = EngineDeadError(f"the engine has failed: {error}")
        dead.__cause__ = error
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                break
            if message[0] == "add":
                self._scheduler.add(message[1])
            elif message[0] == "consult":
                message[2].set_exception(dead)
        self._scheduler.fail_all(dead)
        with self._lock:
            self._live.clear()
            self._waiting.clear()
            self._lock.notify_all()
        self._snapshot = dataclasses.replace(
            self._snapshot, running=0, waiting=0, swapped=0, rows=(), busy=False, failure=str(error)
        )

    def _publish(self, busy: bool) -> None:
        scheduler, metrics, now = self._scheduler, self.metrics, time.monotonic()
        pool = scheduler.memory.pool
        if not busy or now - self._rows_s >= _ROWS_INTERVAL_S:
            self._rows_s = now
            self._rows = self._describe_rows()
            self._chain_pages = scheduler.chains.tiers.reclaimable()
            if not busy or now - self._gauges_s >= _GAUGES_INTERVAL_S:
                self._gauges_s = now
                taken = pool.num_head_pages - pool.free_head_pages
                chain_reports.gauges(scheduler.chains.tiers, self.limits, metrics, taken)
                prefix_reports.gauges(scheduler.radix, metrics)
                chain_reports.recall_gauges(scheduler.recall.store, metrics)
        self._snapshot = snapshot = EngineSnapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            swapped=len(scheduler.swapped),
            free_pages=pool.free_head_pages,
            total_pages=pool.num_head_pages,
            chain_pages=min(self._chain_pages, pool.num_head_pages - pool.free_head_pages),
            free_rows=len(scheduler.memory.free_rows),
            rows=self._rows,
            steps=scheduler.step_number,
            preemptions=scheduler.num_preemptions,
            evicted_pages=scheduler.num_evicted_pages,
            swapped_bytes=scheduler.swap.used_bytes,
            busy=busy,
        )
        metrics.num_requests_running.set(snapshot.running)
        metrics.num_requests_waiting.set(snapshot.waiting + snapshot.swapped)
        metrics.num_requests_swapped.set(snapshot.swapped)
        metrics.kv_cache_usage_perc.set(snapshot.kv_usage)

    def _describe_rows(self) -> tuple[RowSnapshot, ...]:
        rows = []
        for seq in self._scheduler.running:
            self._scheduler.note_usage(seq)
            group, sizes = seq.group, (seq.computed, seq.resident_tokens, seq.read_tokens, len(seq.output))
            rows.append(RowSnapshot(group.request_id, seq.index, group.method, seq.state.value, *sizes))
        seen = sum(row.seen_tokens for row in rows)
        resident = sum(row.resident_tokens for row in rows)
        self.metrics.kv_seen_tokens.set(seen)
        self.metrics.kv_resident_tokens.set(resident)
        self.metrics.kv_selected_tokens.set(sum(row.read_tokens for row in rows))
        self.metrics.kv_kept_ratio.set(resident / seen if seen else 1.0)
        return tuple(rows)

    def _log_status(self, busy: bool) -> None:
        now, tokens = time.monotonic(), self.metrics.generation_tokens.value()
        elapsed = now - self._last_status_s
        if elapsed < self.settings.status_interval_s:
            return
        if busy or tokens > self._status_tokens:
            s = self._snapshot
            rate = (tokens - self._status_tokens) / elapsed
            log.info(
                "%d running, %d waiting, %d swapped; %.1f tokens/s; cache %.1f%% used; %d preempted, %d pages evicted",
                *(s.running, s.waiting, s.swapped, rate, 100 * s.kv_usage, s.preemptions, s.evicted_pages),
            )
        self._last_status_s, self._status_tokens = now, tokens
