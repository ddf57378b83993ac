"""Ranges of tokens whose rows are to go: what a client may ask for, what is there, which rows stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsejax.errors import PruneError

if TYPE_CHECKING:
    from sparsejax.cache.radix_tree import Block


@dataclasses.dataclass(frozen=True)
class RangeRows:
    """The rows of one range of a path as they are.

    Attributes:
      start, stop: tokens.
      base, exit: the block before the range, and its last one.
      pages: payloads of its rows, in their order.
      positions: int32, of these rows.
      runs: the blocks that hold these pages, what they held, and on what that rested, so that a change is noticed.
    """

    start: int
    stop: int
    base: Block
    exit: Block
    pages: tuple[Any, ...]
    positions: np.ndarray = dataclasses.field(repr=False, compare=False)
    runs: tuple[tuple[Block, tuple[Any, ...], Block | None], ...] = dataclasses.field(repr=False, default=())

    @property
    def current(self) -> bool:
        """Nothing has changed since."""
        return self.exit.alive and all(b.pages is pages and b.base is base for b, pages, base in self.runs)


def normal_ranges(ranges: Iterable[Sequence[int]], tokens: int, block_tokens: int) -> list[tuple[int, int]]:
    """Checked ranges [start, stop), ascending; those that touch are one.

    Args:
      ranges: pairs of integers.
      tokens: of the text that they lie in.
      block_tokens: both ends are multiples of it.

    Raises:
      PruneError: names the range and what is allowed.
    """
    found: list[tuple[int, int]] = []
    for pair in ranges:
        if len(pair) != 2 or any(isinstance(end, bool) or not isinstance(end, int) for end in pair):
            raise PruneError(f"a range is a pair of integers [start, stop), not {pair!r}")
        start, stop = pair
        if not 0 <= start < stop <= tokens:
            raise PruneError(f"range [{start}, {stop}) must lie within the {tokens} tokens and not be empty")
        if start % block_tokens or stop % block_tokens:
            raise PruneError(f"both ends of range [{start}, {stop}) must be multiples of {block_tokens} tokens")
        found.append((start, stop))
    if not found:
        raise PruneError("ranges is empty")
    found.sort()
    merged = found[:1]
    for start, stop in found[1:]:
        last = merged[-1]
        if start < last[1]:
            raise PruneError(f"ranges [{last[0]}, {last[1]}) and [{start}, {stop}) overlap")
        if start == last[1]:
            merged[-1] = last[0], stop
        else:
            merged.append((start, stop))
    return merged


def choose_rows(scores: Sequence[np.ndarray], keep: int, page_size: int) -> list[np.ndarray]:
    """Which rows of some ranges stay: the best ones, in whole pages of each range, as many pages as `keep` rows fill.

    A page's worth of rows of a range is its next best `page_size` ones, so no other choice has a higher sum. Of equal
    scores the earlier range and the smaller index win.

    Args:
      scores: of each range, float [rows]; as many rows as fill whole pages.
      keep: rows to keep of all ranges together, less than there are.
      page_size: rows of a page.

    Returns:
      int32 indexes of the rows of each range that stay, ascending.

    Raises:
      PruneError: `keep` is no count of rows below what is there.
    """
    total = sum(map(len, scores))
    if isinstance(keep, bool) or not isinstance(keep, int) or not 0 <= keep < total:
        raise PruneError(f"keep_tokens must be in [0, {total - 1}], got {keep!r}", param="keep_tokens")
    orders = [np.argsort(-np.nan_to_num(s, nan=-np.inf), kind="stable") for s in scores]
    sums = [s[order].reshape(-1, page_size).sum(1) for s, order in zip(scores, orders, strict=True)]
    place = [(-float(value), i, n) for i, values in enumerate(sums) for n, value in enumerate(values)]
    pages = [0] * len(scores)
    for _, i, _ in sorted(place)[: keep // page_size]:
        pages[i] += 1
    return [np.sort(o[: n * page_size]).astype(np.int32) for o, n in zip(orders, pages, strict=True)]
