"""What passes between the radix prefix cache and those who use it: matches, leases, insertions, pins."""

from __future__ import annotations

import dataclasses
from typing import Any

from sparsejax.cache.chain_miss import Miss
from sparsejax.cache.radix_tree import Block, Cut, Scope


class StalePlanError(RuntimeError):
    """What was planned has changed since. Nothing was done."""


@dataclasses.dataclass(frozen=True)
class Match:
    """The longest known beginning of some tokens. Valid while the index's `changes` is `version`.

    Attributes:
      scope: where it was looked for.
      blocks: the path, first block first.
      pages: payloads of its rows, in their order.
      columns: of each block, the index of its own page in `pages`; -1 where it has none.
      lost: pruned ranges of the path, ascending.
      limit: blocks that could have been found.
      missing: tokens of the path that have no rows.
      miss: why fewer blocks were found than could have been, or None.
      version, cuts: of the index.
    """

    scope: Scope
    blocks: tuple[Block, ...] = ()
    pages: tuple[Any, ...] = ()
    columns: tuple[int, ...] = ()
    lost: tuple[Cut, ...] = ()
    limit: int = 0
    missing: int = 0
    miss: Miss | None = None
    version: int = 0
    cuts: int = 0

    @property
    def tainted(self) -> int:
        """Blocks whose rows were computed while others before them were missing."""
        return sum(block.tainted for block in self.blocks)


@dataclasses.dataclass(eq=False)
class Lease:
    """What a request, or a conversation between its turns, has of the tree: a path whose blocks stay.

    Attributes:
      scope: whose.
      blocks: the path.
      columns: of each block, the index of its own page in the row; -1 where the row has none.
      num_columns: pages of the row for all of them.
      tainted: rows are missing before what it computes.
      closed: what it computes is not published any more: its path was pruned under it.
    """

    scope: Scope
    blocks: list[Block]
    columns: list[int]
    num_columns: int
    tainted: bool = False
    closed: bool = False


@dataclasses.dataclass(frozen=True)
class Insertion:
    """Blocks to publish. Valid while the index's `changes` is `version`.

    Attributes:
      lease: of the row that has them.
      keys: of the blocks behind the lease's, those among them that are known.
      known: so many of them are.
      wanted: columns of the row whose pages the index takes; `insert` is given a payload for each.
      revived: how many of these, the first ones, are for hollow blocks.
    """

    lease: Lease
    keys: tuple[bytes, ...] = ()
    known: int = 0
    wanted: tuple[int, ...] = ()
    revived: int = 0
    version: int = 0


@dataclasses.dataclass(eq=False)
class Pin:
    """A path that stays until some second of the clock."""

    blocks: tuple[Block, ...]
    until_s: float
    ended: bool = False
