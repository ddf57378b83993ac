"""What clients of the radix prefix cache may ask of it: paths found, pinned, put in classes and deleted."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import numpy as np

from sparsejax.cache.chain import as_ids
from sparsejax.cache.radix_records import Pin
from sparsejax.cache.radix_tree import Block, RadixTree, Scope
from sparsejax.errors import PinRefusedError, PrefixNotFoundError


class RadixKeeper(RadixTree):
    """Keeps what it is told to, longer than other blocks or until some time, within limits.

    Args beyond those of `RadixTree`:
      max_pinned_pages: of all tenants together, and of each.
    """

    def __init__(self, *args: Any, max_pinned_pages: tuple[int, int] = (0, 0), **options: Any) -> None:
        super().__init__(*args, **options)
        self.max_pinned_pages = max_pinned_pages
        self._pins: list[tuple[float, int, Pin]] = []
        self._numbers = itertools.count()

    def _keys(self, ids: np.ndarray, whole: bool) -> list[bytes]:
        size = self.block_tokens
        count = max(0, len(ids) - (0 if whole else 1)) // size
        data, step = np.ascontiguousarray(as_ids(ids)[: count * size], "<u4").tobytes(), 4 * size
        return [data[at : at + step] for at in range(0, count * step, step)]

    def longest(self, scope: Scope, ids: np.ndarray) -> list[Block]:
        """The blocks of the longest known beginning of some tokens, with rows or without."""
        node, path = self.roots.get(scope.seed), []
        for key in self._keys(ids, True) if node is not None else ():
            node = node.children.get(key)  # type: ignore[union-attr]
            if node is None:
                break
            path.append(node)
        return path

    def path(self, scope: Scope, ids: np.ndarray) -> tuple[Block, ...]:
        """The blocks of exactly these tokens, up to the last whole block, with rows or without.

        Raises:
          PrefixNotFoundError: they are not all there.
        """
        path, size = self.longest(scope, ids), self.block_tokens
        if not path or len(path) < len(ids) // size:
            raise PrefixNotFoundError(
                f"the prefix cache has {len(path) * size} of the {len(ids) // size * size} tokens"
                f" (whole blocks of {size})"
            )
        return tuple(path)

    def pin(self, scope: Scope, ids: np.ndarray, ttl_s: float) -> Pin:
        """Keeps a path for so many seconds.

        Raises:
          PrefixNotFoundError: it is not there.
          PinRefusedError: pins would hold more pages than they may.
        """
        self.expire_pins()
        path = self.path(scope, ids)
        more = sum(block.charge for block in path if not block.pins)
        whole, each = self.max_pinned_pages
        mine, everybody = self.pinned_pages[scope.tenant] + more, self.pinned_pages.total() + more
        if mine > each or everybody > whole:
            raise PinRefusedError(
                f"pinned prefixes would hold {mine} pages of this key and {everybody} in all; "
                f"{each} and {whole} are allowed"
            )
        for block in path:
            self._hold(block, pins=1)
        pin = Pin(path, self._clock() + ttl_s)
        heapq.heappush(self._pins, (pin.until_s, next(self._numbers), pin))
        return pin

    def unpin(self, pin: Pin) -> None:
        """Ends a pin. Idempotent."""
        if pin.ended:
            return
        pin.ended = True
        self._pins = [entry for entry in self._pins if entry[2] is not pin]
        heapq.heapify(self._pins)
        for block in reversed(pin.blocks):
            self._hold(block, pins=-1)
        self._settle(pin.blocks[-1])

    def pins_on(self, block: Block) -> list[Pin]:
        """The pins of paths that end with a block."""
        return [pin for _, _, pin in self._pins if pin.blocks[-1] is block]

    def expire_pins(self) -> None:
        """Ends pins whose time is over."""
        now = self._clock()
        while self._pins and self._pins[0][0] <= now:
            self.unpin(self._pins[0][2])

    def set_retention(self, scope: Scope, ids: np.ndarray, retention: int) -> int:
        """Puts the last block of a path and all below it in a class: higher ones stay longer. Returns how many.

        Raises PrefixNotFoundError.
        """
        stack, count = [self.path(scope, ids)[-1]], 0
        while stack:
            block = stack.pop()
            block.retention = retention
            self._offer(block)
            count += 1
            stack.extend(block.children.values())
        return count

    def delete(self, scope: Scope, ids: np.ndarray) -> tuple[int, dict[str, int]]:
        """Gives up the last block of a path and all below it that nobody holds, deepest first.

        Returns how many blocks went, and why others did not: how many are "leased" or "pinned", or have such below.

        Raises PrefixNotFoundError.
        """
        order, stack = [], [self.path(scope, ids)[-1]]
        while stack:
            order.append(stack.pop())
            stack.extend(order[-1].children.values())
        before = self.num_blocks
        for block in sorted(order, key=lambda block: (-block.depth, block.digest)):
            if block.alive and not block.children and not block.held:
                self._remove(block)
        left = [block for block in order if block.alive]
        leased, pinned = sum(b.refs > 0 for b in left), sum(b.pins > 0 for b in left)
        return before - self.num_blocks, {"leased": leased, "pinned": pinned}

    def evict(self, pages: int) -> int:
        """As `RadixTree.evict`; pins whose time is over hold nothing."""
        self.expire_pins()
        return super().evict(pages)
