"""Jobs that take rows of given tokens out of the cache: queued, carried out in slices, looked at and cancelled.

Rows are shared by reference, so readers keep what they have and never block a job. A job waits only for a named chain
that has a turn under way, for readers of what it computes again, and for room.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sparsejax.cache.pages import IntegrityError, PageError
from sparsejax.cache.radix_records import Lease
from sparsejax.errors import PruneConflictError, PruneNotFoundError, RequestError
from sparsejax.launches import RunnerError
from sparsejax.metrics import EngineMetrics
from sparsejax.prune_records import ENDED, POLICIES, PruneInfo, PrunePart, PruneRequest, Slice
from sparsejax.prune_work import Work, Worker

__all__ = ["ENDED", "POLICIES", "PruneInfo", "PruneJobs", "PrunePart", "PruneRequest"]

log = logging.getLogger("sparsejax.engine")

MAX_JOBS = 1000
MAX_UNFINISHED = 64
_RETRY_S = 0.02  # before what a job waits for is looked at again
_MOST_BEGINNINGS = 3  # of a job that gives way to requests


class _Job:
    def __init__(self, request: PruneRequest, info: PruneInfo, work: Work, now_s: float) -> None:
        self.request = request
        self.info = info
        self.work = work
        self.state = Slice.READY
        self.why = ""
        self.submitted_s = self.served_s = self.tried_s = now_s
        self.blocked_s: float | None = None
        self.watchers: list[Future[PruneInfo]] = []
        self.given_way = 0


class PruneJobs:
    """The jobs of one engine. The engine thread's.

    Args:
      worker: carries them out.
      metrics: counters to feed.
      clock: seconds, monotonic.
      patience_s: a job that has waited so long for the device to have time goes on beside prompts.
    """

    def __init__(self, worker: Worker, metrics: EngineMetrics, clock: Callable[[], float], patience_s: float) -> None:
        self._worker = worker
        self._metrics = metrics
        self._clock = clock
        self._patience_s = patience_s
        self._jobs: collections.OrderedDict[str, _Job] = collections.OrderedDict()
        self._open: list[_Job] = []
        self._keys: dict[tuple[str, str], str] = {}
        self.moved = False

    # What clients ask for.

    def submit(self, request: PruneRequest) -> PruneInfo:
        """Queues a job.

        Raises:
          PruneError: the request is wrong.
          PrefixNotFoundError, ChainError: the rows are not there.
          RequestError: too many jobs are unfinished.
        """
        key = request.tenant, request.idempotency_key or ""
        if request.idempotency_key and key in self._keys:
            return self._jobs[self._keys[key]].info
        self._worker.targets.check(request)
        if len(self._open) >= MAX_UNFINISHED:
            text = f"{MAX_UNFINISHED} prune jobs are unfinished"
            raise RequestError(text, code="too_many_prunes", status=503, retry_after_s=1.0)
        keep = sum(part.keep_tokens for part in request.parts)
        info = PruneInfo(
            "prune_" + secrets.token_hex(12), "queued", request.policy, request.ranges, keep, created_s=time.time()
        )
        job = _Job(request, info, self._worker.run(request), self._clock())
        self._jobs[info.prune_id] = job
        self._open.append(job)
        if request.idempotency_key:
            self._keys[key] = info.prune_id
        self._forget_old()
        return info

    def get(self, prune_id: str, tenant: str) -> PruneInfo:
        """Raises PruneNotFoundError."""
        return self._job(prune_id, tenant).info

    def cancel(self, prune_id: str, tenant: str) -> PruneInfo:
        """Ends a job with nothing changed. Raises PruneNotFoundError, PruneConflictError: it is over."""
        job = self._job(prune_id, tenant)
        if job.info.ended:
            raise PruneConflictError(f"prune job {prune_id} is over ({job.info.status})")
        job.work.close()
        self._end(job, "cancelled", error={"code": "cancelled", "message": "it was cancelled"})
        return job.info

    def watch(self, prune_id: str, tenant: str) -> Future[PruneInfo]:
        """Answers when the job is over. Raises PruneNotFoundError."""
        job, answer = self._job(prune_id, tenant), Future[PruneInfo]()
        if job.info.ended:
            answer.set_result(job.info)
        else:
            job.watchers = [other for other in job.watchers if not other.cancelled()]
            job.watchers.append(answer)
        return answer

    def listed(self, tenant: str, limit: int) -> list[PruneInfo]:
        """The jobs of a tenant, newest first, at most `limit`."""
        mine = [job.info for job in reversed(self._jobs.values()) if job.request.tenant == tenant]
        return mine[:limit]

    def _job(self, prune_id: str, tenant: str) -> _Job:
        job = self._jobs.get(prune_id)
        if job is None or job.request.tenant != tenant:
            raise PruneNotFoundError(f"there is no prune job {prune_id!r}")
        return job

    def _forget_old(self) -> None:
        for prune_id in list(self._jobs):
            if len(self._jobs) <= MAX_JOBS:
                break
            job = self._jobs[prune_id]
            if job.info.ended:
                del self._jobs[prune_id]
                self._keys.pop((job.request.tenant, job.request.idempotency_key or ""), None)

    # Work.

    @property
    def pending(self) -> bool:
        """Some job is not over."""
        return bool(self._open)

    @property
    def awaits_result(self) -> bool:
        """A job waits for numbers from the device."""
        return self._worker.awaited is not None

    @property
    def leases(self) -> set[Lease]:
        """Of paths that jobs look at."""
        return self._worker.leases

    def step(self, quiet: bool = True) -> bool:
        """One slice of the first job that can go on. Returns whether any is unfinished; `moved`: something was done.

        Args:
          quiet: no prompt needs the device in this iteration. Else a program is submitted only for a job that has
            waited for long.
        """
        self.moved = False
        for job in list(self._open):
            if self._advance(job, quiet):
                break
        return bool(self._open)

    def _advance(self, job: _Job, quiet: bool) -> bool:
        """Returns False if the job waits for somebody else."""
        now = self._clock()
        if job.state is Slice.DEVICE and not quiet and now - job.served_s < self._patience_s:
            return True
        if job.state is Slice.RESULT and self._worker.awaited is not None and not self._worker.awaited.poll():
            return True
        if job.state is Slice.BLOCKED and now - job.tried_s < _RETRY_S:
            return False
        job.tried_s = now
        if job.state is not Slice.RESULT:
            job.served_s = now
        try:
            wait = next(job.work)
        except StopIteration as end:
            self.moved = True
            self._started(job, now)
            self._end(job, "completed", result=end.value)
            return True
        except (RunnerError, IntegrityError, PageError):
            raise
        except RequestError as error:
            self.moved = True
            self._end(job, "failed", error={"code": error.code, "message": error.message})
            return True
        except Exception as error:
            log.exception("prune job %s failed", job.info.prune_id)
            self.moved = True
            self._end(job, "failed", error={"code": "internal_error", "message": f"{type(error).__name__}: {error}"})
            return True
        job.state, job.why = wait
        if job.state is not Slice.BLOCKED:
            job.blocked_s = None
            self.moved = True
            self._started(job, now)
            return True
        job.blocked_s = now if job.blocked_s is None else job.blocked_s
        if now - job.blocked_s >= job.request.block_timeout_s:
            job.work.close()
            text = f"{job.why}: it was waited for {now - job.blocked_s:.1f} s"
            self._end(job, "blocked", error={"code": "prune_blocked", "message": text})
        return False

    def give_way(self) -> bool:
        """Jobs give back what they have, for a request that can't go on without it, and begin again later.

        Returns False if they had nothing.
        """
        if not self._worker.holding:
            return False
        now, why = self._clock(), "requests needed its pages"
        for job in list(self._open):
            job.work.close()
            job.given_way += job.info.status == "running"
            if job.given_way >= _MOST_BEGINNINGS:
                self._end(job, "blocked", error={"code": "prune_blocked", "message": f"{why} {job.given_way} times"})
                continue
            job.work = self._worker.run(job.request)
            job.state, job.why, job.tried_s = Slice.BLOCKED, why, now
            job.blocked_s = now if job.blocked_s is None else job.blocked_s
        return True

    def _started(self, job: _Job, now: float) -> None:
        if job.info.status == "queued":
            job.info = dataclasses.replace(job.info, status="running", started_s=time.time())
            self._metrics.prune_queue_seconds.observe(now - job.submitted_s)

    def _end(
        self, job: _Job, status: str, result: dict[str, Any] | None = None, error: dict[str, Any] | None = None
    ) -> None:
        job.info = dataclasses.replace(job.info, status=status, finished_s=time.time(), result=result, error=error)
        self._open.remove(job)
        self._metrics.prune_jobs.inc(status=status)
        if result is not None:
            self._metrics.prune_freed_slots.inc(result["freed_device_slots"])
            self._metrics.prune_recomputed_tokens.inc(result["recomputed_tokens"])
        log.info("prune job %s %s: %s", job.info.prune_id, status, result or error)
        for watcher in job.watchers:
            if watcher.set_running_or_notify_cancel():
                watcher.set_result(job.info)
        job.watchers = []

    def fail_all(self, message: str) -> None:
        """Ends all jobs; the books may be wrong, so nothing else is done for them."""
        for job in list(self._open):
            self._end(job, "failed", error={"code": "engine_dead", "message": message})

    def close(self) -> None:
        """Ends all jobs with nothing changed."""
        for job in list(self._open):
            job.work.close()
            self._end(job, "cancelled", error={"code": "shutting_down", "message": "the server is shutting down"})
