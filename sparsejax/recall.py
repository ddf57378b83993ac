"""Recall: rows that a chain's method drops go to the host, and the best of them are lent back to the next turn.

A compaction of such a chain drops whole pages, so that what it drops can be packed as it is. At the beginning of a
turn, before its prompt, the dropped pages are scored by the queries of the prompt's end; the best are copied into pages
of their own, which stand before the row's in its table until the turn is over. The row never owns them: before
anything that looks at the whole row (a compaction, a move to another place) they are taken out of the table, and a
compaction neither keeps nor drops them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from sparsejax.cache.evicted import EvictedPages, EvictedStore, PageScores, Recalled, ScoreTicket, best_first, held
from sparsejax.cache.pages import IntegrityError
from sparsejax.errors import RequestError
from sparsejax.launches import call_runner
from sparsejax.memory import Memory
from sparsejax.plans import PROBE_TOKENS, FrontRow, LendPages, MethodFacts, ProbeRow, Runner, RunnerLimits
from sparsejax.request import RecallReport, Request
from sparsejax.rows import Group, RowPages, Sequence
from sparsejax.settings import EngineSettings


def whole_pages(lengths: np.ndarray, kept: np.ndarray, page_size: int) -> np.ndarray:
    """Rows to keep if a multiple of the page size is to be dropped: up to a page more than `kept`."""
    return (lengths - (lengths - kept) // page_size * page_size).astype(np.int32)


class SpillingFacts:
    """Facts of a method whose compactions drop whole pages; all else is the method's (see `plans.MethodFacts`)."""

    def __init__(self, facts: MethodFacts, page_size: int) -> None:
        self._facts = facts
        self._page_size = page_size
        self.name = f"{facts.name} with recall"
        self.ragged = True  # what is kept depends on how many rows there are when it is due

    def __getattr__(self, name: str) -> Any:
        return getattr(self._facts, name)

    def asked(self, phase: str, length: np.ndarray) -> np.ndarray:
        """Rows that the method would keep by itself."""
        return np.broadcast_to(self._facts.kept_after(phase, length), length.shape)

    def kept_after(self, phase: str, length: np.ndarray) -> np.ndarray:
        kept = self.asked(phase, length)
        if self._facts.most_counted(phase, length):  # a mean over heads, of which each keeps up to a page more
            return np.minimum(kept + self._page_size - 1, length)
        return whole_pages(length, kept, self._page_size)

    def peak_rows(
        self, length: np.ndarray, prompt_tokens: int, decode_tokens: int, chunk_tokens: int | None = None
    ) -> np.ndarray:
        return self._facts.peak_rows(length, prompt_tokens, decode_tokens, chunk_tokens) + self._page_size - 1


