"""What follows a text on the mock runner when some of its rows are missing: an oracle that knows no cache, no pages."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from sparsejax.mock import hash_script
from sparsejax.mock_stamps import next_stamp

_MASK = (1 << 64) - 1


class Masked:
    """A text that is read token by token; what was taken out of it is not seen by what comes later.

    Attributes:
      tokens: so far.
      rows: what stands for each token that is there, by position.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.rows: dict[int, int] = {}
        self._whole: list[int] = []
        self.read(tokens)

    @classmethod
    def of(cls, tokens: Sequence[int], rows: dict[int, int]) -> Masked:
        """A text of which these rows are there, whatever was seen when they were computed."""
        text = cls(tokens)
        text.rows = dict(rows)
        return text

    @property
    def stamps(self) -> list[int]:
        """What stands for the tokens that are there, in their order."""
        return list(self.rows.values())

    @property
    def _seen(self) -> int | None:
        whole = list(self.rows.values()) == self._whole
        return None if whole else sum(self.rows.values()) & _MASK

    def read(self, tokens: Iterable[int]) -> Masked:
        for token in tokens:
            at, seen = len(self.tokens), self._seen
            last = self._whole[-1] if self._whole else 0
            self._whole.append(next_stamp(last, token, at))
            self.rows[at] = self._whole[-1] if seen is None else next_stamp(seen, token, at)
            self.tokens.append(token)
        return self

    def drop(self, positions: Iterable[int]) -> Masked:
        for position in positions:
            self.rows.pop(position, None)
        return self

    def generate(self, count: int, seed: int) -> list[int]:
        """So many tokens; all of them are read but the last one, as an engine does."""
        output: list[int] = []
        while len(output) < count:
            if output:
                self.read(output[-1:])
            seen = self._seen
            history: Sequence[int] = self.tokens if seen is None else [*self.tokens, seen]
            output.append(hash_script(history, len(output), seed))
        return output

    def copy(self) -> Masked:
        return copy.deepcopy(self)
