"""The shortest right host loop over a `DeviceRunner`: prefill and fork rows, feed them tokens, evict when due.

No scheduler, no sharing, no sampling to wait for: for measurements that need the step itself, or its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from sparsejax.cache.pages import PagePool
from sparsejax.plans import DecodeRow, ForkRow, MaintainRow, PrefillRow, SamplingRow
from sparsejax.rows import RowPages
from sparsejax.runner import DeviceRunner, StepTicket


class NotFiniteError(RuntimeError):
    """A step gave logits that are NaN or infinite."""


class Rows:
    """Rows of one method on one runner, with the pages they hold.

    Args:
      runner: owns the device state; nobody else may use it meanwhile, but other `Rows` of the same pool.
      method: one of the runner's methods.
      pool: that of other rows on this runner, so that they can be forked; None for a runner of one's own.
    """

    def __init__(self, runner: DeviceRunner, method: str, pool: PagePool | None = None) -> None:
        self._runner = runner
        self.name = method
        self.method = runner.limits.methods[method]
        self.pool = pool or PagePool(runner.limits.geometry, runner.limits.num_sequence_pages)
        self.pages: dict[int, RowPages] = {}
        self._observed: dict[int, int] = {}

    @property
    def used_head_pages(self) -> int:
        return self.pool.num_head_pages - self.pool.free_head_pages

    def length(self, row: int) -> int:
        """Resident tokens of the row's longest head."""
        return self.pages[row].length

    def prefill(self, row: int, tokens: Sequence[int]) -> StepTicket:
        """Replaces the row by a prompt and evicts what the method says.

        The ticket's logits row 0 is that of the last token, before the eviction.
        """
        self.release(row)
        self.pages[row] = RowPages(self.pool, self.method.granularity)
        ticket = self.append(row, tokens)
        self.finish_prompt(row)
        return ticket

    def append(self, row: int, tokens: Sequence[int]) -> StepTicket:
        """Appends prompt tokens in the largest chunks that the runner has; the row is new if it holds nothing."""
        pages = self.pages[row]
        first, end = not pages.length, len(tokens)
        size = max(chunk for rows, chunk in self._runner.limits.prefill_buckets if rows == 1)
        self._observed[row] = 0 if first else self._observed[row]
        ticket = None
        for start in range(0, end, size):
            chunk = np.asarray(tokens[start : start + size], np.int32)
            last = start + size >= end
            plan = PrefillRow(row, chunk, first and start == 0, last, SamplingRow(), pages.append(len(chunk)))
            ticket = self._runner.prefill(self.name, [plan])
            self._observed[row] += len(chunk)
            if not last:
                self._maintain(row, "chunk")
        if ticket is None:
            raise ValueError("a prompt needs at least one token")
        return ticket

    def finish_prompt(self, row: int) -> None:
        """Evicts what the method says once a prompt is complete; what follows is decoded, or is another prompt."""
        self._maintain(row, "prompt")
        self._observed[row] = 0

    def fork(self, other: Rows, source: int, target: int) -> None:
        """Replaces the row `target` by a copy of `source` of `other`, which may be of another method.

        What is shared is not copied. The methods must have one granularity, and `other` must have kept all that this
        method's statistics are made of.
        """
        self.release(target)
        pages, copies = other.pages[source].fork()
        self.pages[target], self._observed[target] = pages, other._observed[source]
        self._runner.fork(self.name, ForkRow(source, target, pages.updates(), copies))

    def logits(self, rows: Sequence[int], tokens: Sequence[int]) -> jax.Array:
        """Appends one token to each row like `decode`: float32 [len(rows), vocab].

        Raises:
          NotFiniteError: what a model or method computed is not a number.
        """
        ticket = self.decode(list(rows), list(tokens))
        if not ticket.result().ok.all():
            raise NotFiniteError(f"{self.name}: logits are not finite")
        return ticket.logits[: len(rows)]

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
