"""The shortest right host loop over a `DeviceRunner`: prefill rows, feed them tokens, compact when the method says so.

No scheduler, no sharing, no sampling to wait for: for measurements that need the step itself, or its logits.
"""

from __future__ import annotations

import numpy as np

from sparsejax.cache.pages import PagePool
from sparsejax.plans import DecodeRow, MaintainRow, PrefillRow, SamplingRow
from sparsejax.rows import RowPages
from sparsejax.runner import DeviceRunner, StepTicket


class Rows:
    """Rows 1..n of one method on one runner, with the pages they hold.

    Args:
      runner: owns the device state; nobody else may use it meanwhile.
      method: one of the runner's methods.
    """

    def __init__(self, runner: DeviceRunner, method: str) -> None:
        self._runner = runner
        self.name = method
        self.method = runner.limits.methods[method]
        self.pool = PagePool(runner.limits.geometry, runner.limits.num_sequence_pages)
        self.pages: dict[int, RowPages] = {}
        self._observed: dict[int, int] = {}

    @property
    def used_head_pages(self) -> int:
        return self.pool.num_head_pages - self.pool.free_head_pages

    def length(self, row: int) -> int:
        """Resident tokens of the row's longest head."""
        return self.pages[row].length

    def prefill(self, row: int, tokens: list[int]) -> StepTicket:
        """Replaces the row by a prompt, in the largest chunks that the runner has, and evicts what the method says.

        The ticket's logits row 0 is that of the last token, before the eviction.
        """
        self.release(row)
        pages = self.pages[row] = RowPages(self.pool, self.method.granularity)
        size = max(chunk for rows, chunk in self._runner.limits.prefill_buckets if rows == 1)
        ticket = None
        for start in range(0, len(tokens), size):
            chunk = np.asarray(tokens[start : start + size], np.int32)
            last = start + size >= len(tokens)
            plan = PrefillRow(row, chunk, start == 0, last, SamplingRow(), pages.append(len(chunk)))
            ticket = self._runner.prefill(self.name, [plan])
        if ticket is None:
            raise ValueError("a prompt needs at least one token")
        self._observed[row] = len(tokens)
        self._maintain(row, "prompt")
        self._observed[row] = 0
        return ticket

    def decode(self, rows: list[int], tokens: list[int | None]) -> StepTicket:
        """Appends one token to each row (None: the one it sampled last), then evicts what the method says."""
        plans = [
            DecodeRow(row, SamplingRow(), self.pages[row].append(1), token)
            for row, token in zip(rows, tokens, strict=True)
        ]
        ticket = self._runner.decode(self.name, plans)
        for row in rows:
            self._observed[row] += 1
            self._maintain(row, "token")
        return ticket

    def release(self, row: int) -> None:
        """Frees the row's pages, if it has any."""
        if row in self.pages:
            self.pages.pop(row).release()

    def _maintain(self, row: int, phase: str) -> None:
        pages = self.pages[row]
        kept = self.method.kept_after(phase, pages.lengths)
        if (kept == pages.lengths).all():
            return
        observed = self._observed[row]
        pages.compact(
            kept,
            lambda new: self._runner.maintain(
                self.name, MaintainRow(row, "evict", phase, pages.lengths.copy(), kept, new, observed)
            ),
        )
        self._observed[row] = 0