class Recall:
    """The recall of one engine. The engine thread's.

    Args:
      runner: moves rows.
      memory: rows and pages.
      settings: budgets.
      clock: seconds, monotonic.
      make_room: one step towards free pages that costs no running row; False if there is none.

    Attributes:
      watch: hands over a ticket whose scores `arrive` is to be called with.
      store: the host memory of dropped rows.
    """

    def __init__(
        self,
        runner: Runner,
        memory: Memory,
        settings: EngineSettings,
        clock: Callable[[], float],
        make_room: Callable[[Sequence], bool],
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._geometry = runner.limits.geometry
        self._clock = clock
        self._make_room = make_room
        self.watch: Callable[[Sequence, ScoreTicket], None] = lambda seq, ticket: None
        self.store = EvictedStore(settings.recall_host_bytes)

    # What a turn begins with.

    def begin(self, seq: Sequence, evicted: tuple[EvictedPages, ...]) -> None:
        """The turn has its rows and those that were dropped from them; it may get some of these back."""
        seq.evicted, seq.recall = evicted, None
        options = seq.group.request.chain
        if options is None or options.recall == "off" or not seq.group.facts.evicts:
            return
        pages = _copies(seq.evicted)
        seq.recall = Recalled(options.recall_budget, pages, began_s=self._clock())
        if len(pages) < len(seq.evicted):
            seq.recall.reason = "lost"

    def seat(self, seq: Sequence) -> None:
        """The turn got a row, for the first time or again: its loan is prepared, or made again."""
        recall = seq.recall
        if recall is None or not recall.pages or (recall.columns is not None and not recall.columns.any()):
            return
        if recall.order is not None:
            self._lend(seq)
        elif recall.ticket is None:
            self._decide(seq, recall)

    def _decide(self, seq: Sequence, recall: Recalled) -> None:
        most = self._most_columns(recall)
        if most == 0:
            recall.columns = self._columns(seq, recall, 0)
            return
        if most >= int(held(recall.pages).sum(2).max()):
            recall.order = best_first(recall.pages, None, most)
            self._lend(seq)
            return
        assert seq.pages is not None
        tokens = seq.tokens(seq.computed, seq.prefill_len)[-min(PROBE_TOKENS, self._memory.max_chunk) :]
        updates = seq.pages.append(len(tokens))
        plan = ProbeRow(seq.row, tokens, seq.prefill_len - len(tokens), updates, recall.pages)
        try:
            ticket = recall.ticket = call_runner(self._runner.probe, seq.group.method, plan)
        except RequestError:  # the turn goes on without
            recall.columns, recall.reason = self._columns(seq, recall, 0), "refused"
            return
        finally:
            seq.pages.truncate(len(tokens))  # their rows are gone once the queries are there
        self.watch(seq, ticket)

    def arrive(self, seq: Sequence, ticket: object, scores: PageScores) -> None:
        """The scores that a turn waited for, unless it has lost its row since."""
        recall = seq.recall
        if recall is None or recall.ticket is not ticket:
            return
        recall.ticket, recall.scored = None, True
        recall.bytes_moved += scores.nbytes
        recall.order = best_first(recall.pages, scores.scores, self._most_columns(recall))
        self._lend(seq)

    def _most_columns(self, recall: Recalled) -> int:
        """Pages of a head that the budget allows."""
        pages = int(held(recall.pages).sum(2).max())
        return pages if recall.budget == "all" else min(pages, recall.budget // self._geometry.page_size)

    def _columns(self, seq: Sequence, recall: Recalled, most: int) -> np.ndarray:
        """int32 [layers, heads] of the granularity: pages that each head gets if none may have more than `most`."""
        return np.minimum(self._columns_of(seq, recall.pages), np.int32(most))

    def _columns_of(self, seq: Sequence, pages: tuple[EvictedPages, ...]) -> np.ndarray:
        """int32 [layers, heads] of the granularity: so many of the pages are there."""
        layers, heads = self._geometry.table_shape(seq.group.facts.granularity)
        split = layers, self._geometry.num_layers // layers, heads, self._geometry.num_kv_heads // heads
        return held(pages).sum(2).reshape(split).min((1, 3)).astype(np.int32)

    # The loan.

    def _lend(self, seq: Sequence) -> None:
        """Copies the best pages that there is room for and puts them before the row's own."""
        recall, pages = seq.recall, seq.pages
        assert recall is not None
        assert recall.order is not None
        assert pages is not None
        most = self._most_columns(recall) if recall.columns is None else int(recall.columns.max())
        columns = self._columns(seq, recall, most)
        while columns.any() and not self._memory.fits_beside(seq, int(columns.sum())):
            if not self._make_room(seq):
                recall.reason = "no room"
                columns = self._columns(seq, recall, int(columns.max()) // 2)
        recall.columns = columns
        if not columns.any():
            return
        seq.loan = RowPages(self._memory.pool, pages.granularity)
        table = seq.loan.extend(columns)
        best = recall.order[:, :, : table.shape[2]]
        there = np.arange(table.shape[2]) < self._spread(columns)[..., None]
        # Oldest first, as if they had never left.
        entries = np.sort(np.where(there, best, np.iinfo(np.int32).max), axis=2)
        plan = LendPages(table, recall.pages, np.where(there, entries, -1).astype(np.int32))
        try:
            recall.bytes_moved += call_runner(self._runner.lend, seq.group.method, plan)
        except RequestError:
            self._end_loan(seq, "refused")
            return
        self._put_in_front(seq)
        self.store.touch(seq.evicted)
        recall.seconds = self._clock() - recall.began_s

    def _spread(self, counts: np.ndarray) -> np.ndarray:
        """[layers, heads] of a granularity -> [num_layers, kv_heads]."""
        return np.broadcast_to(counts, (self._geometry.num_layers, self._geometry.num_kv_heads))

    def _put_in_front(self, seq: Sequence) -> None:
        """Puts the loan before the row's own pages. If that is refused there is no loan any more."""
        if seq.loan is None:
            return
        assert seq.pages is not None
        assert seq.recall is not None
        loan, own = seq.loan, seq.pages
        table = np.full((*own.columns.shape, int((loan.columns + own.columns).max())), -1, np.int32)
        for layer, head in np.ndindex(own.columns.shape):
            lent, held_ = int(loan.columns[layer, head]), int(own.columns[layer, head])
            table[layer, head, :lent] = loan.table[layer, head, :lent]
            table[layer, head, lent : lent + held_] = own.table[layer, head, :held_]
        plan = FrontRow(seq.row, table, loan.lengths + own.lengths, loan.lengths, loan.lengths)
        try:
            call_runner(self._runner.front, seq.group.method, plan)
        except RequestError:
            self._end_loan(seq, "refused")
        else:
            seq.recall.in_front = True

    def _take_away(self, seq: Sequence) -> None:
        assert seq.loan is not None
        assert seq.pages is not None
        assert seq.recall is not None
        own, lent = seq.pages, seq.loan.lengths
        plan = FrontRow(seq.row, own.padded(-1), own.lengths.copy(), np.zeros_like(lent), -lent)
        call_runner(self._runner.front, seq.group.method, plan)
        seq.recall.in_front = False

    @contextlib.contextmanager
    def aside(self, seq: Sequence) -> Iterator[None]:
        """Meanwhile the row is its own pages only."""
        if seq.recall is None:
            yield
            return
        if seq.recall.in_front:
            self._take_away(seq)
        try:
            yield
        except RequestError:  # nothing was done
            self._put_in_front(seq)
            raise
        self._join(seq, seq.recall)
        self._put_in_front(seq)

    def _join(self, seq: Sequence, recall: Recalled) -> None:
        """What was dropped meanwhile stays with a turn that is lent everything."""
        pages, recall.joining = recall.joining, ()
        if not pages:
            return
        assert seq.pages is not None
        more = self._columns_of(seq, pages)
        self._memory.shrink(seq)
        while not self._memory.fits_beside(seq, int(more.sum())):
            if not self._make_room(seq):
                recall.reason = "no room"
                break
        else:
            seq.loan = seq.loan or RowPages(self._memory.pool, seq.pages.granularity)
            table = seq.loan.extend(more)
            index = np.arange(table.shape[2], dtype=np.int32)
            entries = np.where(index < self._spread(more)[..., None], index, np.int32(-1))
            try:
                call_runner(self._runner.lend, seq.group.method, LendPages(table, pages, entries))
            except RequestError:
                self._end_loan(seq, "refused")
            else:
                recall.pages += _copies(pages)
                recall.columns, recall.order = more if recall.columns is None else recall.columns + more, None
        for some in pages:
            some.fresh = None

    def withdraw(self, seq: Sequence) -> None:
        """The row gives its loan back, before it leaves its place or because others need the room."""
        if seq.loan is None:
            return
        if seq.recall is not None and seq.recall.in_front:
            self._take_away(seq)
        self._memory.end_loan(seq)

    def relieve(self, running: list[Sequence]) -> bool:
        """Ends a loan for the sake of its room. Returns False if there is none."""
        for seq in reversed(running):
            if seq.loan is not None and seq.recall is not None:
                self._take_away(seq)
                self._end_loan(seq, "no room")
                return True
        return False

    def _end_loan(self, seq: Sequence, reason: str) -> None:
        """The turn goes on without; its row does not read the lent pages any more."""
        recall = seq.recall
        assert recall is not None
        self._memory.end_loan(seq)
        recall.columns, recall.reason = (
            np.zeros(self._geometry.table_shape(seq.group.facts.granularity), np.int32),
            reason,
        )

    def lent_rows(self, seq: Sequence) -> int:
        """Rows that the turn got back, of the longest head."""
        if seq.recall is None or seq.recall.columns is None:
            return 0
        return int(seq.recall.columns.max()) * self._geometry.page_size

    def lose_place(self, seq: Sequence) -> None:
        """The row was taken from the turn: scores that are under way are of no use any more."""
        if seq.recall is not None:
            seq.recall.ticket, seq.recall.in_front = None, False

    # What is dropped.

    def asked(self, seq: Sequence, phase: str, kept: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What the method keeps, if what it drops goes to the host, and what stays then; None if that is everything.

        `kept` are the rows to keep as `memory` or the device says.
        """
        facts = seq.group.facts
        if not isinstance(facts, SpillingFacts):
            return None, kept
        assert seq.pages is not None
        lengths = seq.pages.lengths
        if not facts.most_counted(phase, lengths):
            return facts.asked(phase, lengths), kept
        stay = whole_pages(lengths, kept, self._geometry.page_size)
        return kept, stay if (stay < lengths).any() else None

    def keep(self, seq: Sequence, pages: tuple[EvictedPages, ...]) -> None:
        """A compaction dropped these."""
        if not pages:
            return
        self.store.add(pages)
        seq.evicted += pages
        if seq.base and seq.recall is not None and seq.recall.budget == "all":
            seq.recall.joining = pages
            return
        for some in pages:
            some.fresh = None

    def forget(self, seq: Sequence) -> None:
        """The choice is over: what it held of dropped rows is its chain's now, or nobody's."""
        seq.evicted, seq.recall = (), None

    # Books.

    def report(self, seq: Sequence) -> RecallReport | None:
        """What the client is told, if it asked for recall."""
        options, recall = seq.group.request.chain, seq.recall
        if options is None or options.recall == "off":
            return None
        left = [pages for pages in seq.evicted if not pages.lost]
        heads, page = self._geometry.head_pages_per_sequence_page, self._geometry.page_size
        there = sum(int(pages.counts.sum()) for pages in left)
        found = RecallReport(
            evicted_rows=there * page // heads, evicted_pages=there, stored_bytes=sum(pages.nbytes for pages in left)
        )
        if recall is None:
            return found
        lent = 0 if recall.columns is None else int(self._spread(recall.columns).sum())
        return RecallReport(
            evicted_rows=found.evicted_rows,
            evicted_pages=found.evicted_pages,
            scored_pages=int(held(recall.pages).sum()) if recall.pages and recall.scored else 0,
            lent_pages=lent,
            lent_rows=self.lent_rows(seq),
            bytes_moved=recall.bytes_moved,
            seconds=recall.seconds,
            stored_bytes=found.stored_bytes,
            reason=recall.reason,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError if a loan is nobody's, or stands before a row that does not have it."""
        for seq in self._memory.holders.values():
            recall = seq.recall
            if seq.loan is not None and (recall is None or not recall.in_front):
                raise IntegrityError("lent pages stand before no row")
            if seq.loan is None and recall is not None and recall.in_front:
                raise IntegrityError("a row reads lent pages that went back")


def _copies(pages: tuple[EvictedPages, ...]) -> tuple[EvictedPages, ...]:
    """Records of the same rows for one turn, which keep what is given up meanwhile."""
    return tuple(EvictedPages(some.payload, some.counts, some.nbytes) for some in pages if not some.lost)


def prepare(group: Group, limits: RunnerLimits, settings: EngineSettings) -> None:
    """Makes the facts of a request with recall those of whole pages. Raises RequestError if it can't be served."""
    check(group.request, group.facts, settings)
    options = group.request.chain
    if options is not None and options.recall == "host" and group.facts.evicts:
        group.facts = cast(MethodFacts, SpillingFacts(group.facts, limits.geometry.page_size))


def check(request: Request, facts: MethodFacts, settings: EngineSettings) -> None:
    """Raises RequestError if dropped rows of this request can't be kept."""
    if request.chain is None or request.chain.recall == "off":
        return
    if not settings.recall_host_bytes:
        raise RequestError("recall needs host memory for dropped rows: recall_host_bytes is 0", param="recall")
    if not facts.recalls:
        reason = "its keys are turned to the index of their row"
        raise RequestError(f"method {facts.name} can't get dropped rows back: {reason}", param="recall")
