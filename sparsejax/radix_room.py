"""Pages for the radix cache, and from it: which blocks go when pages are short, and what comes back from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from sparsejax.cache.radix import RadixIndex
from sparsejax.cache.radix_records import Match
from sparsejax.cache.radix_tree import Scope
from sparsejax.chain_tiers import Tiers
from sparsejax.cost import prefill_cost
from sparsejax.errors import RequestError
from sparsejax.geometry import Granularity
from sparsejax.memory import Memory
from sparsejax.plans import Runner
from sparsejax.radix_host import HostBlock, RadixHost
from sparsejax.rows import RowPages

MAX_PINNED_SHARES = 0.5, 0.25
"""Of the pool, pinned pages of all keys together may be so many, and those of one key."""

_PASSING_SHARE = 0.25
"""Chance that a block comes back which nobody has found so far, compared with that of a conversation's next turn."""

_TOGETHER = 16
"""Blocks that leave the pool in one copy."""

_Pages = tuple[Granularity, np.ndarray]
"""A payload of the index: the pages of all layers and heads in one column of a row's table, int32 [layers * heads]."""


class RadixRoom:
    """The index of a radix cache, and the pages that it holds.

    Args:
      runner: copies pages.
      memory: rows and pages.
      clock: seconds, monotonic.
      tiers: where chains are, with which it shares pages and host memory.

    Attributes:
      index: of the blocks in the pool.
      host: those in host memory.
      borrowed: pages that prune jobs have.
    """

    def __init__(self, runner: Runner, memory: Memory, clock: Callable[[], float], tiers: Tiers) -> None:
        self._runner = runner
        self._memory = memory
        self._clock = clock
        self.borrowed: list[RowPages] = []
        columns = memory.pool.num_sequence_pages - 1
        whole, each = MAX_PINNED_SHARES
        most = int(whole * columns), int(each * columns)
        page_size = memory.geometry.page_size
        self.index = RadixIndex(
            page_size,
            self._release,
            clock,
            cost=lambda start: prefill_cost(memory.geometry, start, start + page_size),
            max_pinned_pages=most,
        )
        memory.also_held = self.held
        self.host = RadixHost(runner, tiers.host, tiers.may_leave, tiers.leaving)
        self.index.on_lost = self.host.lost
        tiers.give_blocks, tiers.block_value, tiers.hosted = self.reclaim, self.victim_value, self.host
        tiers.unlease = lambda lease: self.index.release(lease, used=False)
        tiers.spare_pages = lambda: self.spare_pages

    def _release(self, payload: _Pages) -> None:
        self._memory.pool.free(*payload)

    def held(self) -> Iterator[_Pages]:
        """Every page that the index or a prune job holds a reference of."""
        for block in self.index.blocks():
            yield from block.pages or ()
        for pages in self.borrowed:
            yield pages.granularity, pages.held()

    @property
    def spare_pages(self) -> int:
        """At most so many head-pages come free if all blocks go that nobody has."""
        self.index.expire_pins()
        return self.index.free_pages * self._memory.geometry.head_pages_per_sequence_page

    def victim_value(self) -> float | None:
        """What the next block to go is worth, for each of its head-pages, on the scale of `ChainIndex.value`.

        None if there is no such block.
        """
        victim = self.index.next_victim()
        if victim is None:
            return None
        value = _PASSING_SHARE * self.index.value(victim, self._clock())
        return value / self._memory.geometry.head_pages_per_sequence_page

    def reclaim(self) -> bool:
        """Gives up blocks until a page is free; some go to host memory, together. Returns False if nothing is left."""
        pool, index = self._memory.pool, self.index
        before, method = pool.free_head_pages, ""
        leaving: list[np.ndarray] = []
        index.expire_pins()
        while (victim := index.next_victim()) is not None:
            wanted = self.host.wants(victim) and method in ("", victim.scope.method) and len(leaving) < _TOGETHER
            if pool.free_head_pages > before and not (leaving and wanted):
                break
            if wanted:
                assert victim.pages is not None
                method = victim.scope.method
                leaving.append(victim.pages[0][1])
                self.host.leave(victim, index.score(victim))
            index.give_up(victim)
        if leaving:
            self.host.store(method, leaving)
        return pool.free_head_pages > before

    # From host memory.

    def promote(self, match: Match, ids: np.ndarray) -> bool:
        """Brings blocks that follow a match back from host memory. Returns whether there were any."""
        size, index, host = self.index.block_tokens, self.index, self.host
        found, at = self.hosted(match, ids), len(match.blocks)
        if not found:
            return False
        granularity = self._runner.limits.methods[match.scope.method].granularity
        shape, lease = self._memory.geometry.table_shape(granularity), index.lease(match)
        try:
            cells = int(np.prod(shape))
            while found and not self._memory.fits_aside(granularity, len(found) * cells):
                if not self.reclaim():
                    found = found[: len(found) // 2]
            found = [block for block in found if host.blocks.get(block.digest) is block]
            if not found or not self._memory.fits_aside(granularity, len(found) * cells):
                return True
            pages = RowPages(self._memory.pool, granularity)
            pages.restore(np.full(shape, len(found) * size, np.int32))
            columns = pages.table.reshape(cells, -1)[:, : len(found)].T.copy()
            try:
                plan = index.plan_insert(lease, ids[: (at + len(found)) * size])
                if len(plan.wanted) != len(found):  # the pool has some of them by now, without rows
                    return True
                host.load(found, columns)
                self._memory.pool.share(granularity, columns.reshape(-1))
                index.insert(plan, [(granularity, column) for column in columns])
                for block, old in zip(lease.blocks[at:], found, strict=False):
                    block.hits, block.retention = old.hits, old.retention
            except RequestError:
                return True
            finally:
                pages.release()
        finally:
            index.release(lease)
        return True

    def fetch(self, scope: Scope, ids: np.ndarray) -> Match:
        """What there is of these tokens, once what host memory has of them was brought back, if there is room."""
        match = self.index.match(scope, ids, whole=True)
        return self.index.match(scope, ids, whole=True) if self.promote(match, ids) else match

    def hosted(self, match: Match, ids: np.ndarray) -> list[HostBlock]:
        """The blocks in host memory that follow a match of these tokens."""
        digest = match.blocks[-1].digest if match.blocks else match.scope.seed
        if not self.host.follows(digest):
            return []
        size, at = self.index.block_tokens, len(match.blocks)
        keys = np.ascontiguousarray(ids[at * size : match.limit * size], "<u4")
        return self.host.known(digest, [keys[i : i + size].tobytes() for i in range(0, len(keys), size)])
