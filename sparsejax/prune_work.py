"""The work of a prune job, one slice after the other: look at the rows, score them, exchange what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from sparsejax import prune_scores
from sparsejax.cache.chain import Chain, ChainState
from sparsejax.cache.pages import PoolExhaustedError
from sparsejax.cache.radix_records import Lease, Match, StalePlanError
from sparsejax.chain_rows import DeviceRows, size_of
from sparsejax.errors import PruneConflictError
from sparsejax.launches import call_runner
from sparsejax.plans import ArrayTicket, PackRows, RowScores, ScoreRow, Ticket
from sparsejax.prune_recompute import Recomputer
from sparsejax.prune_records import PruneRequest, Slice, Wait
from sparsejax.prune_target import Target, Targets, ranges_of
from sparsejax.rows import RowPages

MAX_ATTEMPTS = 3


class Awaited:
    """A result that a job waits for."""

    def __init__(self, ticket: ArrayTicket | Ticket) -> None:
        self._ticket = ticket
        self.value: Any = None

    def poll(self) -> bool:
        """Takes the result if it is there. Returns whether it was taken."""
        if self.value is None and call_runner(self._ticket.is_ready):
            self.value = call_runner(self._ticket.result)
        return self.value is not None


Work = Generator[Wait, None, dict[str, Any]]


class Worker:
    """Carries out jobs of one engine. A job is a generator: it does a slice of its work whenever it is resumed.

    Args:
      targets: finds and exchanges rows.
      instruction: token ids that make a model repeat what it has read.
      slice_tokens: of the longest program that may run now.
    """

    def __init__(self, targets: Targets, instruction: Sequence[int], slice_tokens: Callable[[], int]) -> None:
        self.targets = targets
        self.runner, self.memory = targets.runner, targets.memory
        self.chains, self.radix = targets.chains, targets.radix
        self.page_size = targets.page_size
        self.instruction = tuple(instruction)
        self.slice_tokens = slice_tokens
        self.leases: set[Lease] = set()
        self._recomputer = Recomputer(self)
        self.awaited: Awaited | None = None

    @property
    def holding(self) -> bool:
        """Jobs have pages, paths or rows of the engine's."""
        return bool(self.radix.borrowed or self.leases or self.memory.lent_rows)

    def run(self, request: PruneRequest) -> Work:
        """The whole job. Returns its result; raises RequestError with nothing changed."""
        for _ in range(MAX_ATTEMPTS):
            try:
                return (yield from self._attempt(request))
            except StalePlanError:
                yield Wait(Slice.READY)
        raise PruneConflictError(f"the rows have changed {MAX_ATTEMPTS} times while they were scored")

    def _attempt(self, request: PruneRequest) -> Work:
        chain = None
        if request.chain_id is not None:
            chain = yield from self._idle_chain(request)
        target = self.targets.find(request, chain)
        kept = [np.zeros(0, np.int32)] * len(target.ranges)
        if any(part.keep_tokens for part in request.parts):
            kept = yield from self._choose(request, target)
            target.check()
        tokens = [target.rows[slice(*target.rows_of(i))][rows] for i, rows in enumerate(kept)]
        losing = [i for i, rows in enumerate(kept) if len(rows) < np.diff(target.rows_of(i))[0]]
        freed = recomputed = 0
        if losing:
            part, left = target.only(losing), [kept[i] for i in losing]
            if request.recompute:
                freed, recomputed = yield from self._recomputer.run(request, part, left)
            else:
                freed = yield from self._commit(request, part, left)
        return self.result(request, target, tokens, freed, recomputed)

    def _idle_chain(self, request: PruneRequest) -> Generator[Wait, None, Chain]:
        """The chain of a request, once no turn has it and its rows are on the device."""
        while True:
            chain = self.targets.chain_of(request)
            if chain.state is not ChainState.IDLE:
                yield Wait(Slice.BLOCKED, f"chain {chain.chain_id} has a turn under way")
            elif self.targets.bring(chain):
                return chain
            else:
                yield Wait(Slice.BLOCKED, f"the rows of chain {chain.chain_id} are not on the device yet")

    # Scores.

    def _choose(self, request: PruneRequest, target: Target) -> Generator[Wait, None, list[np.ndarray]]:
        """Indexes of the rows of each range that stay, among its rows."""
        facts, limits = self.runner.limits.methods[request.method], self.runner.limits
        wanted = prune_scores.plan(
            request,
            target.ranges,
            self.page_size,
            self.slice_tokens(),
            limits.geometry.max_model_len,
            self.instruction,
        )
        scores = yield from self._score(request.method, target, wanted.probes)
        kept: list[np.ndarray] = [np.zeros(0, np.int32)] * len(target.ranges)
        for number, part in enumerate(request.parts):
            mine = [i for i, each in enumerate(target.parts) if each == number]
            spans = [slice(*target.rows_of(i)) for i in mine]
            if not part.keep_tokens:
                continue
            tokens = [target.rows[span] for span in spans]
            found = [scores[span] for span in spans]
            chosen = prune_scores.choose(
                found, tokens, part.keep_tokens, wanted.protected, self.page_size, facts.whole_pages
            )
            for i, rows in zip(mine, chosen, strict=True):
                kept[i] = rows
        return kept

    def _score(
        self, method: str, target: Target, probes: Sequence[prune_scores.Probe]
    ) -> Generator[Wait, None, np.ndarray]:
        """Scores of all rows of a target."""
        granularity, scores = self.targets.granularity(method), None
        held = RowPages(self.memory.pool, granularity)
        held.adopt(target.pages)
        self.radix.borrowed.append(held)
        lease = None if target.match is None else self.keep(target.match)
        try:
            for probe in probes:
                yield Wait(Slice.DEVICE)
                columns = int(np.searchsorted(target.rows, probe.stop)) // self.page_size
                need = self.memory.geometry.pages(len(probe.tokens))
                while not self.make_room(target, need):
                    yield Wait(Slice.BLOCKED, "there are no free pages for the tokens that score rows")
                scratch = RowPages(self.memory.pool, granularity)
                pages = scratch.extend(np.full(held.columns.shape, need, np.int32))
                try:
                    plan = ScoreRow(target.pages[..., :columns], pages, probe.tokens, probe.position)
                    scores = call_runner(self.runner.score_rows, method, plan, scores)
                finally:
                    scratch.release()
            return (yield from self._read(scores, len(target.rows)))
        finally:
            self.radix.borrowed.remove(held)
            held.release()
            if lease is not None:
                self.let_go(lease)

    def keep(self, match: Match) -> Lease:
        """Keeps a path from being given up, until `let_go`."""
        lease = self.radix.index.lease(match)
        self.leases.add(lease)
        return lease

    def let_go(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.radix.index.release(lease)

    def _read(self, scores: RowScores | None, rows: int) -> Generator[Wait, None, np.ndarray]:
        if scores is None:
            return np.zeros(rows, np.float32)
        found = yield from self.wait(call_runner(self.runner.read_scores, scores))
        return found[:rows]

    def wait(self, ticket: ArrayTicket | Ticket) -> Generator[Wait, None, Any]:
        """Waits for a result without holding anybody up."""
        awaited = self.awaited = Awaited(ticket)
        try:
            while not awaited.poll():
                yield Wait(Slice.RESULT)
        finally:
            self.awaited = None
        return awaited.value

    def affordable(self, target: Target, pages: int) -> bool:
        """So many pages of each layer and head may be had, if chains and blocks that nobody needs now give way."""
        geometry, chain = self.memory.geometry, target.chain
        granularity = self.targets.granularity(target.scope.method)
        heads = int(np.prod(geometry.table_shape(granularity)))
        own = size_of(chain.payload) if chain is not None and isinstance(chain.payload, DeviceRows) else 0
        spare = self.chains.tiers.reclaimable() - own
        return pages * heads * geometry.head_pages_per_page(granularity) <= self.memory.pool.free_head_pages + spare

    def make_room(self, target: Target, pages: int) -> bool:
        """Has so many pages of each layer and head free that are promised to nobody, if it can."""
        granularity = self.targets.granularity(target.scope.method)
        heads = int(np.prod(self.memory.geometry.table_shape(granularity)))
        while not self.memory.fits_aside(granularity, pages * heads):
            # Nothing is given up for what can't be done yet anyway.
            if not self.affordable(target, pages) or not self.chains.reclaim(keep=target.chain):
                return False
        return True

    # The end.

    def _commit(self, request: PruneRequest, target: Target, kept: Sequence[np.ndarray]) -> Generator[Wait, None, int]:
        """Exchanges the rows. `kept`: of each range, indexes among its rows. Returns the pages that are given up."""
        whole, size = self.runner.limits.methods[request.method].whole_pages, self.page_size
        spans = [target.rows_of(i) for i in range(len(target.ranges))]
        tokens = [target.rows[slice(*span)][rows] for span, rows in zip(spans, kept, strict=True)]
        pack = [not whole and 0 < len(rows) < stop - start for (start, stop), rows in zip(spans, kept, strict=True)]
        need = sum(len(rows) // size for rows, packs in zip(kept, pack, strict=True) if packs)
        while need and not self.make_room(target, need):
            yield Wait(Slice.BLOCKED, "there are no free pages for the rows that stay")
        target.check()
        fresh = RowPages(self.memory.pool, self.targets.granularity(request.method))
        try:
            ids = fresh.extend(np.full(fresh.columns.shape, need, np.int32))
            pieces, at = [], 0
            for (start, stop), rows, packs in zip(spans, kept, pack, strict=True):
                source = target.pages[..., start // size : stop // size]
                if packs:
                    piece = ids[..., at : at + len(rows) // size]
                    at += piece.shape[-1]
                    call_runner(self.runner.pack_rows, request.method, PackRows(source, rows, piece))
                else:
                    piece = source[..., rows[::size] // size]
                pieces.append(piece)
            return self.targets.exchange(target, pieces, tokens, request.policy)
        except PoolExhaustedError as error:
            raise StalePlanError(str(error)) from error
        finally:
            fresh.release()

    def result(
        self, request: PruneRequest, target: Target, tokens: Sequence[np.ndarray], freed: int, recomputed: int
    ) -> dict[str, Any]:
        """What is said of a job that has done its work."""
        ranges, _ = ranges_of(request, self.page_size)
        widths = [stop - start for start, stop in ranges]
        before = sum(stop - start for start, stop in map(target.rows_of, range(len(ranges))))
        retained = sum(map(len, tokens))
        parts = [
            {
                "ranges": [list(ranges[i]) for i, each in enumerate(target.parts) if each == number],
                "keep_tokens": part.keep_tokens,
                "retained_tokens": sum(len(tokens[i]) for i, each in enumerate(target.parts) if each == number),
            }
            for number, part in enumerate(request.parts)
        ]
        return {
            "ranges": [list(pair) for pair in ranges],
            "range": [ranges[0][0], ranges[-1][1]],
            "logical_tokens": sum(widths),
            "retained_tokens": retained,
            "freed_device_slots": before - retained,
            "freed_pages": freed,
            "affected_blocks": sum(widths) // self.page_size,
            "recomputed_tokens": recomputed,
            "quality_degraded": True,
            "chain_id": request.chain_id,
            "path": target.plan is not None,
            "parts": parts,
        }
