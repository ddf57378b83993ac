"""What runs next: admission, decode, bounded prefill, eviction, preemption, and the delivery of tokens.

One iteration submits one decode program per method group and at most one prefill program; up to `max_inflight_steps`
iterations are under way before the oldest is collected. The device keeps each row's last token, so a step never waits
for the tokens of the one before; what a row turns out not to need (after end-of-sequence) is dropped on collection.

Submission order is execution order. So eviction frees pages, preemption frees rows and a finished choice leaves its
row at once, even while programs that used them are still running; only events wait for the device.

Every unfinished choice is in exactly one of `waiting`, `running`, `swapped`, or has its last token in flight.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sparsejax.cache.pages import IntegrityError, PageError, PoolExhaustedError
from sparsejax.errors import CacheTooSmallError, ContextLengthError, QueueTimeoutError, RequestError
from sparsejax.memory import Memory
from sparsejax.metrics import EngineMetrics
from sparsejax.plans import DecodeRow, ForkRow, MaintainRow, PrefillRow, Runner, StepResult, Ticket
from sparsejax.prefill import Bucket, PrefillPlanner
from sparsejax.request import FinishReason, Request, TokenEvent, TokenLogprob
from sparsejax.rows import Group, Sequence, State
from sparsejax.settings import EngineSettings

log = logging.getLogger("sparsejax.engine")


@dataclasses.dataclass
class Launch:
    """A program under way. `rows` pairs each submitted row with the position of its sampled token, or None."""

    step: int
    ticket: Ticket
    rows: list[tuple[Sequence, int | None]]
    submitted_s: float
    bucket: Bucket | None  # of a prefill program


class RunnerError(RuntimeError):
    """The runner failed. Its state is lost with the arrays that were donated to it, so the engine can't go on."""


