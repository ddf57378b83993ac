"""The tree below the radix prefix cache: blocks of tokens, what they hold, who needs them, and which goes first.

A block stands for a page size of tokens behind all blocks above it. Children are found by their exact token ids, so
no hash can make two texts one. What a block holds is opaque: a tuple of payloads, one for a page size of rows, each a
reference that the tree owns and gives to `release` once.

Pruning leaves the blocks and takes rows: the last block of a pruned range (its exit) holds what is left of the whole
range and rests on the block before the range; the blocks in between are hollow. A block that others rest on, such as
those of a text that leaves the pruned one in the middle of the range, keeps what it holds.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sparsejax.cache.pages import IntegrityError

_DIGEST_BYTES = 16
_SPARE_ENTRIES = 64  # of the heap, beyond four for each block, before it is built anew


@dataclasses.dataclass(frozen=True)
class Scope:
    """Whose blocks a root has. Roots of different scopes have nothing in common.

    Attributes:
      seed: fingerprint, salt and tenant in one (see `cache.chain.seed_of`).
      tenant: who may see them.
      method, fingerprint: of the rows; only for saying why nothing was found.
    """

    seed: bytes
    tenant: str = ""
    method: str = ""
    fingerprint: bytes = b""


@dataclasses.dataclass(frozen=True)
class Cut:
    """What pruning took from a range of tokens.

    Attributes:
      start, stop: tokens of the range, multiples of the block.
      kept: int32, logical positions of the rows that are left, ascending.
      policy: how they were chosen.
    """

    start: int
    stop: int
    kept: np.ndarray = dataclasses.field(repr=False, compare=False)
    policy: str = ""

    @property
    def missing(self) -> int:
        """Tokens without rows."""
        return self.stop - self.start - len(self.kept)


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """One block. Only the tree changes it.

    Attributes:
      scope: of its root.
      parent: the block before it; None for a root, which stands for no tokens.
      key: its token ids, as little-endian uint32.
      digest: hash of all tokens up to its end, and of the seed.
      depth: blocks up to its end.
      children: by key.
      pages: payloads; None if it is hollow.
      base: the block whose rows come before `pages`: the parent, or the one before a pruned range.
      cut: of the range that ends here, if its rows were pruned.
      rests: blocks whose base it is.
      covers: pruned ranges that it lies in, other than at their end.
      tainted: its rows were computed while others before them were missing.
      refs, pins: leases and pins on it or on a block below.
      retention: blocks of a higher class stay longer.
      hits: leases that found it.
      used_s: when it was last leased or given back.
      alive: part of the tree.
    """

    scope: Scope
    parent: Block | None = dataclasses.field(repr=False)
    key: bytes
    digest: bytes
    depth: int
    children: dict[bytes, Block] = dataclasses.field(default_factory=dict, repr=False)
    pages: tuple[Any, ...] | None = None
    base: Block | None = dataclasses.field(default=None, repr=False)
    cut: Cut | None = None
    rests: int = 0
    covers: int = 0
    tainted: bool = False
    refs: int = 0
    pins: int = 0
    retention: int = 0
    hits: int = 0
    used_s: float = 0.0
    alive: bool = True
    entry: tuple[int, float, bytes] | None = None  # as last put on the heap

    @property
    def held(self) -> bool:
        """Somebody needs it, or one below."""
        return self.refs > 0 or self.pins > 0

    @property
    def charge(self) -> int:
        """Pages that a pin of it holds, or may once it has rows again."""
        return max(1, len(self.pages or ()))


def up(block: Block) -> Iterator[Block]:
    """A block and those above it, without the root."""
    while block.parent is not None:
        yield block
        block = block.parent


def inside(exit_: Block) -> Iterator[Block]:
    """The other blocks of the range that ends with a block, the last one first; none if it was not pruned."""
    block = exit_.parent
    while block is not None and block is not exit_.base:
        yield block
        block = block.parent


def chained(digest: bytes, key: bytes) -> bytes:
    """The digest of a block with these tokens, behind one with this digest."""
    return hashlib.blake2b(digest + key, digest_size=_DIGEST_BYTES).digest()


class RadixTree:
    """Blocks, and the order in which they go. One thread changes it.

    Args:
      block_tokens: page size.
      release: called once with each payload that is given up.
      clock: seconds, monotonic.
      half_life_s: idleness that halves the chance of a block's return.
      cost: what computing a block again takes whose first token is at this position, in any unit.
      max_ghosts: blocks that were given up and are remembered, to say so.
    """

    def __init__(
        self,
        block_tokens: int,
        release: Callable[[Any], None],
        clock: Callable[[], float],
        half_life_s: float = 600.0,
        cost: Callable[[int], float] = lambda start: 1.0,
        max_ghosts: int = 1 << 16,
    ) -> None:
        self.block_tokens = block_tokens
        self.roots: dict[bytes, Block] = {}
        self.num_blocks = 0
        self.blocks_of: collections.Counter[str] = collections.Counter()  # by tenant
        self.num_pages = 0
        self.free_pages = 0  # payloads of blocks that nobody holds: all of them can go
        self.pinned_pages: collections.Counter[str] = collections.Counter()  # by tenant
        self.changes = 0  # grows with every block or row that comes or goes
        self.cuts = 0  # grows whenever a block becomes hollow, or stands for others
        self.counts: collections.Counter[str] = collections.Counter()
        self._release = release
        self._clock = clock
        self._half_life_s = half_life_s
        self._cost = cost
        self._max_ghosts = max_ghosts
        self._ghosts: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._heap: list[tuple[int, float, bytes, int, Block]] = []
        self._serial = 0
        self.on_lost: Callable[[Block, bool], None] = lambda block, below: None
        """Called when a block has lost the rows that its tokens have, or (below) is gone or of another content now."""

    # Structure.

    def root(self, scope: Scope) -> Block:
        """The root of a scope; made if there is none."""
        found = self.roots.get(scope.seed)
        if found is None:
            found = self.roots[scope.seed] = Block(scope, None, b"", scope.seed, 0, pages=())
        return found

    def _add(self, parent: Block, key: bytes, pages: tuple[Any, ...], tainted: bool) -> Block:
        """A new block; its parent must have rows."""
        block = Block(parent.scope, parent, key, chained(parent.digest, key), parent.depth + 1, tainted=tainted)
        block.retention, block.used_s = parent.retention, self._clock()
        parent.children[key] = block
        self._ghosts.pop(block.digest, None)
        self.num_blocks += 1
        self.blocks_of[parent.scope.tenant] += 1
        self._fill(block, pages, parent)
        return block

    def _fill(self, block: Block, pages: tuple[Any, ...], base: Block) -> None:
        """A hollow block gets rows."""
        if block.pages is not None or base.pages is None:
            raise IntegrityError("rows are stored twice, or rest on rows that are not there")
        block.pages, block.base = pages, base
        base.rests += 1
        self._count(block, len(pages))
        self.changes += 1

    def _hollow(self, block: Block) -> None:
        """A block loses its rows, and then those that were only there for its sake."""
        while block.pages is not None:
            base, pages = block.base, block.pages
            if block.rests or base is None:
                raise IntegrityError("rows go that others rest on")
            if block.cut is not None:
                for other in inside(block):
                    other.covers -= 1
            block.pages = block.base = block.cut = None
            base.rests -= 1
            self.on_lost(block, False)
            self._count(block, -len(pages))
            self.changes += 1
            for payload in pages:
                self._release(payload)
            if not base.covers or base.rests:
                return
            self.cuts += 1
            block = base

    def _stand_for(self, block: Block, pages: tuple[Any, ...], base: Block, cut: Cut) -> None:
        """A block with rows gets others: what is left of the whole range from `base` on. The old ones go."""
        before, old = block.base, block.pages
        assert before is not None
        assert old is not None
        if block.cut is not None:
            for other in inside(block):
                other.covers -= 1
        block.pages, block.base, block.cut = pages, base, cut
        base.rests += 1
        before.rests -= 1
        for other in inside(block):
            other.covers += 1
        self.on_lost(block, False)
        self._count(block, len(pages) - len(old))
        self.changes += 1
        self.cuts += 1
        for payload in old:
            self._release(payload)
        self._shed(before)

    def _shed(self, block: Block) -> None:
        """A block loses its rows if a pruned range has them and nothing rests on them any more."""
        if block.covers and not block.rests and block.pages is not None:
            self.cuts += 1
            self._hollow(block)

    def _remove(self, block: Block) -> None:
        """Takes a leaf that nobody holds out of the tree, and hollow ones above it."""
        while block.parent is not None:
            if block.children or block.held or block.rests:
                raise IntegrityError("a block goes that is needed")
            parent, known = block.parent, block.pages is not None
            if known:
                self._hollow(block)
            del parent.children[block.key]
            block.alive, block.entry = False, None
            self.on_lost(block, True)
            self.num_blocks -= 1
            self.blocks_of[block.scope.tenant] -= 1
            self.changes += 1
            if known:
                self._ghosts[block.digest] = None
                if len(self._ghosts) > self._max_ghosts:
                    self._ghosts.popitem(last=False)
            if parent.parent is None and not parent.children:
                self.roots.pop(parent.scope.seed, None)
            if parent.children or parent.held or parent.pages is not None:
                self._offer(parent)
                return
            block = parent

    # Holding.

    def _hold(self, block: Block, refs: int = 0, pins: int = 0) -> None:
        """Adds to the holders of one block."""
        before, pinned = block.held, block.pins > 0
        block.refs += refs
        block.pins += pins
        if block.refs < 0 or block.pins < 0:
            raise IntegrityError("a block was given back more often than it was taken")
        self.free_pages += len(block.pages or ()) * (before - block.held)
        self.pinned_pages[block.scope.tenant] += block.charge * ((block.pins > 0) - pinned)

    def _settle(self, block: Block) -> None:
        """The last block of a path was given back: it may go now, at once if it has no rows."""
        if block.alive and block.parent is not None and block.pages is None and not block.children and not block.held:
            self._remove(block)
        else:
            self._offer(block)

    def _count(self, block: Block, pages: int) -> None:
        self.num_pages += pages
        if not block.held:
            self.free_pages += pages
        if block.pins:
            self.pinned_pages[block.scope.tenant] += block.charge - max(1, len(block.pages or ()) - pages)

    # Order of loss.

    def score(self, block: Block) -> float:
        """Logarithm (base 2) of what keeping a block is worth, up to a sum that is the same for all.

        Worth is the chance of an early return, which halves in `half_life_s` and grows with the leases that have found
        it, x what computing it again costs. Time takes the same from all: the order changes only where a block is used.
        """
        start = (block.depth - 1) * self.block_tokens
        return block.used_s / self._half_life_s + math.log2(1 + block.hits) + math.log2(self._cost(start))

    def value(self, block: Block, now: float) -> float:
        """Chance of an early return x what computing it again costs; comparable with other things that may go."""
        return 2.0 ** max(-1000.0, self.score(block) - now / self._half_life_s)

    def _offer(self, block: Block) -> None:
        """Puts a block that may go on the heap."""
        if block.parent is None or block.children or block.held or not block.alive:
            return
        entry = block.retention, self.score(block), block.digest
        if block.entry == entry:
            return
        block.entry = entry
        self._serial += 1
        heapq.heappush(self._heap, (*entry, self._serial, block))
        if len(self._heap) > 4 * self.num_blocks + _SPARE_ENTRIES:
            self._heap = [e for e in self._heap if self._current(e)]
            heapq.heapify(self._heap)

    def _current(self, entry: tuple[int, float, bytes, int, Block]) -> bool:
        """False, if an entry of the heap is void; it is to be dropped then."""
        block = entry[4]
        if block.entry != entry[:3]:
            return False
        if block.alive and not block.children and not block.held:
            return True
        block.entry = None
        return False

    def next_victim(self) -> Block | None:
        """The block that goes first: of the lowest class the least valuable leaf that nobody holds; ties: by digest."""
        while self._heap and not self._current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][4] if self._heap else None

    def evict(self, pages: int) -> int:
        """Gives up blocks until so many payloads are released, or none is left. Returns how many were."""
        before = self.num_pages
        while before - self.num_pages < pages:
            victim = self.next_victim()
            if victim is None:
                break
            self.give_up(victim)
        return before - self.num_pages

    def give_up(self, victim: Block) -> None:
        """Evicts one block, from `next_victim`."""
        self.counts["evicted_blocks"] += 1
        self._remove(victim)

    def blocks(self) -> Iterator[Block]:
        """All blocks, parents first, without roots."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            block = stack.pop()
            yield block
            stack.extend(block.children.values())

    def check_integrity(self) -> None:
        """Re-adds what blocks hold and what rests on them; raises IntegrityError."""
        blocks = list(self.blocks())
        everything = [*blocks, *self.roots.values()]
        rests: collections.Counter[int] = collections.Counter(id(b.base) for b in blocks if b.base is not None)
        covers: collections.Counter[int] = collections.Counter()
        for block in blocks:
            covers.update(id(other) for other in inside(block) if block.cut is not None)
        offered = {id(entry[4]) for entry in self._heap if entry[4].entry == entry[:3]}
        for block in everything:
            if block.rests != rests[id(block)] or block.covers != covers[id(block)]:
                raise IntegrityError("what rests on a block, or covers it, is miscounted")
            if block.rests and block.pages is None:
                raise IntegrityError("rows rest on a hollow block")
            if block.covers and block.pages is not None and not block.rests:
                raise IntegrityError("a block has rows that nobody can reach")
        for block in blocks:
            parent = block.parent
            assert parent is not None
            if parent.children.get(block.key) is not block or block.depth != parent.depth + 1 or not block.alive:
                raise IntegrityError("a block is not where it belongs")
            if block.digest != chained(parent.digest, block.key) or block.scope is not parent.scope:
                raise IntegrityError("a block is of other tokens than those above it")
            if block.pages is None:
                if block.base is not None or block.cut is not None or not (block.children or block.held):
                    raise IntegrityError("a hollow block is left over")
            elif block.base is None or (block.cut is None) != (block.base is parent and len(block.pages) == 1):
                # A range of one block that keeps its page is no cut: `RadixIndex.cut` does not make it one.
                raise IntegrityError("a block holds other rows than its tokens have")
            if not block.children and not block.held and id(block) not in offered:
                raise IntegrityError("a block that may go is not listed")
            if block.held and not all(b.held for b in up(block)):
                raise IntegrityError("a block is held and one above it is not")
        pages = [(b, len(b.pages or ())) for b in blocks]
        if +self.blocks_of != collections.Counter(b.scope.tenant for b in blocks):
            raise IntegrityError("blocks of a tenant are miscounted")
        if self.num_blocks != len(blocks) or self.num_pages != sum(n for _, n in pages):
            raise IntegrityError("blocks or pages are miscounted")
        if self.free_pages != sum(n for b, n in pages if not b.held):
            raise IntegrityError("what may go is miscounted")
