"""Conversations between their turns: where their rows are, how a turn gets them, and what comes back at its end.

`cache.chain_index` decides which chain a turn continues; this module moves the rows. A turn claims its chain when it is
queued, so nobody else can have it, and takes the rows when it gets a row: until then they can still go to the host, as
those of idle chains can when the cache has no room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from sparsejax import chain_reports
from sparsejax.admission import most_tokens
from sparsejax.cache import row_layout
from sparsejax.cache.chain import Chain, ChainIds, ChainState, Checkpoint, Quality, Tier, as_ids, fingerprint, seed_of
from sparsejax.cache.chain_index import Plan, Turn
from sparsejax.cache.chain_store import Snapshot
from sparsejax.cache.pages import IntegrityError, PoolExhaustedError
from sparsejax.cache.radix_tree import Scope
from sparsejax.chain_disk import Disk, Job
from sparsejax.chain_rows import DeviceRows, Rows, StoredRows, lengths_of, size_of, tier_of
from sparsejax.chain_tiers import Tiers
from sparsejax.errors import ChainCapacityError, ChainGoneError, ChainOwnerError, RequestError
from sparsejax.launches import call_runner
from sparsejax.memory import Memory
from sparsejax.metrics import EngineMetrics
from sparsejax.plans import Runner, UnparkRow
from sparsejax.recall import Recall
from sparsejax.request import ChainOptions, ChainReport, FinishReason
from sparsejax.rows import Group, Sequence
from sparsejax.settings import EngineSettings

log = logging.getLogger("sparsejax.engine")

STATE_FORMAT = 1
"""Changes when rows of older versions can't be read."""


