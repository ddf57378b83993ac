"""What runs next: admission, decode, bounded prefill, and the delivery of tokens.

One iteration submits one decode program per method group and at most one prefill program: prompt chunks, or a replay of
a prompt that its method wants to see again before it compacts the row. Up to `max_inflight_steps` iterations are under
way before the oldest is collected. The device keeps each row's last token, so a step never waits for the tokens of the
one before; what a row turns out not to need (after end-of-sequence) is dropped on collection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sparsejax.cache.evicted import PageScores
from sparsejax.cache.pages import IntegrityError
from sparsejax.errors import ChainCapacityError, QueueTimeoutError, RequestError
from sparsejax.launches import call_runner
from sparsejax.lifecycle import Lifecycle, age, log
from sparsejax.plans import DecodeRow, PrefillRow, ReplayRow, StepResult, Ticket
from sparsejax.prefill import Bucket
from sparsejax.request import TokenEvent, TokenLogprob
from sparsejax.rows import Sequence, State

_DISK_WAIT_S = 0.01  # before other threads are heard again
_RESULT_WAIT_S = 0.001  # before the numbers that a prune job waits for are asked for again
_BLOCKED_WAIT_S = 0.005  # the same for jobs that wait for others


class Scheduler(Lifecycle):
    """The engine's state machine, without a thread. Everything but `prepare` belongs to the engine thread.

    Attributes:
      pause: waits so many seconds, where there is nothing to do but to look again.
    """

    pause: Callable[[float], None] = staticmethod(time.sleep)

    @property
    def busy(self) -> bool:
        """There is something to run or to collect."""
        return bool(self.groups or self.launches or self.prunes.pending)

    def step(self) -> bool:
        """One iteration: collects what is due and submits what can run. Waits only if nothing else can be done.

        Returns `busy`.
        """
        while self.launches.due(self.step_number - self.settings.max_inflight_steps):
            self._collect()
        self._expire()
        self.chains.tiers.expire()
        self._poll_chains()
        for seq in [seq for seq in self.running if seq.phase_due]:
            self._settle(seq)
            self._rest(seq)
        self._renew_windows()
        progress = self._decode()
        prompts = self._prefill()
        if self.prunes.pending:
            self.prunes.step(quiet=not prompts)
            progress = progress or self.prunes.moved
        if progress or prompts:
            self.step_number += 1
            self._stuck = 0
        elif self.launches:
            self._collect()
        elif any(self.chains.loading(seq) for seq in self.waiting):
            self.chains.tiers.wait(_DISK_WAIT_S)
        elif self.prunes.awaits_result:
            self.pause(_RESULT_WAIT_S)
        elif self.groups:
            self._break_impasse()
        elif self.prunes.pending:
            self.pause(_BLOCKED_WAIT_S)
        for request_id in self._broken:
            self.cancel(request_id)
        self._broken.clear()
        return self.busy

    def _expire(self) -> None:
        """Ends requests that waited too long without any choice being admitted."""
        now, longest_s = self.clock(), self.settings.queue_timeout_s
        chain_s = self.settings.chain_queue_timeout_s or longest_s
        for seq in list(self.waiting):
            group, waited_s = seq.group, now - seq.group.request.arrival_s
            if waited_s <= min(longest_s, chain_s):
                break  # the queue is in order of arrival, but for preempted choices, which don't expire
            chain_id = group.request.chain.chain_id if group.request.chain else None
            if waited_s <= (chain_s if chain_id else longest_s):
                continue
            if not group.started and seq.state is State.WAITING:
                reason = "not enough free cache pages" if self.memory.free_rows else "no free row"
                text = f"waited {waited_s:.1f} s for admission: {reason}"
                error: RequestError = QueueTimeoutError(text, retry_after_s=1.0)
                if chain_id:
                    error = ChainCapacityError(text, chain_id=chain_id, retry_after_s=1.0)
                for choice in group.choices:
                    self._finish(choice, "error", error=error)

    def _break_impasse(self) -> None:
        """Nothing runs and nothing can start: the oldest choice can't be served, the others may."""
        self._stuck += 1
        if self._stuck < 3:  # one iteration without progress is normal after a preemption
            return
        self._stuck = 0
        if self.prunes.give_way():
            return
        live = (seq for group in self.groups.values() for seq in group.choices if seq.state is not State.FINISHED)
        seq = min(live, key=age)
        log.error("request %s can make no progress on an idle engine", seq.group.request_id)
        self._finish(seq, "error", error=self._no_room(seq, "the request"))

    def _renew_windows(self) -> None:
        """Promises every decoding row its next tokens, oldest first.

        Under pressure promises shrink to the next step, then rows are evicted early, before anybody loses a place.
        """
        window, tight = self._window(), False
        for seq in sorted(self.running, key=age):
            while seq.row and seq.state is State.DECODE and not seq.exhausted and self.memory.must_renew(seq):
                if self.memory.reserve(seq, window, 1):
                    break
                if tight:
                    if not self.chains.reclaim() and not self._squeeze():
                        self._relieve(seq, "the next token")
                else:
                    self.memory.tighten()
                    window, tight = self.limits.geometry.page_size, True

    # Decode.

    def _decode(self) -> bool:
        """Submits a step for every decoding row. Returns whether there was one."""
        by_method: dict[str, list[Sequence]] = {}
        for seq in self.running:
            if seq.state is State.DECODE and not seq.exhausted:
                by_method.setdefault(seq.group.method, []).append(seq)
        largest, progress = self.limits.decode_buckets[-1], False
        for method, seqs in by_method.items():
            for i in range(0, len(seqs), largest):
                progress = self._decode_batch(method, seqs[i : i + largest]) or progress
        return progress

    def _decode_batch(self, method: str, seqs: list[Sequence]) -> bool:
        planned = self._plan(seqs, self._plan_decode)
        submitted = self._submit(lambda rows: self.runner.decode(method, rows), planned, None)
        due = "token" if self.limits.methods[method].evicts else None
        for seq in submitted:
            seq.computed += 1
            seq.dispatched += 1
            seq.phase_due = due
        for seq in submitted:
            if due or seq.exhausted:
                self._after_step(seq)
        return bool(submitted)

    def _plan_decode(self, seq: Sequence) -> DecodeRow | None:
        if seq.phase_due or seq.pages is None:
            return None
        updates = seq.append(1)
        # A rebuilt row retraces its history: known tokens are fed, not sampled again.
        known = seq.rebuilt and seq.dispatched <= len(seq.output)
        token = seq.output[seq.dispatched - 1] if known else None
        return DecodeRow(seq.row, seq.sampling_row(seq.dispatched), updates, token)

    # Prefill.

    def _prefill(self) -> bool:
        """Submits at most one program of prompt chunks, or one replay. Returns whether anything was submitted."""
        candidates, restored = self._candidates()
        if candidates and candidates[0].state is State.REPLAY:
            return self._replay(candidates[0]) or restored
        decoding = any(seq.state is State.DECODE for seq in self.running)
        chosen = self.planner.choose(candidates, self.settings.stall_target_ms / 1e3 if decoding else None)
        if chosen is None:
            return restored
        bucket, tokens = chosen
        counts = {id(seq): n for seq, n in zip(candidates, tokens, strict=True)}
        planned = self._plan(candidates, lambda seq: self._plan_chunk(seq, counts[id(seq)]))
        method = candidates[0].group.method
        submitted = self._submit(lambda rows: self.runner.prefill(method, rows), planned, bucket)
        now = self.clock()
        for seq in submitted:
            seq.computed += counts[id(seq)]
            self.radix.submitted(seq, self.step_number)
            seq.served_s = now
            seq.phase_due = "chunk"
            if seq.prefilled:
                seq.state = State.REPLAY if seq.replaying else State.DECODE
                seq.dispatched = seq.first_position + 1
                seq.phase_due = None if seq.replaying else "prompt"
        for seq in submitted:
            self._after_step(seq)
        return restored or bool(submitted)

    def _plan_chunk(self, seq: Sequence, count: int) -> PrefillRow | None:
        if not count or seq.phase_due or seq.pages is None:
            return None
        stop = seq.computed + count
        tokens, updates = seq.tokens(seq.computed, stop), seq.append(count)
        sampling = seq.sampling_row(seq.first_position)
        return PrefillRow(seq.row, tokens, seq.computed == 0, stop == seq.prefill_len, sampling, updates)

    def _replay(self, seq: Sequence) -> bool:
        """Submits the next replay of a prompt; after the last one the row is compacted and decodes."""
        planned = self._plan([seq], self._plan_replay)
        submitted = self._submit(lambda rows: self.runner.replay(seq.group.method, rows[0]), planned, None)
        if not submitted or seq.pages is None:
            return False
        # What runs later may have the pages already. They stay promised to the replays that are left.
        seq.pages.truncate(len(planned[0][1].tokens))
        seq.replayed += 1
        seq.served_s = self.clock()
        if not seq.replaying:
            seq.state = State.DECODE
            seq.phase_due = "prompt"
            self.memory.shrink(seq)
        self._after_step(seq)
        return True

    def _plan_replay(self, seq: Sequence) -> ReplayRow | None:
        if seq.pages is None:
            return None
        tokens = seq.group.facts.replay_ids(seq.group.prompt, seq.replayed)
        return ReplayRow(seq.row, tokens, seq.replayed, seq.append(len(tokens)))

    def _candidates(self) -> tuple[list[Sequence], bool]:
        """Choices of one method that may prefill now, most urgent first; admits and restores on the way.

        If the most urgent one is to be replayed, it comes alone.

        Returns also whether a swapped-out choice came back.
        """
        now = self.clock()
        queue = [s for s in self.running if s.state in (State.PREFILL, State.REPLAY) and not s.awaits_scores]
        if self.memory.free_rows:
            queue += self.swapped
            queue += [seq for seq in self.waiting if seq.leader is None and not self.chains.loading(seq)]
        queue.sort(key=lambda seq: (-self._urgency(seq, now), age(seq)))
        candidates: list[Sequence] = []
        restored = closed = False
        for seq in queue:
            if len(candidates) == self.planner.max_rows:
                break
            if seq.state is State.REPLAY:
                if not candidates:
                    return [seq], restored
                continue
            joins = not candidates or seq.group.method == candidates[0].group.method
            if not joins and seq.state is not State.SWAPPED:
                continue
            if not seq.row:
                if closed or self.radix.follows(seq, self.running):
                    continue
                if not self._guard(seq, self._admit):
                    # What frees up is owed to those who lost their place or waited long: nobody overtakes them then.
                    closed = seq.preemptions > 0 or now - seq.served_s > self.settings.starvation_bound_s
                    continue
                restored = restored or seq.computed > 0
            if joins and seq.state is State.PREFILL and not seq.awaits_scores:
                candidates.append(seq)
        return candidates, restored

    def _urgency(self, seq: Sequence, now: float) -> float:
        """Class plus aging: those who lost their place, then begun prompts, then new ones; short work before long."""
        rank = 2 if seq.preemptions and not seq.row else int(seq.state in (State.PREFILL, State.REPLAY))
        short = seq.prefill_len - seq.computed <= self.planner.max_chunk
        return rank + short + (now - seq.served_s) / self.settings.starvation_bound_s

    # Submission and collection.

    def _plan(self, seqs: list[Sequence], plan_row: Callable[[Sequence], Any]) -> list[tuple[Sequence, Any]]:
        plans = ((seq, self._guard(seq, plan_row)) for seq in seqs)
        return [(seq, plan) for seq, plan in plans if plan is not None]

    def _submit(
        self, call: Callable[[list[Any]], Ticket], planned: list[tuple[Sequence, Any]], bucket: Bucket | None
    ) -> list[Sequence]:
        """Submits plans as one program and returns the choices that are in it.

        If the runner refuses the batch, halves of it are tried until those at fault are alone: they end.
        """
        if not planned:
            return []
        try:
            ticket = call_runner(call, [plan for _, plan in planned])
        except RequestError as error:
            if len(planned) == 1:
                self._finish(planned[0][0], "error", error=error)
                return []
            half = len(planned) // 2
            return self._submit(call, planned[:half], bucket) + self._submit(call, planned[half:], bucket)
        self.launches.add(self.step_number, ticket, [(seq, _sampled(plan)) for seq, plan in planned], bucket)
        tokens = sum(1 if isinstance(plan, DecodeRow) else len(plan.tokens) for _, plan in planned)
        self.metrics.iteration_tokens_total.observe(tokens)
        return [seq for seq, _ in planned]

    def _after_step(self, seq: Sequence) -> None:
        if seq.chain is not None:
            self._settle(seq)
            self._rest(seq)
        elif seq.row and seq.exhausted and not seq.unconfirmed:
            self._leave(seq)  # the last token is under way, and its prompt is published: nobody needs this row again
        else:
            self._settle(seq)

    def _collect(self) -> None:
        """Takes the oldest program's results, waiting for them if need be, and tells the consumers."""
        launch, result, elapsed_s = self.launches.collect()
        if isinstance(result, PageScores):
            ((seq, _),) = launch.rows
            self._guard(seq, lambda seq: self.recall.arrive(seq, launch.ticket, result))
            return
        if isinstance(result, np.ndarray):
            ((seq, _),) = launch.rows
            if seq.counting is launch.ticket:  # else the row was rebuilt since
                seq.counting, seq.counts = None, result
            return
        if launch.bucket is not None:
            self.planner.observe(launch.bucket, elapsed_s)
        now, tokens, ok = self.clock(), result.tokens.tolist(), result.ok.tolist()
        delivered = 0
        for i, (seq, position) in enumerate(launch.rows):
            if seq.state is State.FINISHED:
                continue
            if not ok[i]:
                self._finish(seq, "error", error=RuntimeError("the model produced non-finite logits for this request"))
                continue
            if launch.bucket is not None:
                self.radix.confirm(seq, launch.step)
            if position is not None and position >= len(seq.output):  # else a rebuilt row retraces its steps
                if position > len(seq.output):
                    raise IntegrityError(f"token {len(seq.output)} of {seq.group.request_id} was lost")
                self._deliver(seq, tokens[i], _logprobs(seq, result, i), now)
                delivered += 1
        self.metrics.generation_tokens.inc(delivered)

    def _deliver(self, seq: Sequence, token: int, logprobs: tuple[TokenLogprob, ...] | None, now: float) -> None:
        group, metrics = seq.group, self.metrics
        seq.output.append(token)
        if seq.last_token_s is None:
            seq.first_token_s = now
            metrics.time_to_first_token_seconds.observe(now - group.request.arrival_s)
        else:
            metrics.inter_token_latency_seconds.observe(now - seq.last_token_s)
        seq.last_token_s = now
        may_stop = len(seq.output) > group.request.params.min_tokens
        if may_stop and (token in group.eos_ids or token in group.stop_ids):
            self._finish(seq, "stop", (token,), logprobs, None if token in group.eos_ids else token)
        elif len(seq.output) == group.max_tokens:
            self._finish(seq, "length", (token,), logprobs)
        else:
            self._emit(group, TokenEvent(group.request_id, seq.index, (token,), logprobs))


def _sampled(plan: DecodeRow | PrefillRow | ReplayRow) -> int | None:
    """Position within the completion of the token that a plan samples, if it samples one."""
    if isinstance(plan, ReplayRow) or (isinstance(plan, PrefillRow) and not plan.sample):
        return None
    return plan.sampling.position


def _logprobs(seq: Sequence, result: StepResult, i: int) -> tuple[TokenLogprob, ...] | None:
    count = seq.group.request.params.logprobs
    if count is None or result.logprob is None or result.top_ids is None or result.top_logprobs is None:
        return None
    ids, values = result.top_ids[i, :count].tolist(), result.top_logprobs[i, :count].tolist()
    return (TokenLogprob(int(result.tokens[i]), float(result.logprob[i]), tuple(zip(ids, values, strict=True))),)
