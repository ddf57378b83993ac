"""Rows that retention methods dropped, in host memory: pages by compaction, and which of them a turn gets back.

Nothing here moves a row: the runner made the pages and reads them again.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any, Literal, Protocol

import numpy as np

_LOWEST = np.finfo(np.float32).min
_OWN_VOTES = 0.1


@dataclasses.dataclass(eq=False)
class EvictedPages:
    """Some pages of dropped rows, in the order of the rows. Chains, forks and checkpoints hold the same ones.

    Attributes:
      payload: the rows, opaque; None once they were given up for want of memory.
      counts: int32 [num_layers, num_kv_heads], pages of each head, all of them full.
      nbytes: of host memory.
      fresh: the same rows on the device, right after they were dropped, until somebody lets go of them.
      age: the lower, the longer ago they were needed.
    """

    payload: Any
    counts: np.ndarray
    nbytes: int
    fresh: Any = None
    age: int = -1

    @property
    def lost(self) -> bool:
        return self.payload is None

    @property
    def width(self) -> int:
        """Pages of the head that has most."""
        return int(self.counts.max())


class ScoreTicket(Protocol):
    """Scores of evicted pages under way."""

    def is_ready(self) -> bool:
        """True if `result` would not wait."""
        ...

    def result(self) -> PageScores:
        """Waits."""
        ...


@dataclasses.dataclass(frozen=True)
class PageScores:
    """How much some evicted pages are worth to a turn: float32 [num_layers, num_kv_heads, pages].

    `nbytes` were copied to find out.
    """

    scores: np.ndarray
    nbytes: int = 0


class EvictedStore:
    """The host memory that dropped rows may take. Knows all pages that somebody still holds.

    Whoever refers to pages holds them, so Python's own books say which are left. Beyond the capacity the pages that
    were added or lent longest ago lose their rows.

    Args:
      capacity_bytes: of all pages together.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.lost_pages = 0
        self._pages: weakref.WeakSet[EvictedPages] = weakref.WeakSet()
        self._age = itertools.count()

    @property
    def used_bytes(self) -> int:
        return sum(pages.nbytes for pages in self._pages)

    def add(self, added: tuple[EvictedPages, ...]) -> None:
        """Keeps more pages, and gives up old ones if that is too much."""
        self.touch(added)
        self._pages.update(added)
        used = self.used_bytes
        if used <= self.capacity_bytes:
            return
        for pages in sorted(self._pages, key=lambda pages: pages.age):
            if used <= self.capacity_bytes:
                break
            used -= pages.nbytes
            self.lost_pages += int(pages.counts.sum())
            pages.payload, pages.nbytes = None, 0
            self._pages.discard(pages)

    def touch(self, pages: tuple[EvictedPages, ...]) -> None:
        """These were needed just now."""
        for some in pages:
            some.age = next(self._age)


def held(pages: tuple[EvictedPages, ...]) -> np.ndarray:
    """Which entries of the pages laid side by side are pages of a head: bool [layers, kv_heads, entries]."""
    return np.concatenate([np.arange(some.width) < some.counts[..., None] for some in pages], axis=2)


def best_first(pages: tuple[EvictedPages, ...], scores: np.ndarray | None, most: int) -> np.ndarray:
    """The `most` best entries of each head, int32 [layers, kv_heads, most]: the best first, -1 where there are no more.

    Without scores the newest are the best.
    """
    there = held(pages)
    if scores is None:
        newest = np.where(there, np.arange(there.shape[2], dtype=np.int32), np.int32(-1))
        return -np.sort(-newest, axis=2)[..., :most]
    finite = np.nan_to_num(scores, nan=-np.inf).clip(_LOWEST, -_LOWEST)  # what is not a number is of no use to anybody
    cost = -np.where(there, finite, -np.inf)
    order = np.arange(cost.shape[2])
    if most < cost.shape[2]:
        order = np.sort(np.argpartition(cost, most - 1, axis=2)[..., :most], axis=2)
        cost = np.take_along_axis(cost, order, 2)
    order = np.take_along_axis(np.broadcast_to(order, cost.shape), np.argsort(cost, axis=2, kind="stable"), 2)
    return np.where(np.take_along_axis(there, order, 2), order, -1).astype(np.int32)


def joined_votes(votes: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What pages are worth to each head if all heads say together which parts of the text are needed.

    Few heads look for what is far away, and they know: the others would hardly attend to it, but what it means depends
    on all of them. The votes of a page are for the row that they are about and what stands around it within the page's
    stretch of text, up to half a page away; a page is worth what its best position got. A head's own votes count a
    tenth beside the mean of all.

    Args:
      votes: float [layers, kv_heads, pages], not negative.
      rows: int [layers, kv_heads, pages], the row of each page that its votes are about.
      positions: int [layers, kv_heads, pages, page_size], ascending in each page.

    Returns:
      float32 [layers, kv_heads, pages].
    """
    votes, positions = np.nan_to_num(votes), np.maximum(positions, 0)
    place = np.take_along_axis(positions, rows[..., None], 3).reshape(-1)
    half = positions.shape[3] // 2
    first = np.maximum(positions[..., 0].reshape(-1), place - half)
    last = np.minimum(positions[..., -1].reshape(-1), place + half)
    size = max(int(last.max(initial=0)) + 2, int(positions.max(initial=0)) + 1)
    steps = np.bincount(first, votes.reshape(-1), size) - np.bincount(last + 1, votes.reshape(-1), size)
    mean = np.cumsum(steps) / (votes.shape[0] * votes.shape[1])
    return (mean[positions].max(3) + _OWN_VOTES * votes).astype(np.float32)


@dataclasses.dataclass
class Recalled:
    """What a turn gets back, from the moment it has its rows.

    Attributes:
      budget: most rows of each head.
      pages: that were there when the turn began.
      order: see `best_first`; None until it is known.
      ticket: of the scores that it will be made of.
      scored: there were scores; without them everything is lent.
      columns: int32 [layers, heads] of the granularity, pages lent to each head; None before that is decided.
      joining: pages that were dropped just now and stay with the turn.
      in_front: the lent pages stand before the row's own in its table on the device.
      began_s, seconds: when it began, and how long it took until the rows were there.
      bytes_moved: to the device.
      reason: why less was lent than asked for.
    """

    budget: int | Literal["all"]
    pages: tuple[EvictedPages, ...] = ()
    order: np.ndarray | None = None
    ticket: ScoreTicket | None = None
    scored: bool = False
    columns: np.ndarray | None = None
    joining: tuple[EvictedPages, ...] = ()
    in_front: bool = False
    began_s: float = 0.0
    seconds: float = 0.0
    bytes_moved: int = 0
    reason: str | None = None