class Chains:
    """The chains of one engine. The engine thread's.

    Args:
      runner: moves rows.
      memory: rows and pages.
      settings: budgets.
      metrics: counters to feed.
      clock: seconds, monotonic.
      disk: where chains outlive the engine; it issues their ids then.
    """

    def __init__(
        self,
        runner: Runner,
        memory: Memory,
        settings: EngineSettings,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        disk: Disk | None = None,
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        ids = ChainIds(secrets.token_bytes(32)) if disk is None else disk.ids
        self.tiers = Tiers(runner, memory, settings, clock, ids, disk)
        self.tiers.fields = self.fingerprint_fields
        self.index, self.host = self.tiers.index, self.tiers.host
        self._fingerprints: dict[str, bytes] = {}
        self._turns: dict[str, Sequence] = {}  # choices that have a chain, by request
        self.recall = Recall(runner, memory, settings, clock, lambda seq: self.reclaim(seq.chain))
        self.spares: Callable[[Sequence], bool] = lambda seq: False  # the prefix cache's
        self._silent: set[str] = set()  # requests that hear of their chain when its rows were read
        self.tiers.adopt(self._method_of)

    @property
    def now_s(self) -> float:
        """Seconds of the clock that all times of chains are in."""
        return self._clock()

    @property
    def memory(self) -> Memory:
        """Rows and pages."""
        return self._memory

    @property
    def ttl_s(self) -> float:
        """How long an idle chain stays whose client did not say."""
        return self._settings.chain_ttl_s

    @property
    def methods(self) -> Collection[str]:
        """Those that chains can have."""
        return self._runner.limits.methods.keys()

    def fingerprint(self, method: str) -> bytes:
        """Of what a method makes on this engine."""
        if method not in self._fingerprints:
            self._fingerprints[method] = fingerprint(self.fingerprint_fields(method))
        return self._fingerprints[method]

    def seed(self, method: str, salt: str, tenant: str) -> bytes:
        """Of the chains that such turns may go on from (see `Chain`)."""
        return seed_of(self.fingerprint(method), salt, tenant)

    def scope(self, method: str, salt: str, tenant: str) -> Scope:
        """Of the rows that such requests may begin with (see `radix_cache`)."""
        return Scope(self.seed(method, salt, tenant), tenant, method, self.fingerprint(method))

    def fingerprint_fields(self, method: str) -> dict[str, Any]:
        """What it is made of, by name."""
        limits, facts = self._runner.limits, self._runner.limits.methods[method]
        geometry = dataclasses.asdict(limits.geometry)
        del geometry["max_model_len"]  # a longer window reads the rows of a shorter one
        return {
            "state_format": STATE_FORMAT,
            **limits.identity,
            **{f"geometry.{name}": str(value) for name, value in geometry.items()},
            "vocab_size": limits.vocab_size,
            "method": facts.name,
            "knobs": limits.knobs.get(method),
            "granularity": facts.granularity.value,
            "chunks": [list(b) for b in limits.prefill_buckets] if facts.chunk_dependent else None,
        }

    def _method_of(self, snapshot: Snapshot) -> str | list[str]:
        """The method that can use a snapshot, or the fields that differ."""
        record = snapshot.record
        for method in self.methods:
            if self.fingerprint(method) == record.fingerprint:
                fits = len(record.ledger) < self._runner.limits.geometry.max_model_len
                return method if fits else ["max_model_len"]
        same = [m for m in self.methods if m == record.method] or list(self.methods)[:1]
        ours = self.fingerprint_fields(same[0])
        names = sorted({*ours, *record.fields})
        return [name for name in names if ours.get(name) != record.fields.get(name)] or ["fingerprint"]

    # A turn begins.

    def claim(self, group: Group) -> None:
        """Gives a queued request its chain. Raises RequestError with nothing changed."""
        options, seq = group.request.chain, group.choices[0]
        assert options is not None
        prefix = group.request.prefix
        turn = self.turn(options, group.prompt, group.method, prefix is not None and prefix.exact)
        plan = self.index.plan(turn)
        limit = self._most_tokens(group, plan)
        copy = None
        if plan.forks and plan.source is not None:
            copy = self.copy(plan.source, plan.checkpoint)
            if copy is None:
                status = "created" if options.chain_id is None else "recreated"
                plan = Plan(status, turn, plan.ids, reason="no room for a copy of the chain", miss="evicted")
                limit = self._most_tokens(group, plan)
        chain = self.index.apply(plan, group.request_id)
        if copy is not None:
            self.index.place(chain, copy, size_of(copy), tier_of(copy))
        chain.priority, chain.ttl_s = options.priority, options.ttl_s
        chain.resume_hint_s = options.expected_resume_s
        seq.chain, seq.chain_status, seq.chain_reason = chain, plan.status, plan.reason
        seq.chain_miss, seq.diverged_at, seq.restored_from = plan.miss, plan.diverged_at, None
        if plan.reused and chain.payload is not None:
            seq.restored_from, seq.retained_tokens = chain.tier.name.lower(), int(lengths_of(chain.payload).max())
        group.prompt, group.max_tokens = plan.ids.astype(np.int32), limit
        self._set_base(seq, plan.reused)
        self._turns[group.request_id] = seq
        if isinstance(chain.payload, StoredRows):
            # Rows that blocks stand for better stay where they are.
            chain.payload.bounced = self.spares(seq)
        if self.loading(seq):
            self._silent.add(group.request_id)
        chain_reports.claimed(seq, self._metrics)

    def loading(self, seq: Sequence) -> bool:
        """The turn waits for rows that are on disk; until they are there nobody knows if it can go on from them."""
        chain = seq.chain
        if chain is None or seq.begun or not isinstance(chain.payload, StoredRows):
            return False
        return not chain.payload.in_memory

    def poll(self) -> list[tuple[Sequence, RequestError | None]]:
        """Turns whose rows were read, or could not be and which end for that."""
        found: list[tuple[Sequence, RequestError | None]] = []
        for job in self.tiers.poll():
            waiting = [s for s in self._turns.values() if s.chain is not None and s.chain.payload is job.rows]
            for seq in waiting if job.error is not None else ():
                error = self._start_over(seq, job)
                if error is not None:
                    found.append((seq, error))
        for request_id in list(self._silent):
            seq = self._turns.get(request_id)
            if seq is None or not self.loading(seq):
                self._silent.discard(request_id)
                if seq is not None and seq.chain is not None:
                    found.append((seq, None))
        return found

    def _start_over(self, seq: Sequence, job: Job) -> RequestError | None:
        """The rows of a queued turn can't be read: it computes its whole context, as another chain, or ends.

        What is corrupt is gone. Else the chain is as it was before, and may be read another time.
        """
        chain, group, owner = seq.chain, seq.group, seq.group.request_id
        options = group.request.chain
        assert chain is not None
        assert options is not None
        if job.corrupt:
            self.index.fail(chain, owner, "corrupt")
        else:
            self.index.unclaim(chain, owner)
        reason = f"the snapshot of chain {chain.chain_id} can't be read: {job.error}"
        turn = self.turn(options, group.prompt, group.method)
        plan = Plan("recreated", turn, as_ids(group.prompt.astype(np.uint32)), reason=reason, miss="corrupt")
        error: RequestError | None = None
        if options.on_miss == "error":
            error = ChainGoneError(reason, chain_id=chain.chain_id, reason="corrupt")
            if not job.corrupt:
                error = ChainCapacityError(reason, chain_id=chain.chain_id, retry_after_s=1.0)
        else:
            try:
                group.max_tokens = self._most_tokens(group, plan)
            except RequestError as refused:
                error = refused
        if error is not None:
            del self._turns[owner]
            seq.chain = None
            return error
        seq.chain = self.index.apply(plan, owner)
        self._set_base(seq, 0)
        seq.chain_status, seq.chain_reason, seq.chain_miss = "recreated", reason, "corrupt"
        seq.diverged_at = seq.restored_from = None
        seq.retained_tokens = 0
        return None

    def turn(self, options: ChainOptions, prompt: np.ndarray, method: str, exact: bool = False) -> Turn:
        """What a request asks of the index; `exact` excludes states that pruning has had a part in."""
        prints = self.fingerprint(method)
        return Turn(
            as_ids(prompt.astype(np.uint32)),
            seed_of(prints, options.salt, options.tenant),
            prints,
            method,
            options.tenant,
            options.chain_id or None,
            options.append,
            options.lookup,
            options.on_miss,
            options.on_busy,
            options.branch,
            options.expected_tokens,
            options.expected_digest,
            options.append_joint,
            options.implicit,
            exact,
        )

    def _most_tokens(self, group: Group, plan: Plan) -> int:
        payload = None
        if plan.source is not None:
            source = plan.source
            payload = source.payload if plan.checkpoint is None else source.checkpoints[plan.checkpoint].payload
        limits, lengths = self._runner.limits, None if payload is None else lengths_of(payload)
        request, params = group.request, group.request.params
        room = limits.geometry.max_model_len - len(plan.ids)
        if plan.turn.append and params.max_tokens is not None and 0 < room < params.max_tokens:
            # Its client can't know how long the conversation is: more than the window holds means up to its end.
            request = dataclasses.replace(request, params=dataclasses.replace(params, max_tokens=room))
        return most_tokens(request, group.facts, limits, self._memory, len(plan.ids), lengths, plan.reused)

    def _set_base(self, seq: Sequence, tokens: int) -> None:
        group = seq.group
        seq.base = seq.computed = seq.observed_from = tokens
        seq.prefill_len = len(group.prompt)
        group.replays = () if tokens else group.facts.replay_lengths(len(group.prompt))
        shared = group.request.chain.shared_tokens if group.request.chain else 0
        fits = tokens < shared <= len(group.prompt) - group.min_final_chunk and not group.facts.replays_prompts
        seq.checkpoint_at = shared if fits else 0

    def copy(self, source: Chain, checkpoint: int | None) -> Rows | None:
        """A second owner of a chain's state, its head or a checkpoint; None if there is no room."""
        state = source if checkpoint is None else source.checkpoints[checkpoint]
        payload = state.payload
        if isinstance(payload, StoredRows):
            return self.tiers.fork(payload)
        while True:
            try:
                return self._fork(payload)
            except PoolExhaustedError:
                if not self.reclaim(keep=source):
                    return None

    def _fork(self, rows: DeviceRows) -> DeviceRows:
        share = not self._runner.limits.methods[rows.method].private_rows
        pages, copies = self._memory.fork_idle(rows.pages, share)
        try:
            if copies:
                call_runner(self._runner.copy_pages, rows.method, copies)
        except RequestError:
            pages.release()
            raise
        self._memory.put_aside(pages)
        return DeviceRows(rows.method, pages, rows.parked)

    def lend(self, seq: Sequence) -> None:
        """Shows `Memory` what the chain holds, so that it can weigh what the turn needs."""
        payload = seq.chain.payload if seq.chain is not None and not seq.attached else None
        if isinstance(payload, DeviceRows):
            seq.pages = payload.pages
            seq.pages.refresh_shared()
        elif isinstance(payload, StoredRows):
            seq.swapped_lengths = payload.lengths

    def unlend(self, seq: Sequence) -> None:
        if seq.chain is not None and seq.chain.payload is not None and not seq.attached:
            seq.pages = seq.swapped_lengths = None

    def begin(self, seq: Sequence) -> None:
        """The turn got a row, and pages for rows that were on the host: they are its own now."""
        assert seq.chain is not None
        assert seq.pages is not None
        method, pages, rows = seq.group.method, seq.pages, seq.chain.payload
        seq.old_ledger = seq.chain.ledger
        began_s = self._clock()
        # If the runner refuses, nothing has begun, and the chain stays where it is.
        parked = self.tiers.restore(rows, pages) if isinstance(rows, StoredRows) and not seq.attached else None
        payload = self.index.start(seq.chain, seq.group.request_id, as_ids(seq.group.prompt.astype(np.uint32)))
        seq.begun = True
        self.recall.begin(seq, seq.chain.evicted)
        chain_reports.begun(seq, self._metrics)
        if seq.attached and payload is not None:
            self._set_aside(seq, payload)
        if seq.attached or payload is None:
            return
        if isinstance(payload, DeviceRows):
            self._memory.take_up(pages)
            parked, rows = payload.parked, payload.copy
            seq.lease, payload.lease = payload.lease, None
        assert parked is not None
        seq.cuts, seq.tainted = seq.chain.cuts, seq.chain.quality.degraded or bool(seq.chain.cuts)
        if rows is not None:
            began_s, rows.moved_s = began_s - rows.moved_s, 0.0
        self.tiers.begin(seq.chain, rows)
        seen = seq.group.prompt[: seq.base]
        plan = UnparkRow(seq.row, pages.padded(-1), pages.lengths.copy(), seen, parked)
        call_runner(self._runner.unpark, method, plan)
        self._metrics.chain_restore_seconds.observe(self._clock() - began_s, tier=seq.restored_from or "device")

    def _set_aside(self, seq: Sequence, payload: Rows) -> None:
        """The turn goes on from blocks, of which more are known: the state of its chain is what it can go back to."""
        chain = seq.chain
        assert chain is not None
        seq.base = 0
        if isinstance(payload, StoredRows):
            self.tiers.begin(chain, payload)
            return
        copy, payload.copy = payload.copy, None
        self.tiers.begin(chain, copy)
        if payload.lease is not None:
            self.tiers.unlease(payload.lease)
            payload.lease = None
        if self._settings.chain_checkpoints and not any(c.processed == chain.processed for c in chain.checkpoints):
            state = payload, Tier.DEVICE, chain.quality, chain.evicted, chain.cuts
            self.index.add_checkpoint(chain, Checkpoint("turn_end", chain.processed, *state))
        else:
            self.tiers.release(payload)

    # A turn ends.

    def retire(self, seq: Sequence, reason: FinishReason, visible: int | None) -> None:
        """Takes the rows of a turn that is over back to its chain, at the last token that the client saw.

        `visible` tokens of the output lie before a stop string. What the choice still holds afterwards is garbage.
        """
        chain, owner = seq.chain, seq.group.request_id
        assert chain is not None
        self._turns.pop(owner, None)
        self._silent.discard(owner)
        if not seq.begun:
            if isinstance(chain.payload, DeviceRows) and seq.pages is chain.payload.pages:
                seq.pages = None  # they were only lent
            seq.swapped_lengths = None
            self.index.unclaim(chain, owner)
            return
        end = "failure" if reason == "error" else self._end(seq, visible)
        payload = None
        if not isinstance(end, str):
            with contextlib.suppress(RequestError):  # rows that the runner can't park are lost
                payload = self._take(seq, seq.computed - end[1])
        if payload is None or isinstance(end, str):
            self._go_back(seq, end if isinstance(end, str) else "evicted")
            return
        ledger, processed, inexact = end
        old, longest = chain.quality, int(lengths_of(payload).max())
        quality = Quality(
            max(0, processed - longest),
            old.inexact_rollback_tokens + inexact,
            old.rebuilt or seq.rebuilt,
            reason == "cancelled",
            old.recalled_tokens + self.recall.lent_rows(seq),
            row_layout.missing(seq.cuts),
            old.degraded or seq.tainted,
        )
        try:
            size, tier = size_of(payload), tier_of(payload)
            self.index.finish(chain, owner, as_ids(ledger), processed, payload, size, tier, quality)
        except ChainOwnerError:
            log.exception("the end of a turn of chain %s was refused; the chain is dropped", chain.chain_id)
            self.tiers.release(payload)
            self.index.fail(chain, owner, "failure")
            return
        chain.evicted, chain.cuts = seq.evicted, seq.cuts
        self.tiers.keep(chain)
        self.keep_turn_end(chain)

    def checkpoint(self, seq: Sequence) -> None:
        """Keeps the state as it is in the middle of a turn, where that is wanted and costs nobody anything."""
        chain, facts, at = seq.chain, seq.group.facts, seq.computed
        assert chain is not None
        assert seq.pages is not None
        shared, ends = at == seq.checkpoint_at, at == seq.prefill_len and not seq.rebuilt and not facts.private_rows
        if not shared and not (ends and self._settings.chain_checkpoints):
            return
        seq.kept_at = at
        found = self._memory.fork_aside(seq, not facts.private_rows)
        if found is None:
            return
        pages, copies = found
        try:
            with self.recall.aside(seq):
                parked = call_runner(self._runner.park, seq.group.method, seq.row, False)
            if copies:
                call_runner(self._runner.copy_pages, seq.group.method, copies)
        except RequestError:
            self._memory.take_up(pages)
            pages.release()
            return
        quality = dataclasses.replace(
            chain.quality,
            evicted_tokens=max(0, at - int(pages.lengths.max())),
            pruned_tokens=row_layout.missing(seq.cuts),
            degraded=chain.quality.degraded or seq.tainted,
        )
        rows = DeviceRows(seq.group.method, pages, parked)
        kind = "prefix" if shared else "prompt_end"
        state = Checkpoint(kind, at, rows, quality=quality, evicted=seq.evicted, cuts=seq.cuts)
        self.index.add_checkpoint(chain, state)

    def _go_back(self, seq: Sequence, reason: str) -> None:
        """The rows of a turn are lost: the chain is as before it, if that was kept anywhere, else gone."""
        chain, owner = seq.chain, seq.group.request_id
        assert chain is not None
        state = self.index.take_checkpoint(chain, chain.processed)
        base = self.tiers.take_base(chain)
        if state is None and base is None:
            self.index.fail(chain, owner, reason)
            return
        rows: Rows | None = base
        processed, quality = chain.processed, chain.quality
        if state is not None:
            rows, quality = state.payload, state.quality
            if isinstance(rows, DeviceRows):
                rows.copy = base
        assert rows is not None
        self.index.counts["went_back"] += 1
        self.index.finish(chain, owner, seq.old_ledger, processed, rows, size_of(rows), tier_of(rows), quality)
        if state is not None:
            chain.evicted, chain.cuts = state.evicted, state.cuts

    def _end(self, seq: Sequence, visible: int | None) -> tuple[np.ndarray, int, int] | str:
        """(tokens, how many of them are processed, how many are taken back inexactly), or why nothing can be kept."""
        group, facts, chain = seq.group, seq.group.facts, seq.chain
        assert chain is not None
        prompt = len(group.prompt)
        if not seq.prefilled:
            if not seq.base:
                return "interrupted"
            back = seq.computed - seq.base
            exact = facts.rollback and seq.observed_from <= seq.base
            if not back or (exact and (seq.pages is None or seq.pages.owns_tail(back))):
                return seq.old_ledger, seq.base, 0
            return group.prompt[: seq.computed], seq.computed, 0  # not taken back exactly, but every token was sent
        shown = len(seq.output) if visible is None else min(visible, len(seq.output))
        total = prompt + shown
        ledger = np.concatenate([group.prompt, np.asarray(seq.output[:shown], np.int32)])
        # The last sampled token has no row at a normal end; a stop string leaves whole tokens that have.
        goal = min(seq.computed, total if visible is not None else max(prompt, total - 1))
        if facts.rollback and seq.observed_from <= goal:
            return ledger, goal, 0
        if seq.computed <= total:
            return ledger, seq.computed, 0
        if seq.observed_from <= total:
            return ledger, total, 0 if facts.rollback else seq.computed - total
        return "rollback"

    def _take(self, seq: Sequence, extra: int) -> Rows | None:
        """The rows of a choice without the newest `extra`; None if they are lost."""
        method = seq.group.method
        if seq.swapped is not None:
            swapped, lengths = seq.swapped, seq.swapped_lengths
            assert lengths is not None
            return self.tiers.store(method, swapped, lengths, extra)
        if seq.pages is None or not (seq.row or seq.parked):
            return None
        self.recall.withdraw(seq)
        parked = seq.parked or call_runner(self._runner.park, method, seq.row)
        if extra:
            parked = call_runner(self._runner.trim, method, parked, extra)
            seq.pages.truncate(extra)
        pages, seq.pages, seq.parked = seq.pages, None, None
        self._memory.put_aside(pages)
        lease, seq.lease = seq.lease, None
        return DeviceRows(method, pages, parked, lease=lease)

    def keep_turn_end(self, chain: Chain) -> None:
        """Leaves a checkpoint, if that costs nobody anything."""
        payload = chain.payload
        if not self._settings.chain_checkpoints or not isinstance(payload, DeviceRows):
            return
        if self._runner.limits.methods[payload.method].private_rows:
            return  # every page would have to be copied
        try:
            rows = self._fork(payload)
        except (PoolExhaustedError, RequestError):
            return
        state = rows, Tier.DEVICE, chain.quality, chain.evicted, chain.cuts
        self.index.add_checkpoint(chain, Checkpoint("turn_end", chain.processed, *state))

    def report(self, seq: Sequence) -> ChainReport:
        """What the client is told."""
        return dataclasses.replace(chain_reports.report(seq, self.ttl_s), recall=self.recall.report(seq))

    # Room.

    def reclaim(self, keep: Chain | None = None, own_checkpoints: bool = False, forget: bool = False) -> bool:
        """One step towards free pages (see `Tiers.reclaim`); with `forget` waiting turns may compute all again."""
        return self.tiers.reclaim(keep, own_checkpoints, self._forget if forget else None)

    def _forget(self, chain: Chain) -> bool:
        """Lets a waiting turn compute its whole context again. Returns False if the cache is too small for that."""
        assert chain.owner is not None
        seq = self._turns[chain.owner]
        try:
            limit = most_tokens(seq.group.request, seq.group.facts, self._runner.limits, self._memory, seq.prefill_len)
        except RequestError:
            return False
        if limit < seq.group.max_tokens:
            return False
        self.index.forget(chain, chain.owner)
        self._set_base(seq, 0)
        seq.chain_status, seq.chain_reason, seq.chain_miss = "recreated", "evicted while its turn waited", "evicted"
        seq.diverged_at = seq.restored_from = None
        seq.retained_tokens = 0
        return True

    def check_integrity(self, live: dict[str, Sequence]) -> None:
        """Re-adds owners, pages and bytes. `live` are the choices with a chain, by request. Raises IntegrityError."""
        self.index.check_integrity()
        if live != self._turns:
            raise IntegrityError("the turns with a chain are others than the live requests")
        for chain in self.index.chains.values():
            if chain.owner is not None:
                seq = live.get(chain.owner)
                if seq is None or seq.chain is not chain or seq.begun != (chain.state is ChainState.ACTIVE):
                    raise IntegrityError(f"chain {chain.chain_id} belongs to a turn that is not there")
        self.tiers.check_integrity(list(live.values()))

    def close(self) -> None:
        """Finishes the snapshots that are under way."""
        if self.tiers.disk is not None:
            with contextlib.suppress(Exception):  # the device may be what has failed
                self.tiers.keep_late(at_once=True)
            self.tiers.disk.close()
