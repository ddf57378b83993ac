"""Recall on the mock runner: what `mock.MockRunner` does about dropped rows, and what it checks of the plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsejax.cache.evicted import EvictedPages, PageScores
from sparsejax.geometry import Geometry, Granularity
from sparsejax.plans import FrontRow, LendPages, MaintainRow, ProbeRow

if TYPE_CHECKING:
    from sparsejax.mock import MockRunner

BLOCK = 3
"""Pages of each head that are packed together."""


def page_score(layer: int, head: int, stamps: np.ndarray, tokens: np.ndarray) -> float:
    """Some number that depends on everything."""
    return float((int(stamps.sum()) * 31 + int(tokens.sum()) * 17 + layer * 7 + head) % 1009)


class MockRecall:
    """Dropped rows are the stamps that stood for them.

    Args:
      runner: whose pool and rows it is about.

    Attributes:
      score: how well a page matches the tokens of a turn.
    """

    def __init__(self, runner: MockRunner) -> None:
        self._runner = runner
        self.score: Callable[[int, int, np.ndarray, np.ndarray], float] = page_score
        self._content: dict[tuple[Granularity, int], np.ndarray] = {}  # of lent pages, [parts, page_size]

    @property
    def _geometry(self) -> Geometry:
        return self._runner.limits.geometry

    def spill(
        self, plan: MaintainRow, lengths: np.ndarray, dropped: list[list[np.ndarray]]
    ) -> tuple[EvictedPages, ...]:
        """Packs the stamps of dropped rows, by layer and head of the granularity."""
        geometry = self._geometry
        shape = geometry.num_layers, geometry.num_kv_heads
        counts = np.zeros(shape, np.int32) + (lengths - plan.kept) // geometry.page_size
        stamps = np.zeros((*shape, int(counts.max()), geometry.page_size), np.int64)
        for l, h in np.ndindex(shape):
            own = dropped[l % len(dropped)][h % len(dropped[0])]
            cell = l * geometry.num_kv_heads + h  # as the pool tells heads apart
            stamps[l, h, : counts[l, h]] = own.reshape(-1, geometry.page_size) + cell
        blocks = range(0, stamps.shape[2], BLOCK)
        parts = [(stamps[:, :, i : i + BLOCK], np.clip(counts - i, 0, BLOCK)) for i in blocks]
        return tuple(EvictedPages(part, count, int(count.sum()) * 64) for part, count in parts)

    def probe(self, row: Any, plan: ProbeRow) -> PageScores:
        """Scores pages; the tokens are written behind the row and forgotten."""
        for l, layer in enumerate(row.stamps):
            for h, stamps in enumerate(layer):
                pages, offsets = self._runner._places(row, l, h, len(stamps), len(stamps) + len(plan.tokens))
                self._runner._pool[pages, offsets] = -1 - plan.row
        found = []
        for some in plan.pages:
            shape = some.payload.shape[:3]
            scores = np.array([self.score(l, h, some.payload[l, h, p], plan.tokens) for l, h, p in np.ndindex(shape)])
            found.append(scores.reshape(shape))
        return PageScores(np.concatenate(found, axis=2).astype(np.float32))

    def lend(self, granularity: Granularity, plan: LendPages) -> int:
        """Writes stamps to pages that no row has."""
        geometry, runner = self._geometry, self._runner
        there, moved = plan.pages >= 0, 0
        stamps = np.concatenate([some.payload for some in plan.source], axis=2)
        held = np.concatenate([np.arange(some.payload.shape[2]) < some.counts[..., None] for some in plan.source], 2)
        layers, heads = plan.pages.shape[:2]
        spread = np.broadcast_to(there, (geometry.num_layers, geometry.num_kv_heads, there.shape[2]))
        runner._require(bool(((plan.entries >= 0) == spread).all()), "pages without content, or content without a page")
        for l, h, column in zip(*np.nonzero(there), strict=True):
            page, parts = int(plan.pages[l, h, column]), []
            for layer in range(geometry.num_layers) if layers == 1 else [l]:
                for head in range(geometry.num_kv_heads) if heads == 1 else [h]:
                    entry = int(plan.entries[layer, head, column])
                    runner._require(bool(held[layer, head, entry]), "a page is lent that was never dropped")
                    parts.append(stamps[layer, head, entry])
            content = np.stack(parts)
            runner._pool[runner._span(granularity, page)] = content
            self._content[granularity, page] = content
            moved += 64 * len(parts)
        return moved

    def front(self, row: Any, plan: FrontRow) -> None:
        """Lent pages come before the row's own, or go."""
        runner, before = self._runner, row.lent
        own = runner._lengths(row)
        old = np.zeros_like(own) if before is None else before
        runner._require(bool((plan.shift == plan.lent - old).all()), "the shift is not the difference")
        runner._require(bool((plan.lengths == plan.lent + own).all()), "the lengths are not those of both parts")
        runner._require((before is None) == bool(plan.lent.any()), "a loan is put before a loan, or taken from none")
        columns = runner._pages(plan.lengths)
        inside = np.arange(plan.pages.shape[-1]) < columns[..., None]
        runner._require(bool(((plan.pages > 0) == inside).all()), "the table lists other pages than the lengths need")
        page_size = self._geometry.page_size
        for l, h in np.ndindex(own.shape):
            first, last = int(old[l, h]) // page_size, int(plan.lent[l, h]) // page_size
            count = int(runner._pages(own)[l, h])
            same = row.table[l, h, first : first + count] == plan.pages[l, h, last : last + count]
            runner._require(bool(same.all()), "the row's own pages are others")
        row.table = np.zeros_like(row.table)
        row.table[..., : plan.pages.shape[-1]] = np.maximum(plan.pages, 0)
        row.lent, row.loan = None, None
        if plan.lent.any():
            row.lent = plan.lent.copy()
            row.loan = {
                (l, h): np.concatenate(
                    [np.zeros((self._geometry.head_pages_per_page(row.granularity), 0), np.int64)]
                    + [
                        self._content[row.granularity, page]
                        for page in row.table[l, h, : plan.lent[l, h] // page_size].tolist()
                    ],
                    axis=1,
                )
                for l, h in np.ndindex(own.shape)
            }

    def check(self, index: int, row: Any) -> None:
        """Reads back the lent rows before a row."""
        for (l, h), content in (row.loan or {}).items():
            pages, offsets = self._runner._places(row, l, h, -content.shape[1], 0)
            same = self._runner._pool[pages, offsets] == content
            self._runner._require(bool(same.all()), f"row {index} layer {l} head {h} reads other rows than were lent")
