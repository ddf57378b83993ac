"""What a server remembers of the results of tools in its conversations: where their tokens are, and what was asked."""

from __future__ import annotations

import collections
import threading
from typing import NamedTuple

MAX_RESULTS = 1 << 16
"""Results that are remembered, of all conversations."""
_MAX_PROBLEMS = 64


class Result(NamedTuple):
    """One result of a tool.

    Attributes:
      span: [start, stop) of its content's tokens, None where that can't be said.
      digest: of all ids up to the span's end: it is no other text's.
      prune_id: of the last job that had to do with it.
    """

    span: tuple[int, int] | None
    digest: bytes
    prune_id: str | None = None


class ToolResults:
    """Results by the conversation up to them. Bounded; safe in several threads."""

    def __init__(self, max_results: int = MAX_RESULTS) -> None:
        self._max_results = max_results
        self._lock = threading.Lock()
        self._results: collections.OrderedDict[bytes, Result] = collections.OrderedDict()
        self._problems: set[str] = set()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: bytes) -> Result | None:
        """What is known of the result at the end of the messages with this digest (`messages.Step`)."""
        with self._lock:
            return self._results.get(key)

    def put(self, key: bytes, result: Result) -> None:
        """Notes a result; the oldest ones go if there is no room."""
        with self._lock:
            self._results[key] = result
            self._results.move_to_end(key)
            while len(self._results) > self._max_results:
                self._results.popitem(last=False)

    def is_new_problem(self, text: str) -> bool:
        """Whether this was not said before, so that a log is not filled with it."""
        with self._lock:
            if text in self._problems or len(self._problems) >= _MAX_PROBLEMS:
                return False
            self._problems.add(text)
            return True
