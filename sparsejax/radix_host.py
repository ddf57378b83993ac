"""Blocks of the prefix cache in host memory: what requests have found before, and the pool has no room for.

A block is found here by its digest behind blocks that are in the pool or here, so it stays only as long as the one
before it is known: whoever goes takes with him what follows him here. A block that comes back to the pool keeps its
copy here, and leaves the pool again for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sparsejax.cache.pages import IntegrityError
from sparsejax.cache.radix_tree import Block, chained
from sparsejax.errors import RequestError
from sparsejax.launches import call_runner
from sparsejax.memory import SwapSpace
from sparsejax.plans import Runner, SwappedRow


@dataclasses.dataclass(eq=False)
class HostPart:
    """Pages that were copied together.

    Attributes:
      method: whose.
      count, width: blocks, and pages of each: those of all layers and heads.
      swapped: the copy.
      blocks: those that still need it, by their place in it.
    """

    method: str
    count: int
    width: int
    swapped: SwappedRow
    blocks: dict[int, HostBlock] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class HostBlock:
    """One block. Attributes as in `radix_tree.Block`; `before` is the digest of the block before it.

    `worth` is its `RadixTree.score` when it left the pool.
    """

    digest: bytes
    before: bytes
    key: bytes
    depth: int
    hits: int
    retention: int
    worth: float
    part: HostPart | None = None
    place: int = 0


class RadixHost:
    """The host tier of the prefix cache. The engine thread's.

    Args:
      runner: copies pages.
      space: host memory, shared with chains, which come first.
      may_leave: another copy may be under way.
      leaving: is told of each.
    """

    def __init__(
        self,
        runner: Runner,
        space: SwapSpace,
        may_leave: Callable[[], bool],
        leaving: Callable[[SwappedRow], None],
    ) -> None:
        self._runner = runner
        self._space = space
        self._may_leave = may_leave
        self._leaving = leaving
        self.blocks: dict[bytes, HostBlock] = {}
        self._after: dict[bytes, dict[bytes, HostBlock]] = {}  # by the digest of the block before, and key
        self._parts: dict[HostPart, None] = {}
        self._going: dict[bytes, HostBlock] = {}  # they leave the pool now
        self._gone: set[bytes] = set()  # these have left it meanwhile, for nowhere
        self._page_bytes: dict[str, float] = {}  # by method, as last seen
        self.used_bytes = 0
        self.stored = self.promoted = 0  # blocks so far

    # Leaving the pool.

    def wants(self, block: Block) -> bool:
        """A block that leaves the pool is worth its memory here: somebody has found it, and it is as computed."""
        if not self._space.capacity_bytes or block.parent is None or block.cut is not None or block.tainted:
            return False
        whole = block.pages is not None and len(block.pages) == 1 and block.base is block.parent
        return whole and (block.hits > 0 or block.retention > 0) and (block.digest in self.blocks or self._may_leave())

    def leave(self, block: Block, worth: float) -> None:
        """A block is about to leave the pool; `store` is called before anything else is submitted."""
        assert block.parent is not None
        known = self.blocks.get(block.digest)
        about = (block.digest, block.parent.digest, block.key, block.depth)
        going = self._going[block.digest] = HostBlock(*about, block.hits, block.retention, worth)
        if known is not None:
            known.hits, known.retention, known.worth = going.hits, going.retention, going.worth

    def store(self, method: str, pages: Sequence[np.ndarray]) -> None:
        """Copies what leaves the pool.

        Args:
          method: whose blocks they are.
          pages: of each block that leaves, in their order, its page ids, int32 [layers * heads].
        """
        # Of a text the last block goes first: the other way round each follows one that is known.
        going, self._going = list(zip(self._going.values(), pages, strict=True))[::-1], {}
        new = [(block, ids) for block, ids in going if block.digest not in self.blocks]
        part = self._copy(method, [ids for _, ids in new]) if new else None
        left, gone, self._gone = {block.digest for block, _ in going}, self._gone, set()
        for place, (block, _) in enumerate(new):
            missing = block.before in gone or (block.before in left and block.before not in self.blocks)
            if part is None or missing:  # there was no room, or nothing that it could follow
                self._drop_below(block.digest)
                continue
            block.part, block.place = part, place
            part.blocks[place] = self.blocks[block.digest] = block
            self._after.setdefault(block.before, {})[block.key] = block
            self.stored += 1
        if part is not None and not part.blocks:
            self._free(part)

    def _copy(self, method: str, pages: Sequence[np.ndarray]) -> HostPart | None:
        ids = np.concatenate(pages).astype(np.int32)
        if not self._has_room(int(len(ids) * self._page_bytes.get(method, 0.0))):
            return None  # no copy is made that would be thrown away
        try:
            swapped = call_runner(self._runner.export_pages, method, ids)
        except RequestError:
            return None
        self._page_bytes[method] = swapped.nbytes / len(ids)
        if not self._has_room(swapped.nbytes):
            return None
        self._space.used_bytes += swapped.nbytes
        self.used_bytes += swapped.nbytes
        self._leaving(swapped)
        part = HostPart(method, len(pages), len(pages[0]), swapped)
        self._parts[part] = None
        return part

    def _has_room(self, nbytes: int) -> bool:
        """Makes room for so many bytes. Gives up nothing if chains have too much of the memory for that."""
        if self._space.used_bytes - self.used_bytes + nbytes > self._space.capacity_bytes:
            return False
        while not self._space.fits(nbytes):
            if not self.give_way():
                return False
        return True

    # Coming back.

    def follows(self, digest: bytes) -> bool:
        """Some block here follows the one with this digest."""
        return digest in self._after

    def known(self, digest: bytes, keys: Sequence[bytes]) -> list[HostBlock]:
        """The blocks with these keys, one after the other, behind the block with a digest."""
        found: list[HostBlock] = []
        for key in keys:
            block = self._after.get(digest, {}).get(key)
            if block is None:
                break
            found.append(block)
            digest = block.digest
        return found

    def load(self, blocks: Sequence[HostBlock], pages: np.ndarray) -> None:
        """Copies blocks to pages, int32 [n, layers * heads]. Raises RequestError."""
        places: dict[HostPart, np.ndarray] = {}
        for block, ids in zip(blocks, pages, strict=True):
            assert block.part is not None
            table = places.setdefault(block.part, np.zeros((block.part.count, block.part.width), np.int32))
            table[block.place] = ids
        for part, table in places.items():
            call_runner(self._runner.import_pages, part.method, table.reshape(-1), part.swapped)
        self.promoted += len(blocks)

    # Going.

    def lost(self, block: Block, below: bool) -> None:
        """A block of the pool has lost its rows, or with `below` is gone or stands for another text."""
        if block.digest in self._going:
            return
        if below and self._going:
            self._gone.add(block.digest)
        found = self.blocks.get(block.digest)
        if found is not None:
            self._drop(found)
        if below:
            self._drop_below(block.digest)

    def _drop_below(self, digest: bytes) -> None:
        stack = [*self._after.get(digest, {}).values()]
        while stack:
            block = stack.pop()
            stack.extend(self._after.get(block.digest, {}).values())
            self._drop(block)

    def _drop(self, block: HostBlock) -> None:
        del self.blocks[block.digest]
        siblings = self._after[block.before]
        del siblings[block.key]
        if not siblings:
            del self._after[block.before]
        part = block.part
        assert part is not None
        del part.blocks[block.place]
        if not part.blocks:
            self._free(part)

    def _free(self, part: HostPart) -> None:
        del self._parts[part]
        self._space.take(part.swapped.nbytes)
        self.used_bytes -= part.swapped.nbytes

    def give_way(self) -> bool:
        """Frees the memory of the copy that is worth least, and of what follows its blocks. False if there is none."""
        if not self._parts:
            return False
        part = min(self._parts, key=_worth)
        for block in list(part.blocks.values()):
            if block.digest in self.blocks:
                self._drop_below(block.digest)
                self._drop(block)
        return True

    # Books.

    def check_integrity(self, there: Iterator[Block]) -> None:
        """Re-adds blocks and bytes; `there` are the blocks of the pool. Raises IntegrityError."""
        device = {block.digest for block in there}
        for digest, block in self.blocks.items():
            if digest != chained(block.before, block.key) or self._after[block.before][block.key] is not block:
                raise IntegrityError("a block in host memory is of other tokens than it is found by")
            if block.depth > 1 and block.before not in device and block.before not in self.blocks:
                raise IntegrityError("a block in host memory follows one that is not known")
            if block.part not in self._parts or block.part.blocks.get(block.place) is not block:
                raise IntegrityError("a block in host memory has no copy")
        if sum(map(len, self._after.values())) != len(self.blocks) or self._going:
            raise IntegrityError("blocks in host memory are lost")
        if sum(len(part.blocks) for part in self._parts) != len(self.blocks) or not all(p.blocks for p in self._parts):
            raise IntegrityError("copies of blocks are left over")
        if sum(part.swapped.nbytes for part in self._parts) != self.used_bytes:
            raise IntegrityError("the host memory of blocks is miscounted")


def _worth(part: HostPart) -> tuple[int, float]:
    """That of its best block."""
    return max((block.retention, block.worth) for block in part.blocks.values())
