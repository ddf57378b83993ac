"""Rows of known blocks that were computed again take the place of the old ones, and what was built on those goes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sparsejax.cache.radix_keep import RadixKeeper
from sparsejax.cache.radix_records import Lease
from sparsejax.cache.radix_tree import Block


class RadixHealer(RadixKeeper):
    """Exchanges rows of blocks."""

    leases: dict[Lease, None]

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[Any]]:
        """Payloads that are given up meanwhile come in a list: the caller releases them, all at once."""
        release, found = self._release, list[Any]()
        self._release = found.append
        try:
            yield found
        finally:
            self._release = release

    def hindered(self, path: Sequence[Block], behind: int, own: Collection[Lease | None]) -> bool:
        """Whether somebody has, or pins, what an exchange behind so many blocks of a path would take from him.

        Args:
          path: blocks of a text.
          behind: blocks before those that are exchanged.
          own: leases that don't count.
        """
        mine: dict[Block, int] = {}
        for lease in own:
            for block in lease.blocks if lease is not None else ():
                mine[block] = mine.get(block, 0) + 1
        if any(block.refs > mine.get(block, 0) for block in path[behind:]):
            return True
        return any(block.held for block in self._beside(path, behind))

    def _beside(self, path: Sequence[Block], behind: int) -> Iterator[Block]:
        """Blocks below those of a path, but not on it: parents first."""
        on = set(map(id, path))
        stack = [child for block in path[max(0, behind - 1) :] for child in block.children.values()]
        stack = [block for block in stack if id(block) not in on]
        while stack:
            block = stack.pop()
            yield block
            stack.extend(block.children.values())

    def heal(self, path: Sequence[Block], behind: int, rows: Sequence[tuple[Any, ...] | None]) -> None:
        """Puts other rows in the place of those of a path, and gives up all texts that part from it behind.

        Those who read the path now, and may go on with the same text, publish nothing of it any more.

        Args:
          path: blocks of a text; nobody hinders it (see `hindered`).
          behind: blocks before those that are exchanged.
          rows: of each block behind, as many payloads as it has, which are the index's from now on; None for hollow
            ones.
        """
        on = set(map(id, path))
        for lease in self.leases:
            if lease.blocks and id(lease.blocks[-1]) in on:
                lease.closed = True
        beside = sorted(self._beside(path, behind), key=lambda block: (-block.depth, block.digest))
        for block in beside:
            if block.alive and not block.children:
                self._remove(block)
        for block, payloads in zip(path[behind:], rows, strict=True):
            old = block.pages
            block.tainted = True
            if old is None or payloads is None:
                for payload in payloads or ():  # it has lost its rows with the texts that had parted there
                    self._release(payload)
                continue
            block.pages = payloads
            for payload in old:
                self._release(payload)
        self.changes += 1
        self.cuts += 1
