"""How fast a variant decodes beside dense attention, in windows of a few steps that take turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.rows import Rows

STEPS = 3
"""Steps of a window."""


def tokens(windows: int) -> int:
    """Tokens that each row of a variant decodes while it is timed: a step first that nobody times."""
    return windows * STEPS + 1


class Clock:
    """Rows of dense attention that stay resident, to be timed in turn with others.

    Args:
      bench: the reference's; its contexts in rows 1.. of the base are used whenever something is timed.
      reference: dense attention, one of the bench's variants.
      windows: of each side.
    """

    def __init__(self, bench: Any, reference: Any, windows: int) -> None:
        self.bench, self._windows = bench, windows
        self._rows = bench.rows(reference)

    def prefill_s(self, ids: Sequence[int]) -> float:
        """Seconds that dense attention, which keeps no statistics, takes to read a context."""
        row = self.bench.timed[0]
        self._rows.prefill(row, ids[: len(ids) // 8]).result()  # compiles
        start = time.perf_counter()
        self._rows.prefill(row, ids).result()
        taken = time.perf_counter() - start
        self._rows.release(row)
        return taken

    def beside(self, rows: Rows, numbers: Sequence[int]) -> dict[str, float]:
        """Decodes some tokens with `numbers` of `rows` and with as many dense rows, one window of each at a time.

        Both sides have the same program size and the same number of rows, so steps compare as tokens per second do.
        Evictions that fall due are part of a window.
        """
        held = [row for row in self.bench.base.pages if row < self.bench.first_question]
        count = min(len(numbers), len(held))
        own, dense = list(numbers[:count]), self.bench.timed[:count]
        for source, row in zip(held, dense, strict=False):
            self.bench.take(self._rows, source, row)
        try:
            _window(self._rows, dense, 1)
            _window(rows, own, 1)
            times = [(_window(self._rows, dense, STEPS), _window(rows, own, STEPS)) for _ in range(self._windows)]
        finally:
            for row in dense:
                self._rows.release(row)
        reference, found = zip(*times, strict=True)
        faster = common.ratio(reference, found)
        return {**faster, "step_s": min(found) / STEPS, "dense_step_s": min(reference) / STEPS, "rows": count}


def _window(rows: Rows, numbers: list[int], steps: int) -> float:
    """Seconds of so many decode steps, each of which takes the token that the one before sampled."""
    start = time.perf_counter()
    for _ in range(steps):
        ticket = rows.decode(numbers, [None] * len(numbers))
    ticket.result()
    return time.perf_counter() - start
