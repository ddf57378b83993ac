"""Which tokens the rows of a text stand for, where pruning has taken some of them.

A text is as long as it was: what follows a pruned range keeps its positions. Its rows lie side by side, in whole pages
before the last one, so those of a range begin and end at pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sparsejax.cache.radix_tree import Cut
from sparsejax.errors import PruneError

Cuts = tuple[Cut, ...]
"""Pruned ranges of a text, ascending, without overlap."""


def positions(cuts: Cuts, tokens: int) -> np.ndarray:
    """int32, the token of each row of a text of so many tokens."""
    parts, at = [], 0
    for cut in cuts:
        parts += [np.arange(at, cut.start), cut.kept]
        at = cut.stop
    parts.append(np.arange(at, tokens))
    return np.concatenate(parts).astype(np.int32)


def rows_of(cuts: Cuts, start: int, stop: int) -> tuple[int, int]:
    """Indexes [first, end) of the rows of a range of tokens, neither end inside of a pruned one."""
    first = start - sum(cut.missing for cut in cuts if cut.stop <= start)
    return first, first + stop - start - sum(cut.missing for cut in cuts if start <= cut.start and cut.stop <= stop)


def missing(cuts: Cuts) -> int:
    """Tokens without rows."""
    return sum(cut.missing for cut in cuts)


def pruned(cuts: Cuts, more: Iterable[Cut]) -> Cuts:
    """The pruned ranges of a text after more of it was pruned: a new range may hold old ones as a whole.

    Raises:
      PruneError: a new range begins or ends within an old one.
    """
    found = list(cuts)
    for new in more:
        for old in found:
            apart = new.stop <= old.start or old.stop <= new.start
            if not apart and not (new.start <= old.start and old.stop <= new.stop):
                raise PruneError(
                    f"range [{new.start}, {new.stop}) lies partly in [{old.start}, {old.stop}), which was pruned "
                    "before: take that in whole"
                )
        found = [old for old in found if old.stop <= new.start or new.stop <= old.start]
        found.append(new)
    return tuple(sorted(found, key=lambda cut: cut.start))


def as_record(cuts: Cuts) -> list[list[Any]]:
    """What JSON can hold of them."""
    return [[cut.start, cut.stop, cut.policy, cut.kept.tolist()] for cut in cuts]


def from_record(record: Iterable[Any]) -> Cuts:
    """The reverse. Raises ValueError."""
    return tuple(
        Cut(int(start), int(stop), np.array(kept, np.int32), str(policy)) for start, stop, policy, kept in record
    )
