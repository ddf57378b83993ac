"""Where the choices of requests are, and what they own there.

Every unfinished choice is in exactly one of `waiting`, `running`, `swapped`, or has its last token in flight. Each
method here is one transition: afterwards queues, rows, pages, promises and swap space are right again, and the plans
that the runner must carry out for it have been submitted.

Submission order is execution order. So eviction frees pages, preemption frees rows and a finished choice leaves its
row at once, even while programs that used them are still running; only events wait for the device.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from sparsejax import chain_reports, recall
from sparsejax.admission import admissible
from sparsejax.cache.pages import IntegrityError, PageError, PoolExhaustedError
from sparsejax.caches import Caches
from sparsejax.chain_disk import Disk
from sparsejax.chain_rows import DeviceRows
from sparsejax.chains import Chains
from sparsejax.errors import CacheTooSmallError, ChainDisabledError, RequestError
from sparsejax.launches import Launches, RunnerError, call_runner
from sparsejax.memory import Memory, SwapSpace
from sparsejax.metrics import EngineMetrics
from sparsejax.plans import CountRow, ForkRow, MaintainRow, Runner
from sparsejax.prefill import PrefillPlanner
from sparsejax.prune_jobs import PruneJobs
from sparsejax.prune_target import Targets
from sparsejax.prune_work import Worker
from sparsejax.radix_cache import RadixCache
from sparsejax.request import FinishReason, Request, TokenEvent, TokenLogprob
from sparsejax.rows import Group, Sequence, State
from sparsejax.settings import EngineSettings

log = logging.getLogger("sparsejax.engine")

LEAST_SLICE = 128
"""Tokens that a program of a prune job has room for, if the runner has such programs."""
TELL_S = 5.0
"""After so long a wait clients hear what is known of their chain, although more may be known when they get a row."""


class Lifecycle:
    """The choices of one engine and their transitions. `Scheduler` decides which transition comes when.

    Args:
      runner: executes plans.
      settings: limits and targets.
      metrics: counters to feed.
      clock: seconds, monotonic.
      disk: where chains outlive the engine.
      instruction: token ids that make the model repeat what it has read.

    Attributes:
      groups: unfinished requests by id.
      waiting, swapped: choices without a row.
      running: choices that own a row, oldest admission first.
      on_admitted, on_finished: called when a request's first choice gets a row, and when its last one ends.
    """

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings | None = None,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        disk: Disk | None = None,
        instruction: tuple[int, ...] = (),
    ) -> None:
        self.runner = runner
        self.limits = runner.limits
        self.settings = settings or EngineSettings()
        self.metrics = metrics or EngineMetrics()
        self.clock = clock
        self.memory = Memory(self.limits)
        self.swap = SwapSpace(self.settings.swap_bytes)
        self.chains = Chains(runner, self.memory, self.settings, self.metrics, clock, disk)
        self.recall = self.chains.recall
        self.recall.watch = lambda seq, ticket: self.launches.add(self.step_number, ticket, [(seq, None)], None)
        self.radix = RadixCache(
            runner, self.memory, self.settings, self.metrics, clock, self.chains.scope, self.chains.tiers
        )
        self.chains.spares = self.radix.spares
        self.planner = PrefillPlanner(self.limits.prefill_buckets, self.settings.max_num_batched_tokens)
        targets = Targets(runner, self.memory, self.chains, self.radix)
        worker = Worker(targets, instruction, self._slice_tokens)
        self.prunes = PruneJobs(worker, self.metrics, clock, self.settings.starvation_bound_s)
        self.launches = Launches(clock)
        self.groups: dict[str, Group] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.step_number = 0
        self.num_preemptions = 0
        self.num_evicted_pages = 0
        self.on_admitted: Callable[[Group], None] = lambda group: None
        self.on_finished: Callable[[Group], None] = lambda group: None
        self._mean_output_tokens = float(self.settings.decode_window_tokens)
        self._broken: list[str] = []  # requests whose consumer raised
        self._stuck = 0  # iterations without progress while nothing was in flight

    def prepare(self, request: Request, on_event: Callable[[TokenEvent], None]) -> Group:
        """Checks a request against fixed limits; safe in any thread. Raises RequestError."""
        if request.chain is not None and not self.settings.chain_cache:
            raise ChainDisabledError("chains are off here (--chain-cache)", chain_id=request.chain.chain_id)
        group = admissible(request, self.limits, self.memory, self.planner.max_chunk, on_event)
        recall.prepare(group, self.limits, self.settings)
        return group

    def add(self, group: Group) -> None:
        """Queues a prepared request. One with a chain gets it now, or ends with the reason why it can't."""
        self.groups[group.request_id] = group
        if group.request.chain is not None:
            (seq,) = group.choices
            try:
                self.chains.claim(group)
            except RequestError as error:
                self._finish(seq, "error", error=error)
                return
            if not self.chains.loading(seq) and not self.radix.takes_part(seq):
                self._tell_chain(seq)
        self.waiting.extend(group.choices)

    def _poll_chains(self) -> None:
        """Takes over what was read from disk, and brings the rows of queued turns nearer."""
        for seq, error in self.chains.poll():
            if error is not None:
                self._finish(seq, "error", error=error)
            elif seq.state is not State.FINISHED:
                self._tell_chain(seq)
        now = self.clock()
        for seq in self.waiting:
            untold = seq.chain is not None and not seq.chain_told[0] and not self.chains.loading(seq)
            if untold and now - seq.group.request.arrival_s > TELL_S:
                self._tell_chain(seq)
        self.chains.tiers.keep_late()
        self.chains.tiers.advance(self.waiting)

    def cancel(self, request_id: str) -> None:
        """Ends every unfinished choice as "cancelled". Unknown and finished requests are left alone."""
        group = self.groups.get(request_id)
        for seq in group.choices if group else ():
            self._finish(seq, "cancelled")

    def stop(self, request_id: str, index: int, visible_tokens: int | None = None) -> None:
        """Ends one choice as "stop": its consumer saw a stop string, behind so many whole tokens of the output."""
        group = self.groups.get(request_id)
        if group and 0 <= index < len(group.choices):
            self._finish(group.choices[index], "stop", visible=visible_tokens)

    @property
    def caches(self) -> Caches:
        """What is kept between requests."""
        return Caches(self.chains, self.radix, self.prunes)

    def consult(self, function: Callable[[Caches], Any], answer: Future[Any]) -> None:
        """Calls a function with the caches and answers what it returns or raises."""
        if not answer.set_running_or_notify_cancel():
            return  # nobody waits any more
        try:
            answer.set_result(function(self.caches))
        except Exception as error:
            answer.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """Ends everything with an error event. The device is not touched any more, and the books may be wrong."""
        self.launches.clear()
        self.prunes.fail_all(f"{error}")
        for group in list(self.groups.values()):
            for seq in group.choices:
                try:
                    self._finish(seq, "error", error=error)
                except Exception:
                    log.exception("cleanup of request %s failed", group.request_id)

    def check_integrity(self) -> None:
        """Re-adds rows, pages and queues; raises IntegrityError."""
        self.memory.check_integrity()
        if sorted(map(id, self.running)) != sorted(map(id, self.memory.holders.values())):
            raise IntegrityError("the running choices are not the owners of the rows")
        queued = {id(seq) for seq in (*self.waiting, *self.swapped, *self.running)}
        if len(queued) != len(self.waiting) + len(self.swapped) + len(self.running):
            raise IntegrityError("a choice is in two queues")
        live = {id(s) for group in self.groups.values() for s in group.choices if s.state is not State.FINISHED}
        if queued - live:
            raise IntegrityError("a finished choice is still queued")
        if live - queued - {id(seq) for launch in self.launches for seq, _ in launch.rows}:
            raise IntegrityError("a choice is lost: neither queued, nor on a row, nor in flight")
        live_chains = {
            s.group.request_id: s
            for g in self.groups.values()
            for s in g.choices
            if s.chain is not None and s.state is not State.FINISHED
        }
        self.chains.check_integrity(live_chains)
        self.recall.check_integrity()
        rows = [c.payload for c in self.chains.index.chains.values() if isinstance(c.payload, DeviceRows)]
        choices = [s for group in self.groups.values() for s in group.choices]
        leases = [x.lease for x in (*rows, *choices) if x.lease is not None]
        self.radix.check_integrity([*leases, *self.prunes.leases])
        if self.swap.used_bytes != sum(seq.swapped.nbytes for seq in self.swapped if seq.swapped):
            raise IntegrityError("the swap space is miscounted")

    # Getting a row.

    def _window(self) -> int:
        """Tokens to promise ahead: about what requests have been generating."""
        low, high = self.settings.min_decode_window_tokens, self.settings.max_decode_window_tokens
        return int(min(max(self._mean_output_tokens, low), high))

    def _admit(self, seq: Sequence) -> bool:
        """Gives a waiting or swapped-out choice a row, if there is room for it and its decode window."""
        # Those who were preempted before must have room for longer, so nobody is swapped in and out for ever.
        window = self._window() << min(seq.preemptions, 16)
        claimed = seq.chain is not None and not seq.begun
        least = window if self.running else 1
        if self.memory.free_rows:
            if self.running and self._hopeless(seq, least):
                return False
            self.radix.attach(seq)
        if not self._find_room(seq, window, least, claimed):
            twice = seq.attached > 0 and seq.chain is not None and seq.chain.payload is not None
            self.radix.detach(seq)
            # Blocks beside the chain's own rows may be what there is no room for.
            if not twice or not self._find_room(seq, window, least, claimed):
                return False
        group = seq.group
        (self.waiting if seq.swapped is None else self.swapped).remove(seq)
        self._seat(seq)
        if seq.swapped is not None:
            swapped, seq.swapped = seq.swapped, None
            self.swap.take(swapped.nbytes)
            assert seq.pages is not None
            call_runner(self.runner.import_row, group.method, seq.row, seq.pages.padded(-1), swapped)
        if claimed:
            self.chains.begin(seq)
        self.radix.begin(seq)
        if claimed and seq.chain_miss is not None:
            self.metrics.prefix_cache_misses.inc(reason=seq.chain_miss)
        if claimed and seq.chain_told != (seq.chain_status, seq.reused):
            self._tell_chain(seq)
        self.recall.seat(seq)
        return True

    def _hopeless(self, seq: Sequence, least: int) -> bool:
        """What a choice has to compute beside what is known has no room now. Cheaper than to begin with that."""
        known, spare = self.radix.begins_with(seq)
        if not known:
            return False
        each = self.limits.geometry.head_pages_per_sequence_page
        short = self.memory.missing(seq, least) - known * each
        return short > self.chains.tiers.reclaimable(seq) - spare * each

    def _tell_chain(self, seq: Sequence) -> None:
        """Says what became of a turn's chain, before any token."""
        seq.chain_told = seq.chain_status, seq.reused
        self._emit(seq.group, TokenEvent(seq.group.request_id, seq.index, chain=self.chains.report(seq)))

    def _find_room(self, seq: Sequence, window: int, least: int, claimed: bool) -> bool:
        """Gives a choice row and pages, taking them from idle chains if these have enough."""
        if not self.memory.free_rows:
            return False
        while True:
            if claimed:
                self.chains.lend(seq)
            if self.memory.admit(seq, window, least):
                return True
            found = self.chains.tiers.reclaimable(seq)
            missing = self.memory.missing(seq, least) if found else 0
            if claimed:
                self.chains.unlend(seq)
            # Chains are not given up for a request that has to wait for others anyway.
            if max(1, missing) > found:
                return False
            if not self.chains.reclaim(seq.chain, claimed, forget=not self.running):
                return False

    def _seat(self, seq: Sequence) -> None:
        """A choice got a row."""
        group = seq.group
        seq.state = State.REPLAY if seq.replaying else State.DECODE if seq.prefilled else State.PREFILL
        self.running.append(seq)
        if seq.admitted_s is None:
            first = not group.started
            seq.admitted_s = self.clock()
            self.metrics.request_queue_time_seconds.observe(seq.admitted_s - group.request.arrival_s)
            if first:
                self.on_admitted(group)
        call_runner(self.runner.setup_row, seq.row, group.request.params.logit_bias, group.end_stop_ids)

    def _fork(self, source: Sequence, target: Sequence) -> None:
        """Starts a choice as a copy of another. If there is no room now, it waits and prefills on its own."""
        if target.state is not State.WAITING:
            return
        copies = self.memory.fork(source, target, self._window())
        if copies is None:
            return
        assert target.pages is not None
        target.observed_from = source.observed_from
        self.radix.share(source, target)
        self.waiting.remove(target)
        self._seat(target)
        plan = ForkRow(source.row, target.row, target.pages.updates(), copies)
        call_runner(self.runner.fork, target.group.method, plan)

    # Losing it.

    def _relieve(self, seq: Sequence, purpose: str) -> None:
        """Frees pages by swapping somebody out. If there is nobody, `seq` can't go on and ends."""
        if self.chains.reclaim() or self.prunes.give_way():
            return
        victim = self._victim()
        if victim is not None:
            self._preempt(victim)
        elif not self.recall.relieve(self.running):
            self._finish(seq, "error", error=self._no_room(seq, purpose))

    def _victim(self) -> Sequence | None:
        """Whom to swap out: never the oldest, so that somebody always gets done; else the newest that can be swapped.

        When swap space is short, rows that can be rebuilt in prompt chunks go before those that retrace their steps.
        """
        rows = sorted(self.running, key=age)[1:]
        rows = [seq for seq in rows if not seq.base or self._swappable(seq)]
        costs = {id(seq): (not self._swappable(seq), not self._swappable(seq) and not chunkable(seq)) for seq in rows}
        return min(reversed(rows), key=lambda seq: costs[id(seq)], default=None)

    def _swappable(self, seq: Sequence) -> bool:
        return self.swap.has_room(seq.group.method, seq.pages.count if seq.pages else 0)

    def _preempt(self, seq: Sequence) -> None:
        """Takes row and pages away. The state goes to host memory if it fits there, else it is recomputed later."""
        assert seq.pages is not None
        seq.preemptions += 1
        seq.served_s = self.clock()
        self.num_preemptions += 1
        self.metrics.num_preemptions.inc()
        if seq.computed and self._swappable(seq):
            table = seq.pages.padded(-1)
            with contextlib.suppress(RequestError):  # a row that the runner can't export is rebuilt
                self.recall.withdraw(seq)
                swapped = call_runner(self.runner.export_row, seq.group.method, seq.row, table)
                if self.swap.put(seq.group.method, seq.pages.count, swapped.nbytes):
                    seq.swapped, seq.swapped_lengths = swapped, seq.pages.lengths.copy()
        self.radix.leave(seq)
        if seq.swapped is not None:
            seq.state = State.SWAPPED
            self.swapped.append(seq)
        elif seq.base:  # its earlier turns can't be repeated as they were
            self._finish(seq, "error", error=self._no_room(seq, "a conversation"))
            return
        else:
            # Tokens that are in flight still count when they arrive: the same seed and position sample them again.
            seq.rebuilt = seq.rebuilt or seq.computed > 0
            seq.prefill_len = len(seq.group.prompt) + (len(seq.output) if chunkable(seq) else 0)
            seq.computed = seq.replayed = seq.dispatched = seq.observed_from = seq.attached = 0
            seq.cuts, seq.tainted = (), False
            seq.phase_due = seq.counting = seq.counts = None
            self.recall.begin(seq, ())
            seq.state = State.WAITING
            self.waiting.append(seq)
        self.running.remove(seq)
        self.memory.release(seq)
        self.recall.lose_place(seq)
        log.info("request %s preempted (%s)", seq.group.request_id, seq.state.value)

    def _no_room(self, seq: Sequence, purpose: str) -> CacheTooSmallError:
        free = self.memory.pool.free_pages(seq.group.facts.granularity)
        held = seq.pages.count if seq.pages else 0
        return CacheTooSmallError(
            f"{purpose} finds no room in the cache: {held} pages held, {seq.reserved_pages} reserved, {free} free, "
            "and nothing can be swapped out"
        )

    def note_usage(self, seq: Sequence) -> None:
        """Records what the row holds and reads, for stats."""
        if seq.pages is not None:
            seq.resident_tokens = seq.pages.length
            seq.read_tokens = seq.group.facts.rows_read(seq.resident_tokens, self.limits.geometry)

    def _leave(self, seq: Sequence) -> None:
        """Takes the choice off its row, if it has one."""
        if seq.row:
            self.note_usage(seq)
            self.running.remove(seq)
            if seq.state is State.DECODE:
                self.radix.finish(seq)
        self.radix.leave(seq)
        self.memory.release(seq)

    def _rest(self, seq: Sequence) -> None:
        """All steps of a chain's turn are submitted: its row is free, its pages wait for the last tokens to arrive."""
        if seq.row and seq.begun and seq.exhausted and not seq.phase_due and not seq.replaying:
            self.note_usage(seq)
            with contextlib.suppress(RequestError):  # then it stays on its row until the turn is over
                self.recall.withdraw(seq)
                seq.parked = call_runner(self.runner.park, seq.group.method, seq.row)
            if seq.parked is None:
                return
            self.running.remove(seq)
            self.memory.vacate(seq)

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop_reason: int | None = None,
        error: Exception | None = None,
        visible: int | None = None,
    ) -> None:
        """Ends a choice wherever it is: everything it owned is free, and its last event is out. Idempotent."""
        if seq.state is State.FINISHED:
            return
        group = seq.group
        for queue in (self.waiting, self.swapped):
            if seq in queue:
                queue.remove(seq)
        if seq.row:
            self.note_usage(seq)
        try:
            if seq.chain is not None:
                if reason != "error":
                    self.radix.finish(seq, visible)
                self.chains.retire(seq, reason, visible)
        finally:
            if seq.swapped is not None:
                self.swap.take(seq.swapped.nbytes)
                seq.swapped = None
        try:
            self._leave(seq)
        finally:
            seq.state = State.FINISHED
            self._stuck = 0
            self._promote_follower(seq)
            stats = seq.stats(self.clock())
            if seq.output:
                self._mean_output_tokens += 0.1 * (len(seq.output) - self._mean_output_tokens)
            self.metrics.finished(group.request, seq.index, reason, stats)
            report = self.chains.report(seq) if seq.chain is not None else None
            chain_reports.recalled(report.recall if report is not None else None, self.metrics)
            self.recall.forget(seq)
            event = TokenEvent(group.request_id, seq.index, tokens, logprobs, reason, stop_reason, error, stats, report)
            self._emit(group, event)
            if group.finished:
                del self.groups[group.request_id]
                self.on_finished(group)

    def _promote_follower(self, seq: Sequence) -> None:
        """The choice that others wait to fork from is gone: the first of them takes its part."""
        seq.leader = None
        followers = [choice for choice in seq.group.choices if choice.leader is seq]
        for follower in followers:
            follower.leader = None if follower is followers[0] else followers[0]

    def _emit(self, group: Group, event: TokenEvent) -> None:
        try:
            group.on_event(event)
        except Exception:
            log.exception("the consumer of request %s failed; the request is cancelled", group.request_id)
            self._broken.append(group.request_id)

    def _slice_tokens(self) -> int:
        """Tokens of the longest program of one row that prune jobs may run now beside rows that decode.

        Never less than a few queries at once: in smaller pieces a job takes longer than its rows are worth.
        """
        buckets = [b for b in self.planner.buckets if b[0] == 1] or self.planner.buckets
        sizes = sorted({tokens for _, tokens in buckets})
        least = next((tokens for tokens in sizes if tokens >= LEAST_SLICE), sizes[-1])
        if any(seq.state is State.DECODE for seq in self.running):
            longest_s = self.settings.stall_target_ms / 1e3
            quick = (b for b in buckets if (self.planner.estimate_s(b) or float("inf")) <= longest_s)
            return max([least, *(tokens for _, tokens in quick)])
        return sizes[-1]

    # Between steps.

    def _settle(self, seq: Sequence) -> None:
        """Carries out what is due before the row may go on: maintenance, then forks."""
        if seq.row and seq.phase_due:
            self._guard(seq, self._maintain)
        if seq.row and seq.begun and not seq.phase_due and not seq.replaying and seq.computed != seq.kept_at:
            self._guard(seq, self.chains.checkpoint)
        if seq.row and not seq.phase_due and 0 < seq.computed == seq.group.fork_at:
            for choice in seq.group.choices:
                if choice.leader is seq:
                    choice.leader = None
                    self._guard(choice, lambda target: self._fork(seq, target))

    def _squeeze(self) -> bool:
        """Evicts what the methods of decoding rows can spare before it is due. Returns whether pages came back."""
        before = self.num_evicted_pages
        for seq in [seq for seq in self.running if seq.state is State.DECODE and not seq.phase_due]:
            if seq.row and self.memory.kept(seq.group.facts, "pressure", _lengths(seq)) is not None:
                seq.phase_due = "pressure"
                self._guard(seq, self._maintain)
        return self.num_evicted_pages > before

    def _maintain(self, seq: Sequence) -> None:
        """Evicts if the method says so. Pages return to the pool at once."""
        pages, facts, phase = seq.pages, seq.group.facts, seq.phase_due
        assert pages is not None
        assert phase is not None
        done = seq.computed - (seq.prefill_len if phase in ("token", "pressure") else seq.base)
        stays = phase == "prompt" and seq.base > 0 and facts.replays_prompts
        due = facts.may_evict(phase, done) and not stays
        kept = self.memory.kept(facts, phase, pages.lengths) if due else None
        if kept is not None and seq.unseen and phase in ("token", "pressure"):
            # What nobody has seen yet may have to be taken back, so nothing is chosen by it: the row waits a step.
            seq.phase_due = phase if phase == "token" else None
            return
        observed, asked = seq.computed - seq.observed_from, None
        if kept is not None and facts.most_counted(phase, pages.lengths):
            if seq.counts is None:
                self._count(seq, phase, observed)
                return  # the row waits for its counts, others go on
            kept = seq.counts
            if kept.shape != pages.lengths.shape or ((kept < 1) | (kept > pages.lengths)).any():
                raise RuntimeError(f"{facts.name} counts {kept.tolist()} rows of {pages.lengths.tolist()}")
        if kept is not None:
            asked, kept = self.recall.asked(seq, phase, kept)
        if kept is not None:
            while self.memory.pool.free_pages(facts.granularity) < pages.fresh_pages(kept):
                self._relieve(seq, "a compaction")
                if not seq.row:
                    return  # swapped out; `phase_due` stays and is carried out before the next step

            def submit(table: np.ndarray) -> None:
                plan = MaintainRow(seq.row, "evict", phase, pages.lengths.copy(), kept, table, observed, asked)
                self.recall.keep(seq, call_runner(self.runner.maintain, seq.group.method, plan))

            with self.recall.aside(seq):
                freed = pages.compact(kept, submit)
            self.num_evicted_pages += freed
            self.metrics.pages_evicted.inc(freed)
            self.metrics.maintenance_steps.inc(kind="evict")
            self.memory.shrink(seq)
        if kept is not None or phase == "prompt":
            seq.observed_from = seq.computed
        seq.phase_due = seq.counts = None

    def _count(self, seq: Sequence, phase: str, observed: int) -> None:
        """Asks the device how many rows each head keeps, unless it was asked already."""
        if seq.counting is None:
            assert seq.pages is not None
            plan = CountRow(seq.row, phase, seq.pages.lengths.copy(), observed)
            with self.recall.aside(seq):
                ticket = seq.counting = call_runner(self.runner.count, seq.group.method, plan)
            self.launches.add(self.step_number, ticket, [(seq, None)], None)

    def _guard(self, seq: Sequence, work: Callable[[Sequence], Any]) -> Any:
        """Works on behalf of one choice. What goes wrong there ends that choice only; then None is returned."""
        try:
            return work(seq)
        except (RunnerError, IntegrityError, PageError):
            raise
        except PoolExhaustedError as error:  # the method understated what it needs
            if seq.row and len(self.running) > 1:
                self._preempt(seq)
            else:
                self._finish(seq, "error", error=error)
        except Exception as error:
            log.exception("request %s failed while it was scheduled", seq.group.request_id)
            self._finish(seq, "error", error=error)
        return None


def _lengths(seq: Sequence) -> np.ndarray:
    assert seq.pages is not None
    return seq.pages.lengths


def age(seq: Sequence) -> tuple[float, str, int]:
    """Sorts oldest request first."""
    return seq.group.request.arrival_s, seq.group.request_id, seq.index


def chunkable(seq: Sequence) -> bool:
    """Output can be recomputed in prompt chunks with the same result: nothing was evicted, nothing counts it apart."""
    params = seq.group.request.params
    return not seq.group.facts.evicts and not params.presence_penalty and not params.frequency_penalty
