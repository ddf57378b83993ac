"""Pages that requests with the same beginning share: how a row begins with them, and what it leaves for others.

A choice attaches what is known of its prompt when it gets its row, not when it is queued: others that came with it may
have computed the beginning meanwhile. It publishes whole pages once the program that computed them was collected with
finite logits. Rows of decoded tokens are published at the end of the turn, if they are what a prompt chunk would have
made of the same tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sparsejax import prefix_reports
from sparsejax.cache import row_layout
from sparsejax.cache.chain import Chain, Checkpoint, Tier, as_ids
from sparsejax.cache.chain_miss import Miss
from sparsejax.cache.pages import IntegrityError
from sparsejax.cache.radix_records import Lease, Match
from sparsejax.cache.radix_tree import Scope
from sparsejax.cache.row_layout import Cuts
from sparsejax.chain_tiers import Tiers
from sparsejax.launches import call_runner
from sparsejax.memory import Memory
from sparsejax.metrics import EngineMetrics
from sparsejax.plans import Runner, UnparkRow
from sparsejax.radix_room import RadixRoom
from sparsejax.request import PrefixOptions
from sparsejax.rows import RowPages, Sequence
from sparsejax.settings import EngineSettings


class RadixCache(RadixRoom):
    """The radix cache of one engine. The engine thread's.

    Args:
      runner: gives rows their pages.
      memory: rows and pages.
      settings: whether there is one.
      metrics: counters to feed.
      clock: seconds, monotonic.
      scope_of: what divides the rows of a method, salt and tenant from others.
      tiers: where chains are, with which it shares pages and host memory.
    """

    def __init__(
        self,
        runner: Runner,
        memory: Memory,
        settings: EngineSettings,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        scope_of: Callable[[str, str, str], Scope],
        tiers: Tiers,
    ) -> None:
        super().__init__(runner, memory, clock, tiers)
        self._metrics = metrics
        self.enabled = settings.prefix_cache
        self._scope_of = scope_of

    def hindrance(self, method: str) -> str | None:
        """Why requests of a method begin with nobody's rows, or None. Any thread may ask."""
        if not self.enabled:
            return "the prefix cache is off on this server (--prefix-cache)"
        if not self._runner.limits.methods[method].pure_prefix:
            return f"rows of {method} depend on more than the tokens before them"
        return None

    def _options(self, seq: Sequence) -> PrefixOptions | None:
        request = seq.group.request
        if not self.enabled or not seq.group.facts.pure_prefix:
            return None
        if request.prefix is None and request.chain is not None:
            return PrefixOptions(request.chain.salt, request.chain.tenant)
        return request.prefix

    def _scope(self, seq: Sequence, options: PrefixOptions) -> Scope:
        return self._scope_of(seq.group.method, options.salt, options.tenant)

    def follows(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """A choice without rows had better wait: one that runs computes more of its beginning than is known now."""
        options = self._options(seq)
        if options is None or not _fresh(seq):
            return False
        scope, size, mine = self._scope(seq, options), self.index.block_tokens, _beginning(seq)
        for other in running:
            lease = other.lease
            if lease is None or lease.closed or lease.scope != scope or not (other.unconfirmed or not other.prefilled):
                continue
            if options.exact and lease.tainted:
                continue
            at = len(lease.blocks)  # the block that it computes next
            if not _agree(other, mine, at, size):
                continue
            if not self._is_next(lease, mine[at * size : (at + 1) * size]):  # others have left more of its text
                at = len(self._known(seq, scope, options).blocks)
            if _agree(other, mine, at, size):
                return True
        return False

    def _is_next(self, lease: Lease, ids: np.ndarray) -> bool:
        """Nobody has published the block of these tokens behind a lease."""
        node = lease.blocks[-1] if lease.blocks else self.index.roots.get(lease.scope.seed)
        return node is None or np.ascontiguousarray(ids, "<u4").tobytes() not in node.children

    def takes_part(self, seq: Sequence) -> bool:
        """What the choice reuses may be more once it gets its row than is known before."""
        return self._options(seq) is not None

    def _known(self, seq: Sequence, scope: Scope, options: PrefixOptions) -> Match:
        """What is known of a waiting choice's prompt: looked up again only if something has changed there."""
        ids, memo = _beginning(seq), seq.prefix_known
        if memo is None or memo.scope != scope or self.index.outdated(memo, ids):
            memo = self.index.match(scope, ids, exact=options.exact)
        elif memo.version != self.index.changes:
            memo = dataclasses.replace(memo, version=self.index.changes)
        seq.prefix_known = memo
        return memo

    def begins_with(self, seq: Sequence) -> tuple[int, int]:
        """Blocks that a choice which has computed nothing would begin with now, and how many of these nobody has."""
        options = self._options(seq)
        if options is None or not _fresh(seq):
            return 0, 0
        match = self._known(seq, self._scope(seq, options), options)
        # Above a block that somebody has, all are somebody's.
        held = bisect.bisect_left(match.blocks, True, key=lambda block: not block.held)
        return len(match.blocks), 0 if match.lost else len(match.blocks) - held

    # A row begins.

    def attach(self, seq: Sequence) -> None:
        """Lets a choice without rows begin with what is known of its prompt. It needs a place for the rest only."""
        options = self._options(seq)
        if options is None or not (_fresh(seq) or _restorable(seq)):
            return
        group = seq.group
        match = self._known(seq, self._scope(seq, options), options)
        if _fresh(seq) and not seq.promoted and self.promote(match, _beginning(seq)):
            seq.promoted = True  # once: what goes again before it gets a row would come and go for ever
            match = self._known(seq, self._scope(seq, options), options)
        if not _fresh(seq) and not self.beats(match, seq.base, seq.chain):
            return
        seq.lease, seq.prefix_match = self.index.lease(match), match
        if not match.blocks:
            return
        shape = self._memory.geometry.table_shape(group.facts.granularity)
        ids_of_pages = [page for _, page in match.pages]
        pages = RowPages(self._memory.pool, group.facts.granularity)
        pages.adopt(np.stack(ids_of_pages, 1).reshape(*shape, -1) if ids_of_pages else np.zeros((*shape, 0), np.int32))
        seq.pages = pages
        seq.computed = seq.observed_from = seq.attached = len(match.blocks) * self.index.block_tokens
        seq.cuts, seq.tainted = match.lost, seq.lease.tainted

    def beats(self, match: Match, base: int, state: Chain | Checkpoint | None) -> bool:
        """A turn had better begin with blocks than with `base` tokens of a chain's state: more of its prompt is known.

        Or as much but for a part of a page, and the chain's rows would have to be copied to the device.
        """
        known = len(match.blocks) * self.index.block_tokens
        if state is None or (match.lost and not state.cuts):
            return state is None and known > 0
        near = state.tier is not Tier.DEVICE and known + self.index.block_tokens > base
        return known > base or (near and known > 0)

    def prospect(self, method: str, options: PrefixOptions, ids: np.ndarray) -> Match | None:
        """What a request with these tokens would begin with now, uint32 [n]; None if it takes no part."""
        if self.hindrance(method) is not None:
            return None
        return self.index.match(self._scope_of(method, options.salt, options.tenant), ids, exact=options.exact)

    def spares(self, seq: Sequence) -> bool:
        """As it looks now, a queued turn will do without the rows of its chain."""
        options = self._options(seq)
        if options is None or not _restorable(seq):
            return False
        return self.beats(self._known(seq, self._scope(seq, options), options), seq.base, seq.chain)

    def detach(self, seq: Sequence) -> None:
        """There was no place for the rest: all is as before `attach`."""
        if seq.lease is None or seq.row:
            return
        if seq.attached and seq.pages is not None:
            seq.pages.release()
            seq.pages = None
            seq.computed = seq.observed_from = seq.base
            seq.cuts, seq.tainted = (), False
        self.leave(seq)
        seq.attached = 0

    def begin(self, seq: Sequence) -> None:
        """A choice got its row: what it has attached is its own now."""
        match, seq.prefix_match, seq.prefix_known = seq.prefix_match, None, None
        if self.enabled and not seq.group.facts.pure_prefix:
            seq.prefix_miss = Miss("method", self.hindrance(seq.group.method) or "")
        if match is not None:
            self.index.note(match)
            prefix_reports.begun(seq, match, self._metrics)
        elif seq.lease is not None:  # of its chain, whose last turn may have been taken back in part
            self.index.trim(seq.lease, min(len(seq.lease.blocks), seq.base // self.index.block_tokens))
        elif (options := self._options(seq)) and (not seq.base or seq.group.facts.pure_tokens):
            ids = as_ids(seq.tokens(0, seq.computed).astype(np.uint32))
            seq.lease = self.lease_of(self._scope(seq, options), ids, seq.cuts, seq.tainted)
        if seq.lease is not None and seq.base and not seq.group.facts.pure_tokens:
            seq.lease.closed = True  # earlier turns have decoded tokens that a prompt chunk would have made otherwise
        if match is not None and match.blocks:
            assert seq.pages is not None
            seen = seq.tokens(0, seq.attached)
            plan = UnparkRow(seq.row, seq.pages.padded(-1), seq.pages.lengths.copy(), seen, None)
            call_runner(self._runner.unpark, seq.group.method, plan)

    def lease_of(self, scope: Scope, ids: np.ndarray, cuts: Cuts, tainted: bool) -> Lease | None:
        """A lease for rows that were made before, so that their owner can publish; None if that is not possible.

        Args:
          scope: whose.
          ids: uint32 [n], the tokens of the rows.
          cuts: ranges of them whose rows are missing.
          tainted: some rows were computed while others were missing.
        """
        match = self.index.match(scope, ids if cuts else ids[:0], whole=True)
        known = len(match.blocks) * self.index.block_tokens
        if cuts and known < cuts[-1].stop:
            return None
        lease = self.index.lease(match)
        lease.tainted = lease.tainted or tainted
        if cuts:
            first = np.arange(0, known, self.index.block_tokens)
            rows = row_layout.positions(cuts, known)
            inside = np.zeros(len(first), bool)
            for cut in cuts:
                inside |= (cut.start <= first) & (first < cut.stop)
            columns = np.searchsorted(rows, first) // self.index.block_tokens
            lease.columns = np.where(inside, -1, columns).tolist()
            lease.num_columns = len(rows) // self.index.block_tokens
        return lease

    def share(self, source: Sequence, target: Sequence) -> None:
        """A choice goes on as a copy of another."""
        target.attached, target.cuts, target.tainted = source.attached, source.cuts, source.tainted
        if source.lease is not None:
            target.lease = self.index.share(source.lease)

    # What it leaves.

    def submitted(self, seq: Sequence, step: int) -> None:
        """A prompt chunk is under way."""
        if seq.lease is not None:
            seq.unconfirmed[step] = seq.computed

    def confirm(self, seq: Sequence, step: int) -> None:
        """A prompt chunk was collected, and is as it should be."""
        end = seq.unconfirmed.pop(step, None)
        if end is not None:
            self._publish(seq, end)

    def finish(self, seq: Sequence, visible: int | None = None) -> None:
        """No step of the choice is to come: what it has decoded may be published too, up to the last token but one.

        Of `visible` tokens of the output only the rows stay that its chain keeps: others will be written over.
        """
        shown = len(seq.output) - 1 if visible is None else min(visible, len(seq.output) - 1)
        if seq.group.facts.pure_tokens and seq.output and not seq.unconfirmed:
            self._publish(seq, min(seq.computed, len(seq.group.prompt) + shown))
        if seq.chain is not None and seq.lease is not None:
            self.index.touch(seq.lease)

    def _publish(self, seq: Sequence, end: int) -> None:
        pages, lease = seq.pages, seq.lease
        if pages is None or lease is None or end // self.index.block_tokens <= len(lease.blocks):
            return
        plan = self.index.plan_insert(lease, as_ids(seq.tokens(0, end).astype(np.uint32)))
        payloads: list[Any] = []
        for column in plan.wanted:
            ids = pages.table[:, :, column].reshape(-1).copy()
            self._memory.pool.share(pages.granularity, ids)
            payloads.append((pages.granularity, ids))
        self.index.insert(plan, payloads)

    def leave(self, seq: Sequence) -> None:
        """The choice has no row any more, or publishes no more. Idempotent."""
        seq.unconfirmed.clear()
        seq.prefix_match = None
        if seq.lease is not None:
            self.index.release(seq.lease)
            seq.lease = None

    def check_integrity(self, leases: list[Lease]) -> None:
        """Re-adds blocks and leases, of which these are all. Raises IntegrityError."""
        if len(set(leases)) < len(leases):
            raise IntegrityError("a lease has two owners")
        self.index.check_integrity(set(leases))
        self.host.check_integrity(self.index.blocks())


def _fresh(seq: Sequence) -> bool:
    """It has computed nothing, and goes on from no conversation."""
    chained = seq.chain is not None and (seq.base > 0 or seq.chain.payload is not None)
    return not (chained or seq.computed or seq.pages is not None or seq.swapped is not None)


def _restorable(seq: Sequence) -> bool:
    """It waits with the state of a conversation that it goes on from."""
    chain = seq.chain
    return chain is not None and not seq.begun and chain.payload is not None and seq.pages is None


def _agree(other: Sequence, mine: np.ndarray, block: int, size: int) -> bool:
    """A choice computes, in prompt chunks, the same tokens up to the end of some block, and one more is left."""
    end = (block + 1) * size
    if end >= len(mine) or other.prefill_len < end:
        return False
    theirs = other.tokens(0, end).view(np.uint32)
    # Texts that part ways mostly do so before the block in question.
    return np.array_equal(theirs[end - size :], mine[end - size : end]) and np.array_equal(theirs, mine[:end])


def _beginning(seq: Sequence) -> np.ndarray:
    """Tokens of which all but one may be others', uint32."""
    group = seq.group
    return seq.tokens(0, group.fork_at or seq.prefill_len - group.min_final_chunk + 1).view(np.uint32)
