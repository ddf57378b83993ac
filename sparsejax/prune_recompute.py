"""Rows behind a pruned range, computed again on what is left: as if what is gone had been masked from the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsejax.cache import row_layout
from sparsejax.cache.radix_records import Match, StalePlanError
from sparsejax.cache.radix_tree import Cut
from sparsejax.cache.row_layout import Cuts
from sparsejax.errors import RequestError
from sparsejax.launches import call_runner
from sparsejax.plans import PrefillRow, SamplingRow, UnparkRow
from sparsejax.prune_records import PruneRequest, Slice, Wait
from sparsejax.prune_target import Target
from sparsejax.rows import RowPages

if TYPE_CHECKING:
    from sparsejax.prune_work import Worker


@dataclasses.dataclass(frozen=True, eq=False)
class _Text:
    """What is to be there in the end.

    Attributes:
      tokens: int32 [n], the whole text.
      cuts: ranges without rows, the new ones among them.
      rows: int32, the token of each row.
      new: ranges that lose their rows now.
      first: rows that stay as they are.
      match: what others find of it, or None.
      path: ranges without rows as the index has them; a chain may have the same in other pieces.
      held: what each block of the match holds, so that a change is noticed.
    """

    tokens: np.ndarray
    cuts: Cuts
    rows: np.ndarray
    new: frozenset[tuple[int, int]]
    first: int
    match: Match | None
    path: Cuts
    held: tuple[tuple[Any, ...] | None, ...]


class Recomputer:
    """Computes rows again, in a row of the engine's that nobody has meanwhile."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.targets, self.runner, self.memory = worker.targets, worker.runner, worker.memory
        self.radix, self.page_size = worker.radix, worker.page_size

    def run(
        self, request: PruneRequest, target: Target, kept: Sequence[np.ndarray]
    ) -> Generator[Wait, None, tuple[int, int]]:
        """The rest of a job. `kept`: of each range, indexes among its rows.

        Returns the pages that are given up, and the rows that were computed.
        """
        tokens = [target.rows[slice(*target.rows_of(i))][rows] for i, rows in enumerate(kept)]
        text = self._text(request, target, tokens)
        if target.plan is not None and text.match is None:
            target = dataclasses.replace(target, plan=None)
        granularity = self.targets.granularity(request.method)
        pages = RowPages(self.memory.pool, granularity)
        lease = None if text.match is None else self.worker.keep(text.match)
        self.radix.borrowed.append(pages)
        moved = False
        try:
            pages.adopt(self._old(target)[..., : text.first // self.page_size])
            need = self.memory.geometry.pages(len(text.rows) - text.first)
            while not self.worker.affordable(target, need):
                yield Wait(Slice.BLOCKED, "there are no free pages for what is computed again")
                self._check(target, text)
            yield from self._compute(request.method, text, pages, target)
            self._check(target, text)
            while self._hindered(target, text):
                yield Wait(Slice.BLOCKED, "a text is pinned that goes another way behind the ranges")
                self._check(target, text)
            freed = self._exchange(request, target, text, tokens, pages)
            moved = target.chain is not None
        finally:
            self.radix.borrowed.remove(pages)
            if not moved:
                pages.release()
            if lease is not None:
                self.worker.let_go(lease)
        return freed, len(text.rows) - text.first

    def _old(self, target: Target) -> np.ndarray:
        return target.pages if target.chain is None else target.chain.payload.pages.padded(0)

    def _text(self, request: PruneRequest, target: Target, kept: Sequence[np.ndarray]) -> _Text:
        new = [Cut(*pair, tokens, request.policy) for pair, tokens in zip(target.ranges, kept, strict=True)]
        chain, index = target.chain, self.radix.index
        if chain is None:
            match: Match | None = index.match(target.scope, request.ids, whole=True)
            assert match is not None
            known, old = len(match.blocks) * self.page_size, match.lost
            ids = request.ids[:known]
            if known < target.stop:
                raise StalePlanError("a path has become shorter")
            before = tuple(cut for cut in old if cut.start < target.stop)
            if not np.array_equal(row_layout.positions(before, target.stop), target.rows):
                raise StalePlanError("a path has lost rows while it was scored")
        else:
            ids, old, match = chain.ledger[: chain.processed], chain.cuts, None
            if target.plan is not None:
                match = index.match(target.scope, ids, whole=True)
                known = len(match.blocks) * self.page_size
                mine = row_layout.positions(tuple(cut for cut in old if cut.start < known), known)
                same = np.array_equal(row_layout.positions(match.lost, known), mine)
                if known < target.stop or not same:
                    match = None
        cuts = row_layout.pruned(old, new)
        rows = row_layout.positions(cuts, len(ids))
        first = int(np.searchsorted(rows, target.ranges[0][0]))
        path = () if match is None else row_layout.pruned(match.lost, new)
        held = () if match is None else tuple(block.pages for block in match.blocks)
        new_ranges = frozenset(target.ranges)
        return _Text(np.asarray(ids).astype(np.int32), cuts, rows, new_ranges, first, match, path, held)

    def _runs(self, text: _Text) -> Iterator[tuple[int, int]]:
        """Tokens [start, stop) to compute that follow each other."""
        rows = text.rows[text.first :]
        breaks = np.flatnonzero(np.diff(rows) > 1) + 1
        for run in np.split(rows, breaks):
            if len(run):
                yield int(run[0]), int(run[-1]) + 1

    def _compute(self, method: str, text: _Text, pages: RowPages, target: Target) -> Generator[Wait, None, None]:
        """Appends the rows of a text to pages."""
        row = None
        try:
            for start, stop in self._runs(text):
                at = start
                while at < stop:
                    yield Wait(Slice.DEVICE)
                    self._check(target, text)
                    while row is None:
                        row = self.memory.borrow_row()
                        if row is None:
                            yield Wait(Slice.BLOCKED, "all rows are taken")
                    end = min(stop, at + self.worker.slice_tokens())
                    while not self.worker.make_room(target, self.memory.geometry.pages(end - at) + 1):
                        yield Wait(Slice.BLOCKED, "there are no free pages for what is computed again")
                    if at == start:
                        call_runner(self.runner.setup_row, row, (), ())
                        table, lengths = pages.padded(-1), pages.lengths.copy()
                        seen = UnparkRow(row, table, lengths, text.tokens[:at], None)
                        call_runner(self.runner.unpark, method, seen)
                    plan = PrefillRow(row, text.tokens[at:end], False, False, SamplingRow(), pages.append(end - at))
                    result = yield from self.worker.wait(call_runner(self.runner.prefill, method, [plan]))
                    if not result.ok[0]:
                        raise RequestError("the model produced non-finite logits for what is left of the text")
                    at = end
        finally:
            if row is not None:
                self.memory.return_row(row)

    def _check(self, target: Target, text: _Text) -> None:
        """Raises StalePlanError if anything of the text has changed."""
        target.check()
        blocks = text.match.blocks if text.match is not None else ()
        if not all(block.alive and block.pages is pages for block, pages in zip(blocks, text.held, strict=True)):
            raise StalePlanError("a path has changed")

    def _hindered(self, target: Target, text: _Text) -> bool:
        if text.match is None:
            return False
        return self.radix.index.pinned_beside(text.match.blocks, target.ranges[0][1] // self.page_size)

    def _exchange(
        self, request: PruneRequest, target: Target, text: _Text, kept: Sequence[np.ndarray], pages: RowPages
    ) -> int:
        """All or nothing. Returns the pages of a table that are given up."""
        table, size, chain, freed = pages.padded(0), self.page_size, target.chain, 0
        parked = None
        if chain is not None:
            plan = UnparkRow(0, pages.padded(-1), pages.lengths.copy(), text.tokens, None)
            parked = call_runner(self.runner.bare, request.method, plan)
        if target.plan is not None and text.match is not None:
            pieces = [table[..., slice(*self._columns(text.path, *pair))] for pair in target.ranges]
            freed = self.targets.cut_path(target, pieces, kept, request.policy)
            behind = target.ranges[0][1] // size
            path = text.match.blocks
            rows = [self._payloads(request.method, text, block.depth, table) for block in path[behind:]]
            with self.targets.freeing():
                self.radix.index.heal(path, behind, rows)
        if chain is not None and parked is not None:
            old: RowPages = chain.payload.pages
            freed = max(freed, (old.count - pages.count) // pages.lengths.size)
            pages.unchanged = np.minimum(np.minimum(old.unchanged, text.first), pages.lengths).astype(np.int32)
            self.targets.replace(chain, pages, parked, text.cuts, target.ranges[0][0])
        return freed

    def _columns(self, cuts: Cuts, start: int, stop: int) -> tuple[int, int]:
        first, end = row_layout.rows_of(cuts, start, stop)
        return first // self.page_size, end // self.page_size

    def _payloads(self, method: str, text: _Text, depth: int, table: np.ndarray) -> tuple[Any, ...] | None:
        """The rows of one block, with references of their own; None if it has none or has them already."""
        start, stop = (depth - 1) * self.page_size, depth * self.page_size
        for cut in text.path:
            if cut.start <= start and stop <= cut.stop:
                if stop < cut.stop or (cut.start, cut.stop) in text.new:
                    return None
                start = cut.start
        return tuple(self.targets.payloads(method, table[..., slice(*self._columns(text.path, start, stop))]))
