"""Programs under way: submitted in order, collected in the same order, and what a runner's errors mean."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from sparsejax.cache.evicted import PageScores, ScoreTicket
from sparsejax.errors import RequestError
from sparsejax.plans import ArrayTicket, StepResult, Ticket
from sparsejax.prefill import Bucket
from sparsejax.rows import Sequence


class RunnerError(RuntimeError):
    """The runner failed. Its state is lost with the arrays that were donated to it, so the engine can't go on."""


def call_runner(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the runner. A RequestError means that it refused and did nothing; anything else is fatal."""
    try:
        return function(*args)
    except RequestError:
        raise
    except Exception as error:
        raise RunnerError(f"{type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Launch:
    """One program.

    Attributes:
      step: iteration that submitted it.
      rows: each submitted choice with the position of its sampled token, or None if it sampled none.
      bucket: of a prefill program.
    """

    step: int
    ticket: Ticket | ArrayTicket | ScoreTicket
    rows: tuple[tuple[Sequence, int | None], ...]
    submitted_s: float
    bucket: Bucket | None


class Launches:
    """The queue of programs under way. Results are taken strictly oldest first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue: collections.deque[Launch] = collections.deque()
        self._collected_s = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self):
        return iter(self._queue)

    def clear(self) -> None:
        self._queue.clear()

    def add(
        self,
        step: int,
        ticket: Ticket | ArrayTicket | ScoreTicket,
        rows: list[tuple[Sequence, int | None]],
        bucket: Bucket | None,
    ) -> None:
        self._queue.append(Launch(step, ticket, tuple(rows), self._clock(), bucket))

    def due(self, newest_due_step: int) -> bool:
        """True if the oldest program is ready, or belongs to a step that must be collected now."""
        if not self._queue:
            return False
        oldest = self._queue[0]
        return oldest.step <= newest_due_step or call_runner(oldest.ticket.is_ready)

    def collect(self) -> tuple[Launch, StepResult | np.ndarray | PageScores, float]:
        """Waits for the oldest program; also returns the seconds that the device spent on it, as far as is known."""
        launch = self._queue.popleft()
        result = call_runner(launch.ticket.result)
        now = self._clock()
        elapsed_s = now - max(launch.submitted_s, self._collected_s)
        self._collected_s = now
        return launch, result, elapsed_s
