"""Pruning on the mock runner: scores that tests can predict, rows that move with their stamps, and what is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from sparsejax.geometry import Granularity
from sparsejax.mock_stamps import mix, positions_of, tokens_of
from sparsejax.plans import PackRows, RowScores, ScoreRow

if TYPE_CHECKING:
    from sparsejax.mock import MockRunner


def row_score(token: int, position: int) -> float:
    """Some number in [0, 1)."""
    return float(np.float32(mix(token, position) % 65521 / 65521))


class MockPrune:
    """Rows are the stamps that stand for them.

    Args:
      runner: whose pool it is about.

    Attributes:
      score: what any probe gives a row, from its token and position.
    """

    def __init__(self, runner: MockRunner) -> None:
        self._runner = runner
        self.score: Callable[[int, int], float] = row_score

    def stamps(self, granularity: Granularity, pages: np.ndarray, count: int | None = None) -> np.ndarray:
        """The first rows, all if None, of pages [layers, heads, columns]: the same text in all layers and heads."""
        runner = self._runner
        geometry = runner.limits.geometry
        require, (layers, heads) = runner._require, geometry.table_shape(granularity)
        require(pages.dtype == np.int32 and pages.shape[:2] == (layers, heads), "pages are int32 [layers, heads, n]")
        require(bool((pages > 0).all()), "the null page is read")
        parts = geometry.head_pages_per_page(granularity)
        found = runner._pool[pages[..., None] * parts + np.arange(parts)]  # [layers, heads, columns, parts, page_size]
        cells = np.arange(layers * heads * parts).reshape(layers, heads, 1, parts, 1)
        rows = np.moveaxis(found - cells, 2, 3).reshape(layers * heads * parts, -1)[:, :count]
        require(bool((rows == rows[:1]).all()), "layers and heads hold rows of different tokens")
        positions = positions_of(rows[0])
        require(bool((np.diff(positions) > 0).all()), "pages are not in the order of their rows")
        return rows[0]

    def probe(self, granularity: Granularity, plan: ScoreRow, scores: RowScores | None) -> RowScores:
        runner = self._runner
        geometry, require = runner.limits.geometry, runner._require
        rows = self.stamps(granularity, plan.pages)
        size, columns = len(plan.tokens), plan.pages.shape[2]
        require(plan.tokens.dtype == np.int32 and size > 0, "a probe is int32 and not empty")
        require(any(b[1] >= size for b in runner.limits.prefill_buckets), f"no bucket for {size} tokens")
        require(plan.scratch.shape[2] >= geometry.pages(size), f"{size} tokens do not fit the scratch pages")
        require(columns + plan.scratch.shape[2] <= geometry.max_pages, "the probe passes the end of the table")
        last = int(positions_of(rows).max(initial=-1))
        require(plan.position > last, f"a probe at {plan.position} sees a row at {last}")
        self._take(granularity, plan.scratch, plan.pages)
        runner._pool[self._head_pages(granularity, plan.scratch)] = -mix(plan.position, size)
        found = np.zeros(geometry.max_pages * geometry.page_size, np.float32)
        of = zip(tokens_of(rows).tolist(), positions_of(rows).tolist(), strict=True)
        found[: len(rows)] = [self.score(token, position) for token, position in of]
        return RowScores(found if scores is None else np.maximum(found, scores.payload))

    def pack(self, granularity: Granularity, plan: PackRows) -> None:
        runner, page_size = self._runner, self._runner.limits.geometry.page_size
        rows, width = self.stamps(granularity, plan.source), plan.target.shape[2]
        inside = plan.rows.dtype == np.int32 and len(plan.rows) == width * page_size and width > 0
        runner._require(inside, "the rows are not int32, or do not fill the target pages")
        ascending = bool((np.diff(plan.rows) > 0).all()) and plan.rows[0] >= 0 and plan.rows[-1] < len(rows)
        runner._require(ascending, "rows are not ascending indexes into the source pages")
        self._take(granularity, plan.target, plan.source)
        parts = runner.limits.geometry.head_pages_per_page(granularity)
        for l, h in np.ndindex(plan.target.shape[:2]):
            for part in range(parts):
                content = runner._pool[plan.source[l, h] * parts + part].reshape(-1)[plan.rows]
                runner._pool[plan.target[l, h] * parts + part] = content.reshape(-1, page_size)

    def _head_pages(self, granularity: Granularity, pages: np.ndarray) -> np.ndarray:
        parts = self._runner.limits.geometry.head_pages_per_page(granularity)
        return (pages[..., None] * parts + np.arange(parts)).reshape(-1)

    def _take(self, granularity: Granularity, fresh: np.ndarray, known: np.ndarray) -> None:
        """Checks pages that are to be written."""
        require, ids = self._runner._require, fresh.reshape(-1).tolist()
        require(fresh.dtype == np.int32 and fresh.shape[:2] == known.shape[:2], "pages are int32 [layers, heads, n]")
        require(min(ids, default=1) > 0 and len(set(ids)) == len(ids), "a fresh page is null or listed twice")
        require(set(ids).isdisjoint(known.reshape(-1).tolist()), "pages are written that are read")