class Scheduler:
    """The engine's state machine, without a thread. Everything but `prepare` belongs to the engine thread.

    Args:
      runner: executes plans.
      settings: limits and targets.
      metrics: counters to feed.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings | None = None,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.limits = runner.limits
        self.settings = settings or EngineSettings()
        self.metrics = metrics or EngineMetrics()
        self.clock = clock
        self.memory = Memory(self.limits)
        self.planner = PrefillPlanner(self.limits.prefill_buckets, self.settings.max_num_batched_tokens)
        self.groups: dict[str, Group] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # owners of a row, oldest admission first
        self.swapped: list[Sequence] = []
        self.swapped_bytes = 0
        self.launches: collections.deque[Launch] = collections.deque()
        self.step_number = 0
        self.num_preemptions = 0
        self.num_evicted_pages = 0
        self.on_admitted: Callable[[Group], None] = lambda group: None
        self.on_finished: Callable[[Group], None] = lambda group: None
        self._eos_ids = frozenset(self.limits.eos_ids)
        self._mean_output_tokens = float(self.settings.decode_window_tokens)
        self._last_collect_s = 0.0
        self._swap_page_bytes: dict[str, float] = {}  # host bytes per page, by method, as measured
        self._broken: list[str] = []  # requests whose consumer raised
        self._stuck = 0  # iterations without progress while nothing was in flight

    # The door.

    def prepare(self, request: Request, on_event: Callable[[TokenEvent], None]) -> Group:
        """Checks a request against fixed limits only; safe in any thread. Raises RequestError."""
        limits = self.limits
        request.validate(limits.vocab_size)
        method = request.sparse_method or next(iter(limits.methods))
        facts = limits.methods.get(method)
        if facts is None:
            raise RequestError(
                f"sparse_method={method!r} is not served; choose one of {', '.join(limits.methods)}",
                param="sparse_method",
            )
        prompt_tokens, window = len(request.prompt_ids), limits.geometry.max_model_len
        wanted = request.params.max_tokens
        if prompt_tokens + (wanted or 1) > window:
            asked = f"{wanted} output tokens" if wanted else "at least one output token"
            raise ContextLengthError(
                f"{prompt_tokens} prompt tokens and {asked} exceed the window of {window} tokens",
                param="max_tokens" if wanted and prompt_tokens < window else "prompt",
            )
        limit = wanted or window - prompt_tokens
        possible = self.memory.most_tokens(facts, prompt_tokens, limit)
        if possible < (wanted or 1):
            needed = self.memory.pages_alone(facts, prompt_tokens, wanted or 1)
            pages = self.memory.pool.capacity(facts.granularity)
            raise CacheTooSmallError(
                f"{prompt_tokens} prompt tokens and {wanted or 1} output tokens need {needed} cache pages "
                f"({facts.granularity.value} granularity) with method {method}, but the cache has {pages}",
                param="prompt",
            )
        if min(facts.min_final_chunk(), prompt_tokens) > self.planner.max_chunk:
            raise RequestError(
                f"method {method} needs a last prompt chunk of {facts.min_final_chunk()} tokens, "
                f"but the largest chunk is {self.planner.max_chunk}",
                param="sparse_method",
            )
        seed = request.params.seed
        seed = random.getrandbits(64) if seed is None else seed
        return Group(request, method, facts, possible, self._eos_ids, seed, on_event)

    def add(self, group: Group) -> None:
        """Queues a prepared request."""
        self.groups[group.request_id] = group
        self.waiting.extend(group.choices)

    def cancel(self, request_id: str) -> None:
        """Ends every unfinished choice as "cancelled". Unknown and finished requests are left alone."""
        group = self.groups.get(request_id)
        for seq in group.choices if group else ():
            self._finish(seq, "cancelled")

    def stop(self, request_id: str, index: int) -> None:
        """Ends one choice as "stop": its consumer saw a stop string."""
        group = self.groups.get(request_id)
        if group and 0 <= index < len(group.choices):
            self._finish(group.choices[index], "stop")

    def fail_all(self, error: Exception) -> None:
        """Ends everything with an error event. The device is not touched any more."""
        self.launches.clear()
        for group in list(self.groups.values()):
            for seq in group.choices:
                self._finish(seq, "error", error=error)

    @property
    def busy(self) -> bool:
        """There is something to run or to collect."""
        return bool(self.groups or self.launches)

    # One iteration.

    def step(self) -> bool:
        """Collects what is due, submits what can run. Waits only if nothing else can be done. Returns `busy`."""
        self._collect_due()
        self._expire()
        for seq in list(self.running):
            self._settle(seq)
        self._renew_windows()
        progress = self._decode()
        progress = self._prefill() or progress
        if progress:
            self.step_number += 1
            self._stuck = 0
        elif self.launches:
            self._collect(self.launches.popleft())
        elif self.groups:
            self._break_impasse()
        for request_id in self._broken:
            self.cancel(request_id)
        self._broken.clear()
        return self.busy

    def _collect_due(self) -> None:
        oldest_allowed = self.step_number - self.settings.max_inflight_steps
        while self.launches and (self.launches[0].step <= oldest_allowed or self.launches[0].ticket.is_ready()):
            self._collect(self.launches.popleft())

    def _expire(self) -> None:
        now = self.clock()
        for seq in list(self.waiting):
            group = seq.group
            waited = now - group.request.arrival_s
            if waited > self.settings.queue_timeout_s and not group.started and seq.state is State.WAITING:
                reason = "no free row" if not self.memory.free_rows else "not enough free cache pages"
                error = QueueTimeoutError(f"waited {waited:.1f} s for admission: {reason}", retry_after_s=1.0)
                for choice in group.choices:
                    self._finish(choice, "error", error=error)

    def _window(self) -> int:
        low, high = self.settings.min_decode_window_tokens, self.settings.max_decode_window_tokens
        return int(min(max(self._mean_output_tokens, low), high))

    def _renew_windows(self) -> None:
        """Promises every decoding row its next tokens, oldest first; under pressure smaller ones, then victims."""
        for seq in sorted(self.running, key=_age):
            while seq.row and seq.state is State.DECODE and self.memory.must_renew(seq):
                if self.memory.reserve(seq, self._window(), 1):
                    break
                self._relieve(seq, "its next token")

    def _relieve(self, seq: Sequence, purpose: str) -> None:
        """Frees pages by swapping a victim out. If there is none, `seq` itself can't go on and ends."""
        victim = self._victim()
        if victim is not None:
            self._preempt(victim)
        else:
            needed, free = seq.reserved_pages, self.memory.pool.free_pages(seq.group.facts.granularity)
            error = CacheTooSmallError(
                f"no cache pages for {purpose}: {needed} reserved, {free} free, nothing to swap out"
            )
            self._finish(seq, "error", error=error)

    # Decode.

    def _decode(self) -> bool:
        by_method: dict[str, list[Sequence]] = {}
        for seq in self.running:
            if seq.state is State.DECODE:
                by_method.setdefault(seq.group.method, []).append(seq)
        largest = self.limits.decode_buckets[-1]
        progress = False
        for method, seqs in by_method.items():
            for i in range(0, len(seqs), largest):
                progress = self._decode_batch(method, seqs[i : i + largest]) or progress
        return progress

    def _decode_batch(self, method: str, seqs: list[Sequence]) -> bool:
        planned = [(seq, plan) for seq in seqs if (plan := self._guard(seq, self._plan_decode, seq)) is not None]
        submitted = self._submit(lambda rows: self.runner.decode(method, rows), planned, None)
        for seq in submitted:
            seq.computed += 1
            seq.dispatched += 1
            seq.phase_due = "token"
        for seq in submitted:
            self._after_step(seq)
        return bool(submitted)

    def _plan_decode(self, seq: Sequence) -> DecodeRow | None:
        if seq.phase_due or seq.pages is None:
            return None
        sampling = seq.sampling_row()
        updates = seq.pages.append(1)
        # A rebuilt row retraces its history: known tokens are fed, not sampled again.
        known = seq.rebuilt and seq.dispatched <= len(seq.output)
        return DecodeRow(seq.row, sampling, updates, seq.output[seq.dispatched - 1] if known else None)

    # Prefill.

    def _prefill(self) -> bool:
        candidates, progress = self._candidates()
        decoding = any(seq.state is State.DECODE for seq in self.running)
        chosen = self.planner.choose(candidates, self.settings.stall_target_ms / 1e3 if decoding else None)
        if chosen is None:
            return progress
        bucket, tokens = chosen
        planned = []
        for seq, count in zip(candidates, tokens, strict=True):
            if count:
                plan = self._guard(seq, self._plan_chunk, seq, count)
                if plan is not None:
                    planned.append((seq, plan))
        if not planned:
            return progress
        method = candidates[0].group.method
        submitted = self._submit(lambda rows: self.runner.prefill(method, rows), planned, bucket)
        counts = {id(seq): len(plan.tokens) for seq, plan in planned}
        now = self.clock()
        for seq in submitted:
            seq.computed += counts[id(seq)]
            seq.served_s = now
            seq.phase_due = "chunk"
            if seq.prefilled:
                seq.state = State.DECODE
                seq.dispatched = seq.prefill_len - len(seq.group.prompt) + 1
                seq.phase_due = "prompt"
        for seq in submitted:
            self._after_step(seq)
        return progress or bool(submitted)

    def _candidates(self) -> tuple[list[Sequence], bool]:
        """Rows for a prefill program, most urgent first and all of one method; admits and restores on the way.

        Returns also whether a swapped row came back.
        """
        now = self.clock()
        queue = [seq for seq in self.running if seq.state is State.PREFILL] + self.swapped
        if self.memory.free_rows:
            queue += [seq for seq in self.waiting if seq.leader is None]
        queue.sort(key=lambda seq: (-self._urgency(seq, now), _age(seq)))
        candidates: list[Sequence] = []
        restored = closed = False
        for seq in queue:
            if len(candidates) == self.planner.max_rows:
                break
            if candidates and seq.group.method != candidates[0].group.method and seq.state is not State.SWAPPED:
                continue
            if seq.state in (State.WAITING, State.SWAPPED):
                if closed:
                    continue
                was_swapped = seq.state is State.SWAPPED
                if not self._guard(seq, self._admit, seq):
                    # What frees up is owed to those who wait longest: nobody overtakes them for ever.
                    closed = was_swapped or now - seq.served_s > self.settings.starvation_bound_s
                    continue
                restored = restored or was_swapped
            if seq.state is State.PREFILL and (not candidates or seq.group.method == candidates[0].group.method):
                candidates.append(seq)
        return candidates, restored

    def _urgency(self, seq: Sequence, now: float) -> float:
        """Class plus aging: swapped-out rows, then begun prompts, then new ones; short work before long."""
        rank = {State.SWAPPED: 2, State.PREFILL: 1}.get(seq.state, 0)
        short = seq.prefill_len - seq.computed <= self.planner.max_chunk
        return rank + short + (now - seq.served_s) / self.settings.starvation_bound_s

    def _admit(self, seq: Sequence) -> bool:
        """Gives a waiting or swapped-out choice a row, if there is room for it and its decode window."""
        # Those who were preempted before must have room for longer, so nobody is swapped in and out for ever.
        window = self._window() << min(seq.preemptions, 16)
        alone = not self.running
        if not self.memory.admit(seq, window, 1 if alone else window):
            return False
        group = seq.group
        self._call(self.runner.setup_row, seq.row, group.request.params.logit_bias, group.end_stop_ids)
        if seq.swapped is not None:
            assert seq.pages is not None
            self._call(self.runner.import_row, group.method, seq.row, seq.pages.padded(-1), seq.swapped)
            self.swapped_bytes -= seq.swapped.nbytes
            seq.swapped = None
            self.swapped.remove(seq)
            seq.state = State.DECODE if seq.prefilled else State.PREFILL
        else:
            self.waiting.remove(seq)
            seq.state = State.PREFILL
        self.running.append(seq)
        self._admitted(seq)
        return True

    def _admitted(self, seq: Sequence) -> None:
        if seq.admitted_s is None:
            first = not seq.group.started
            seq.admitted_s = self.clock()
            self.metrics.request_queue_time_seconds.observe(seq.admitted_s - seq.group.request.arrival_s)
            if first:
                self.on_admitted(seq.group)

    def _plan_chunk(self, seq: Sequence, count: int) -> PrefillRow | None:
        if seq.phase_due or seq.pages is None:
            return None
        stop = seq.computed + count
        updates = seq.pages.append(count)
        sampling = dataclasses.replace(seq.sampling_row(), position=max(0, seq.prefill_len - len(seq.group.prompt)))
        tokens = seq.tokens(seq.computed, stop)
        return PrefillRow(seq.row, tokens, seq.computed == 0, stop == seq.prefill_len, sampling, updates)

    # Submission.

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the runner. A RequestError means that it refused and did nothing; anything else is fatal."""
        try:
            return function(*args)
        except RequestError:
            raise
        except Exception as error:
            raise RunnerError(f"{type(error).__name__}: {error}") from error

    def _guard(self, seq: Sequence, function: Callable[..., Any], *args: Any) -> Any:
        """Runs work on behalf of one choice. What goes wrong there ends that choice only; then None is returned."""
        try:
            return function(*args)
        except (RunnerError, IntegrityError, PageError):
            raise
        except PoolExhaustedError:
            if len(self.running) > 1 and seq.row:
                self._preempt(seq)
            else:
                self._relieve(seq, "its next rows")
        except Exception as error:
            log.exception("request %s failed while it was scheduled", seq.group.request_id)
            self._finish(seq, "error", error=error)
        return None

    def _submit(
        self, call: Callable[[list[Any]], Ticket], planned: list[tuple[Sequence, Any]], bucket: Bucket | None
    ) -> list[Sequence]:
        """Submits plans as one program and returns the choices that are in it.

        If the runner refuses the batch, halves of it are tried until those at fault are alone: they end.
        """
        if not planned:
            return []
        try:
            ticket = self._call(call, [plan for _, plan in planned])
        except RequestError as error:
            if len(planned) == 1:
                self._finish(planned[0][0], "error", error=error)
                return []
            half = len(planned) // 2
            return self._submit(call, planned[:half], bucket) + self._submit(call, planned[half:], bucket)
        rows = [(seq, plan.sampling.position if getattr(plan, "sample", True) else None) for seq, plan in planned]
        tokens = sum(len(plan.tokens) if bucket else 1 for _, plan in planned)
        self.launches.append(Launch(self.step_number, ticket, rows, self.clock(), bucket))
        self.metrics.iteration_tokens_total.observe(tokens)
        return [seq for seq, _ in planned]

    def _after_step(self, seq: Sequence) -> None:
        if seq.row and seq.exhausted:
            self._leave(seq)  # the last token is under way: nothing will read this row again
        else:
            self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        """Carries out what is due before the row may go on: maintenance, then forks."""
        if seq.row and seq.phase_due:
            self._guard(seq, self._maintain, seq)
        if seq.row and not seq.phase_due and 0 < seq.computed == seq.group.fork_at:
            for choice in seq.group.choices:
                if choice.leader is seq:
                    choice.leader = None
                    self._guard(choice, self._fork, seq, choice)

    def _maintain(self, seq: Sequence) -> None:
        """Evicts if the method says so. Pages return to the pool at once."""
        pages, facts, phase = seq.pages, seq.group.facts, seq.phase_due
        assert pages is not None and phase is not None
        kept = self.memory.kept(facts, phase, pages.lengths)
        if kept is not None:
            needed = int(self.limits.geometry.pages(kept).sum())
            while self.memory.pool.free_pages(facts.granularity) < needed:
                self._relieve(seq, "a compaction")
                if not seq.row:
                    return

            def submit(table: np.ndarray) -> None:
                plan = MaintainRow(seq.row, "evict", phase, pages.lengths.copy(), kept, table, seq.computed)
                self._call(self.runner.maintain, seq.group.method, plan)

            freed = pages.compact(kept, submit)
            self.num_evicted_pages += freed
            self.metrics.pages_evicted.inc(freed)
            self.metrics.maintenance_steps.inc(kind="evict")
            self.memory.shrink(seq)
        seq.phase_due = None

    def _fork(self, source: Sequence, target: Sequence) -> None:
        """Starts a choice as a copy of another. If it can't be had now, the choice waits and prefills on its own."""
        if target.state is not State.WAITING:
            return
        copies = self.memory.fork(source, target, self._window())
        if copies is None:
            return
        assert target.pages is not None
        group = target.group
        self.waiting.remove(target)
        self.running.append(target)
        target.state = State.PREFILL
        self._call(self.runner.setup_row, target.row, group.request.params.logit_bias, group.end_stop_ids)
        plan = ForkRow(source.row, target.row, target.pages.updates(), copies)
        self._call(self.runner.fork, group.method, plan)
        self._admitted(target)

    # Preemption.

    def _victim(self) -> Sequence | None:
        """Whom to swap out: never the oldest, so that somebody always gets done; else the newest that can be swapped.

        When swap space is short, rows that can be rebuilt exactly in prompt chunks go first.
        """
        rows = sorted(self.running, key=_age)[1:]
        if not rows:
            return None

        def cost(seq: Sequence) -> tuple[bool, bool]:
            swappable = self._swap_estimate(seq) + self.swapped_bytes <= self.settings.swap_bytes
            return not swappable, not swappable and not _chunkable(seq)

        return min(reversed(rows), key=cost)

    def _swap_estimate(self, seq: Sequence) -> float:
        count = seq.pages.count if seq.pages else 0
        return self._swap_page_bytes.get(seq.group.method, 0.0) * count

    def _preempt(self, seq: Sequence) -> None:
        """Takes row and pages away. The state goes to host memory if it fits there, else it is recomputed later."""
        pages, method = seq.pages, seq.group.method
        assert pages is not None
        seq.preemptions += 1
        seq.served_s = self.clock()
        self.num_preemptions += 1
        self.metrics.num_preemptions.inc()
        swapped = None
        if seq.computed and self._swap_estimate(seq) + self.swapped_bytes <= self.settings.swap_bytes:
            swapped = self._call(self.runner.export_row, method, seq.row, pages.padded(-1))
            self._swap_page_bytes[method] = swapped.nbytes / max(1, pages.count)
            if swapped.nbytes + self.swapped_bytes > self.settings.swap_bytes:
                swapped = None
        if swapped is not None:
            seq.swapped, seq.swapped_lengths = swapped, pages.lengths.copy()
            self.swapped_bytes += swapped.nbytes
            self.swapped.append(seq)
            seq.state = State.SWAPPED
        else:
            # Tokens that are in flight still count when they arrive: the same seed and position sample them again.
            seq.rebuilt = seq.rebuilt or seq.computed > 0
            seq.prefill_len = len(seq.group.prompt) + (len(seq.output) if _chunkable(seq) else 0)
            seq.computed = seq.dispatched = 0
            seq.phase_due = None
            self.waiting.append(seq)
            seq.state = State.WAITING
        self.running.remove(seq)
        self.memory.release(seq)
        log.info("request %s preempted (%s)", seq.group.request_id, seq.state.value)

    def _break_impasse(self) -> None:
        """Nothing runs and nothing can start: the choice at the head can't be served, the others may."""
        self._stuck += 1
        if self._stuck < 3:
            return
        self._stuck = 0
        seq = min((s for g in self.groups.values() for s in g.choices if s.state is not State.FINISHED), key=_age)
        log.error("request %s can make no progress on an idle engine", seq.group.request_id)
        needed, free = seq.reserved_pages, self.memory.pool.free_pages(seq.group.facts.granularity)
        message = f"the request can make no progress: {free} cache pages are free, {needed} reserved"
        self._finish(seq, "error", error=CacheTooSmallError(message))

    # Collection.

    def _collect(self, launch: Launch) -> None:
        """Takes one program's results, waiting for them if need be, and tells the consumers."""
        result: StepResult = self._call(launch.ticket.result)
        now = self.clock()
        elapsed = now - max(launch.submitted_s, self._last_collect_s)
        self._last_collect_s = now
        if launch.bucket is not None:
            self.planner.observe(launch.bucket, elapsed)
        tokens, ok = result.tokens.tolist(), result.ok.tolist()
        for i, (seq, position) in enumerate(launch.rows):
            if seq.state is State.FINISHED:
                continue
            if not ok[i]:
                self._finish(seq, "error", error=RuntimeError("the model produced non-finite logits for this request"))
            elif position is not None and position >= len(seq.output):
                if position > len(seq.output):
                    raise IntegrityError(f"token {len(seq.output)} of {seq.group.request_id} was lost")
                self._deliver(seq, tokens[i], _logprobs(seq, result, i), now)

    def _deliver(self, seq: Sequence, token: int, logprobs: tuple[TokenLogprob, ...] | None, now: float) -> None:
        group, metrics = seq.group, self.metrics
        seq.output.append(token)
        if seq.first_token_s is None:
            seq.first_token_s = now
            metrics.time_to_first_token_seconds.observe(now - group.request.arrival_s)
        elif seq.last_token_s is not None:
            metrics.inter_token_latency_seconds.observe(now - seq.last_token_s)
        seq.last_token_s = now
        metrics.generation_tokens.inc()
        may_stop = len(seq.output) > group.request.params.min_tokens
        if may_stop and (token in group.eos_ids or token in group.stop_ids):
            stop_reason = token if token in group.stop_ids and token not in group.eos_ids else None
            self._finish(seq, "stop", (token,), logprobs, stop_reason)
        elif len(seq.output) == group.max_tokens:
            self._finish(seq, "length", (token,), logprobs)
        else:
            self._emit(group, TokenEvent(group.request_id, seq.index, (token,), logprobs))

    def _leave(self, seq: Sequence) -> None:
        """Takes the choice off its row, if it has one."""
        if seq.row:
            self.note_usage(seq)
            self.running.remove(seq)
        self.memory.release(seq)

    def note_usage(self, seq: Sequence) -> None:
        """Records what the row holds and reads, for stats."""
        if seq.pages is not None:
            seq.resident_tokens = seq.pages.length
            seq.read_tokens = seq.group.facts.rows_read(seq.resident_tokens, self.limits.geometry)

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop_reason: int | None = None,
        error: Exception | None = None,
    ) -> None:
        """Ends a choice wherever it is: everything it owned is free, and its last event is out. Idempotent."""
        if seq.state is State.FINISHED:
            return
        group, now = seq.group, self.clock()
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        elif seq.state is State.SWAPPED:
            self.swapped.remove(seq)
        if seq.swapped is not None:
            self.swapped_bytes -= seq.swapped.nbytes
            seq.swapped = None
        try:
            self._leave(seq)
        finally:
            seq.state = State.FINISHED
            followers = [choice for choice in group.choices if choice.leader is seq]
            for follower in followers:
                follower.leader = None if follower is followers[0] else followers[0]
            stats = seq.stats(now)
            if seq.output:
                self._mean_output_tokens += 0.1 * (len(seq.output) - self._mean_output_tokens)
            self.metrics.finished(seq.group.request, reason, stats)
            self._emit(
                group, TokenEvent(group.request_id, seq.index, tokens, logprobs, reason, stop_reason, error, stats)
            )
            if group.finished:
                del self.groups[group.request_id]
                self.on_finished(group)

    def _emit(self, group: Group, event: TokenEvent) -> None:
        try:
            group.on_event(event)
        except Exception:
            log.exception("the consumer of request %s failed; the request is cancelled", group.request_id)
            self._broken.append(group.request_id)

    def check_integrity(self) -> None:
        """Re-adds rows, pages and queues; raises IntegrityError."""
        self.memory.check_integrity()
        if sorted(map(id, self.running)) != sorted(map(id, self.memory.holders.values())):
            raise IntegrityError("the running choices are not the owners of the rows")
        queued = [*self.waiting, *self.swapped, *self.running]
        if len({id(seq) for seq in queued}) != len(queued):
            raise IntegrityError("a choice is in two queues")
        live = [seq for group in self.groups.values() for seq in group.choices if seq.state is not State.FINISHED]
        if {id(seq) for seq in queued} - {id(seq) for seq in live}:
            raise IntegrityError("a finished choice is still queued")
        flying = {id(seq) for launch in self.launches for seq, _ in launch.rows}
        if {id(seq) for seq in live} - {id(seq) for seq in queued} - flying:
            raise IntegrityError("a choice is lost: neither queued, nor on a row, nor in flight")
        if self.swapped_bytes != sum(seq.swapped.nbytes for seq in self.swapped if seq.swapped):
            raise IntegrityError("the swap space is miscounted")


def _age(seq: Sequence) -> tuple[float, str, int]:
    """Sorts oldest request first."""
    return seq.group.request.arrival_s, seq.group.request_id, seq.index


def _chunkable(seq: Sequence) -> bool:
    """Output can be recomputed in prompt chunks with the same result: nothing was evicted, nothing counts it apart."""
    params = seq.group.request.params
    return seq.compaction_pages == 0 and not params.presence_penalty and not params.frequency_penalty


def _logprobs(seq: Sequence, result: StepResult, i: int) -> tuple[TokenLogprob, ...] | None:
    count = seq.group.request.params.logprobs
    if count is None:
        return None
    assert result.logprob is not None and result.top_ids is not None and result.top_logprobs is not None
    ids, values = result.top_ids[i, :count].tolist(), result.top_logprobs[i, :count].tolist()
    top = tuple(zip(ids, values, strict=True))
    return (TokenLogprob(int(result.tokens[i]), float(result.logprob[i]), top),)
