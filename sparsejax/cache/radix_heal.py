"""Rows of known blocks that were computed again take the place of the old ones, and what was built on those goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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

    def pinned_beside(self, path: Sequence[Block], behind: int) -> bool:
        """Whether a text is pinned that parts from a path behind so many of its blocks."""
        self.expire_pins()
        return any(block.pins for block in self._beside(path, behind))

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

        Those who have the path, or such a text, keep their rows and publish nothing more: what they compute belongs to
        the old rows.

        Args:
          path: blocks of a text, leased by the caller; no text is pinned that parts from it behind.
          behind: blocks before those that are exchanged, at least 1.
          rows: of each block behind, as many payloads as it has, which are the index's from now on; None for hollow
            ones.
        """
        beside = sorted(self._beside(path, behind), key=lambda block: (-block.depth, block.digest))
        gone, on = set(map(id, beside)), set(map(id, path))
        for lease in self.leases:
            while lease.blocks and id(lease.blocks[-1]) in gone:
                self._hold(lease.blocks.pop(), refs=-1)
                lease.columns.pop()
                lease.closed = True
            lease.closed = lease.closed or (bool(lease.blocks) and id(lease.blocks[-1]) in on)
        for block in beside:
            if block.alive and not block.children:
                self._remove(block)
        self.on_lost(path[behind - 1], True)  # what the host has behind it was computed on the old rows too
        for block, payloads in zip(path[behind:], rows, strict=True):
            old = block.pages
            block.tainted = True
            self.on_lost(block, True)
            if old is None or payloads is None:
                for payload in payloads or ():  # it has lost its rows with the texts that had parted there
                    self._release(payload)
                continue
            block.pages = payloads
            for payload in old:
                self._release(payload)
        self.changes += 1
        self.cuts += 1
