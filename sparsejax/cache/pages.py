"""The page pool: one set of head-pages, handed out at three granularities.

A slab is one sequence page: all head-pages of one token range. It is handed out whole, or cut into layer pages
(id = slab * layers + part) or head pages (id = slab * layers * heads + part), and comes back to the free list when
its last part does. Slab 0 is the null page of every granularity and is never handed out.

Reference counts are the only ledger: a part of a cut slab is free if and only if its count is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from sparsejax.errors import ConfigError
from sparsejax.geometry import Geometry, Granularity

_WHOLE = -1  # state of a slab that is on the free list
_NULL = -2  # state of slab 0


class PoolExhaustedError(RuntimeError):
    """More pages were asked for than are free. Nothing was taken."""


class PageError(ValueError):
    """A page id that is null, out of range, not held, or of another granularity. Nothing was changed."""


class IntegrityError(RuntimeError):
    """The pool's books and its owners disagree."""


class DuplicatePageError(IntegrityError):
    """A page is listed free twice, or has more holders than references."""


class MissingPageError(IntegrityError):
    """A page is neither free nor held: it leaked."""


class AliasedPageError(IntegrityError):
    """A page is free and held at once, or held at two granularities."""


class PagePool:
    """Allocator of page ids; holds no data. Single-threaded. Every call costs O(pages changed).

    Args:
      geometry: attention shape.
      num_sequence_pages: slabs, the null slab included.
    """

    def __init__(self, geometry: Geometry, num_sequence_pages: int) -> None:
        if num_sequence_pages < 2:
            raise ConfigError(
                f"the pool needs at least 2 sequence pages (one is the null page), got {num_sequence_pages}"
            )
        self.geometry = geometry
        self.num_sequence_pages = num_sequence_pages
        whole = geometry.head_pages_per_sequence_page
        self._granularities = tuple(Granularity)
        self._parts = {g: whole // geometry.head_pages_per_page(g) for g in Granularity}
        # Zero pages cost no memory until a granularity is used.
        self._refs = {g: np.zeros(num_sequence_pages * parts, np.int32) for g, parts in self._parts.items()}
        self._state = np.full(num_sequence_pages, _WHOLE, np.int8)  # else index of the granularity it is cut for
        self._state[0] = _NULL
        self._used = np.zeros(num_sequence_pages, np.int32)  # parts held, of a cut slab
        self._free = np.arange(num_sequence_pages - 1, 0, -1, dtype=np.int32)  # a stack, top at _num_free
        self._num_free = num_sequence_pages - 1
        self._partial: dict[Granularity, dict[int, None]] = {g: {} for g in Granularity}  # ordered sets of slabs
        self._spare = dict.fromkeys(Granularity, 0)  # free parts of partial slabs

    def parts(self, granularity: Granularity) -> int:
        """Pages of this granularity in one slab."""
        return self._parts[granularity]

    def capacity(self, granularity: Granularity) -> int:
        """Pages of this granularity if nothing were held."""
        return (self.num_sequence_pages - 1) * self._parts[granularity]

    def free_pages(self, granularity: Granularity) -> int:
        """Pages that `alloc` could give now, cutting whole slabs where needed."""
        return self._spare[granularity] + self._num_free * self._parts[granularity]

    @property
    def num_head_pages(self) -> int:
        """Head-pages that can be handed out: the null slab does not count."""
        return self.capacity(Granularity.HEAD)

    @property
    def free_head_pages(self) -> int:
        """Free head-pages, those stuck in slabs cut for another granularity included."""
        spare = sum(n * self.geometry.head_pages_per_page(g) for g, n in self._spare.items())
        return self._num_free * self.geometry.head_pages_per_sequence_page + spare

    def fits(self, needs: Mapping[Granularity, int]) -> bool:
        """True if all these pages could be allocated together, in any order."""
        slabs = sum(-(-max(0, n - self._spare[g]) // self._parts[g]) for g, n in needs.items())
        return slabs <= self._num_free

    def alloc(self, granularity: Granularity, n: int) -> np.ndarray:
        """Takes n pages, each with one reference; int32 [n]. All or nothing."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > self.free_pages(granularity):
            raise PoolExhaustedError(
                f"{n} {granularity.value} pages were asked for, {self.free_pages(granularity)} are free"
            )
        parts, refs, partial = self._parts[granularity], self._refs[granularity], self._partial[granularity]
        taken: list[np.ndarray] = []
        while n and partial:
            slab = next(reversed(partial))
            start = slab * parts
            ids = start + np.flatnonzero(refs[start : start + parts] == 0)[:n]
            refs[ids] = 1
            self._used[slab] += len(ids)
            if self._used[slab] == parts:
                del partial[slab]
            self._spare[granularity] -= len(ids)
            n -= len(ids)
            taken.append(ids)
        if n:
            count = -(-n // parts)
            slabs = self._free[self._num_free - count : self._num_free][::-1]
            self._num_free -= count
            ids = (slabs[:, None] * parts + np.arange(parts, dtype=np.int32)).reshape(-1)[:n]
            refs[ids] = 1
            self._state[slabs] = self._granularities.index(granularity)
            self._used[slabs] = parts
            rest = count * parts - n
            if rest:
                last = int(slabs[-1])
                self._used[last] -= rest
                partial[last] = None
                self._spare[granularity] += rest
            taken.append(ids)
        return np.concatenate(taken).astype(np.int32) if taken else np.zeros(0, np.int32)

    def share(self, granularity: Granularity, ids: np.ndarray) -> None:
        """Adds one reference to each held page."""
        ids, unique, counts = self._checked(granularity, ids)
        self._refs[granularity][unique] += counts

    def free(self, granularity: Granularity, ids: np.ndarray) -> None:
        """Drops one reference of each page; the last one frees it."""
        ids, unique, counts = self._checked(granularity, ids)
        refs, parts, partial = self._refs[granularity], self._parts[granularity], self._partial[granularity]
        if (refs[unique] < counts).any():
            raise PageError(f"double free of {granularity.value} pages {unique[refs[unique] < counts][:8].tolist()}")
        refs[unique] -= counts
        gone = unique[refs[unique] == 0]
        slabs, freed = np.unique(gone // parts, return_counts=True)
        self._used[slabs] -= freed
        self._spare[granularity] += len(gone)
        empty = self._used[slabs] == 0
        for slab in slabs[~empty].tolist():
            partial[slab] = None
        whole = slabs[empty]
        for slab in whole.tolist():
            partial.pop(slab, None)
        self._spare[granularity] -= len(whole) * parts
        self._state[whole] = _WHOLE
        self._free[self._num_free : self._num_free + len(whole)] = whole
        self._num_free += len(whole)

    def references(self, granularity: Granularity, ids: np.ndarray) -> np.ndarray:
        """Reference counts, int32; zero for free pages."""
        return self._refs[granularity][ids]

    def _checked(self, granularity: Granularity, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids = np.asarray(ids, np.int64).reshape(-1)
        parts = self._parts[granularity]
        bad = (ids < parts) | (ids >= len(self._refs[granularity]))
        if bad.any():
            raise PageError(f"null or unknown {granularity.value} pages {ids[bad][:8].tolist()}")
        unique, counts = np.unique(ids, return_counts=True)
        wrong = self._refs[granularity][unique] == 0
        if wrong.any():
            raise PageError(f"{granularity.value} pages {unique[wrong][:8].tolist()} are not held (double free?)")
        return ids, unique, counts

    def check_integrity(self, owners: Iterable[tuple[Granularity, np.ndarray]]) -> None:
        """Re-adds everything: the universe must be free pages plus pages with as many holders as references.

        Args:
          owners: (granularity, page ids) of every holder.

        Raises:
          DuplicatePageError, MissingPageError, AliasedPageError.
        """
        free = self._free[: self._num_free]
        if len(np.unique(free)) != len(free):
            raise DuplicatePageError("a slab is on the free list twice")
        if (self._state[free] != _WHOLE).any():
            raise AliasedPageError("a slab on the free list is cut or null")
        cut = np.flatnonzero(self._state >= 0)
        if len(free) + len(cut) + 1 != self.num_sequence_pages:
            raise MissingPageError(
                f"{self.num_sequence_pages - 1 - len(free) - len(cut)} slabs are neither free nor cut"
            )
        holders = {g: np.zeros(len(refs), np.int64) for g, refs in self._refs.items()}
        for granularity, ids in owners:
            np.add.at(holders[granularity], np.asarray(ids, np.int64).reshape(-1), 1)
        for code, granularity in enumerate(self._granularities):
            held, refs, parts = holders[granularity], self._refs[granularity], self._parts[granularity]
            name = granularity.value
            live = np.flatnonzero(held)
            if (self._state[live // parts] != code).any() or (refs[live] == 0).any():
                raise AliasedPageError(f"a {name} page is free, null or cut otherwise, yet held")
            if (held > refs).any():
                raise DuplicatePageError(
                    f"{name} pages {np.flatnonzero(held > refs)[:8].tolist()} have too many holders"
                )
            if (held < refs).any():
                raise MissingPageError(f"{name} pages {np.flatnonzero(held < refs)[:8].tolist()} have lost a holder")
            slabs = np.flatnonzero(self._state == code)
            used = (refs.reshape(-1, parts)[slabs] > 0).sum(1)
            if (used != self._used[slabs]).any() or (used == 0).any():
                raise MissingPageError(f"the number of held parts of a {name} slab is wrong")
            partial = set(slabs[used < parts].tolist())
            if partial != set(self._partial[granularity]) or int((parts - used).sum()) != self._spare[granularity]:
                raise MissingPageError(f"free parts of {name} slabs are not listed")
