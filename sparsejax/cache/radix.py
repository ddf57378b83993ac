"""The radix prefix cache: which rows of earlier requests stand for the beginning of a prompt.

A method whose rows are a function of the tokens before them makes the same pages for the same beginning, so they are
stored once and read by everybody who may see them. This module owns identity and leases, never rows: payloads are
opaque. What changes something is planned first (`match`, `plan_insert`, `plan_cut`) and applied then, or refused with
nothing changed.

A match is a path of whole blocks. Its `pages`, laid side by side, are what a row begins with. There are fewer of them
than blocks where pruning has taken rows; positions go on as if they were there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sparsejax.cache.chain import common_prefix
from sparsejax.cache.chain_miss import COLD, Miss
from sparsejax.cache.pages import IntegrityError
from sparsejax.cache.radix_heal import RadixHealer
from sparsejax.cache.radix_prune import RangeRows, normal_ranges
from sparsejax.cache.radix_records import Insertion, Lease, Match, StalePlanError
from sparsejax.cache.radix_tree import Block, Cut, Scope, chained, up
from sparsejax.errors import PruneError

_MOST_SIBLINGS = 64
"""So many texts that part ways at one place are compared, to say where."""
_MOST_ROOTS = 64


class RadixIndex(RadixHealer):
    """Finds, publishes and prunes.

    Args beyond those of `RadixKeeper`:
      max_blocks: of the whole tree; beyond it old ones go.
    """

    def __init__(self, *args: Any, max_blocks: int = 1 << 20, **options: Any) -> None:
        super().__init__(*args, **options)
        self.max_blocks = max_blocks
        self.leases: dict[Lease, None] = {}

    # Finding.

    def match(self, scope: Scope, ids: np.ndarray, *, exact: bool = False, whole: bool = False) -> Match:
        """The longest beginning whose rows are there. Changes nothing.

        Args:
          scope: where to look.
          ids: uint32 [n].
          exact: only rows that pruning has had no part in.
          whole: all n tokens may be found, not n - 1: a request has to compute one.
        """
        keys = self._keys(ids, whole)
        path: list[Block] = []
        node, best = self.roots.get(scope.seed), 0
        for key in keys if node is not None else ():
            node = node.children.get(key)  # type: ignore[union-attr]
            if node is None or (exact and (node.cut is not None or node.tainted or node.pages is None)):
                break
            path.append(node)
            if node.pages is not None:
                best = len(path)
        miss = None if best == len(keys) else self._why(scope, keys, path, best, ids)
        del path[best:]
        runs: list[Block] = []
        node = path[-1] if path else None
        while node is not None and node.parent is not None:
            runs.append(node)
            node = node.base
        pages: list[Any] = []
        columns = [-1] * best
        for run in reversed(runs):
            if run.cut is None:
                columns[run.depth - 1] = len(pages)
            pages.extend(run.pages or ())
        lost = tuple(run.cut for run in reversed(runs) if run.cut is not None)
        found = tuple(path), tuple(pages), tuple(columns), lost
        missing = (len(path) - len(pages)) * self.block_tokens
        return Match(scope, *found, len(keys), missing, miss, self.changes, self.cuts)

    def outdated(self, match: Match, ids: np.ndarray, *, whole: bool = False) -> bool:
        """Matching the same tokens again may give another result. Cheap, for requests that wait."""
        if match.version == self.changes:
            return False
        if match.cuts != self.cuts or (match.blocks and not match.blocks[-1].alive):
            return True
        if len(match.blocks) == match.limit:
            return False
        node = match.blocks[-1] if match.blocks else self.roots.get(match.scope.seed)
        size, at = self.block_tokens, len(match.blocks)
        key = np.ascontiguousarray(ids[at * size : (at + 1) * size], "<u4").tobytes()
        return node is not None and key in node.children

    def _why(self, scope: Scope, keys: list[bytes], path: list[Block], best: int, ids: np.ndarray) -> Miss:
        """Why a match ends after `best` blocks, of which all in `path` are of these tokens."""
        at = best * self.block_tokens
        node = path[-1] if path else self.roots.get(scope.seed)
        if len(path) > best:
            return Miss("pruned", f"the rows of tokens from {at} on were pruned, and the prompt ends among them", at)
        if node is not None and keys[best] in node.children:
            return Miss("pruned", f"tokens from {at} on have lost rows, and exact ones were asked for", at)
        if chained(node.digest if node is not None else scope.seed, keys[best]) in self._ghosts:
            return Miss("evicted", f"tokens from {at} on were given up for want of room", at)
        if node is not None and node.children:
            wanted = np.frombuffer(keys[best], "<u4")
            others = itertools.islice(node.children, _MOST_SIBLINGS)
            token = at + max(common_prefix(np.frombuffer(other, "<u4"), wanted) for other in others)
            return Miss("diverged", f"no text is known that goes on like this at token {token}", token)
        for root in itertools.islice(reversed(self.roots.values()), _MOST_ROOTS) if not best else ():
            other = root.scope
            if other.tenant == scope.tenant and other.seed != scope.seed and keys[0] in root.children:
                what = "salt" if other.fingerprint == scope.fingerprint else "fingerprint"
                what = "method" if what == "fingerprint" and other.method != scope.method else what
                return Miss(what, f"the beginning is known, but with another {what}")
        return dataclasses.replace(COLD, token=at) if best else COLD

    # Leases.

    def lease(self, match: Match) -> Lease:
        """Keeps what was found until `release`. Raises StalePlanError."""
        if match.version != self.changes:
            raise StalePlanError("a match is older than the tree")
        for block in match.blocks:
            self._hold(block, refs=1)
        tainted = match.missing > 0 or match.tainted > 0
        lease = Lease(match.scope, list(match.blocks), list(match.columns), len(match.pages), tainted)
        self.leases[lease] = None
        return lease

    def note(self, match: Match) -> None:
        """Counts a request that goes on from what was found, which makes its blocks worth more."""
        size, now = self.block_tokens, self._clock()
        self.counts["queries"] += 1
        self.counts["query_tokens"] += match.limit * size
        self.counts["hit_tokens"] += len(match.blocks) * size
        self.counts["hits"] += bool(match.blocks)
        if match.miss is not None:
            self.counts[f"miss_{match.miss.reason}"] += 1
        for block in match.blocks:
            block.hits += 1
            block.used_s = now

    def share(self, lease: Lease) -> Lease:
        """A second lease of the same path, for another row with the same pages."""
        self._check(lease)
        for block in lease.blocks:
            self._hold(block, refs=1)
        other = dataclasses.replace(lease, blocks=list(lease.blocks), columns=list(lease.columns))
        self.leases[other] = None
        return other

    def release(self, lease: Lease, used: bool = True) -> None:
        """Nobody needs a lease any more: its blocks may go. They were `used` until now, or idle since the last `touch`.

        Raises IntegrityError the second time.
        """
        self._check(lease)
        del self.leases[lease]
        now = self._clock()
        for block in reversed(lease.blocks):
            block.used_s = now if used else block.used_s
            self._hold(block, refs=-1)
        if lease.blocks:
            self._settle(lease.blocks[-1])

    def touch(self, lease: Lease) -> None:
        """Its blocks are used now, and may be idle from now on although they are kept."""
        now = self._clock()
        for block in lease.blocks:
            block.used_s = now

    def trim(self, lease: Lease, blocks: int) -> None:
        """A row gives up what it has behind so many blocks. They must not lie in a range that was pruned when it began.

        What is published stays.
        """
        self._check(lease)
        if any(column < 0 for column in lease.columns[blocks:]):
            raise IntegrityError("a row gives up a part of a pruned range")
        while len(lease.blocks) > blocks:
            block = lease.blocks.pop()
            lease.columns.pop()
            lease.num_columns -= 1
            block.used_s = self._clock()
            self._hold(block, refs=-1)
            self._settle(block)

    def _check(self, lease: Lease) -> None:
        if lease not in self.leases:
            raise IntegrityError("a lease was given back before")

    # Publishing.

    def plan_insert(self, lease: Lease, ids: np.ndarray) -> Insertion:
        """What a row has to publish behind its lease. Changes nothing, but closes leases that can't publish any more.

        Args:
          lease: of the row.
          ids: uint32, all tokens that the row has computed, in its pages behind those of the lease.
        """
        self._check(lease)
        keys = () if lease.closed else tuple(self._keys(ids[len(lease.blocks) * self.block_tokens :], True))
        node = lease.blocks[-1] if lease.blocks else self.roots.get(lease.scope.seed)
        at = (len(lease.blocks) - 1) * self.block_tokens
        if lease.blocks and lease.blocks[-1].key != self._keys(ids[at : at + self.block_tokens], True)[0]:
            raise IntegrityError("a row publishes other tokens than it has")
        # Hollow blocks right above new ones get rows again, if this row has them.
        hollow: list[int] = []
        for block in up(node) if node is not None and keys else ():
            if block.pages is not None:
                break
            hollow.insert(0, lease.columns[block.depth - 1])
        known = 0
        for key in keys:
            node = None if node is None else node.children.get(key)
            if node is None:
                break
            if node.pages is None:
                hollow.append(lease.num_columns + known)
            else:
                hollow = []
            known += 1
        new = range(lease.num_columns + known, lease.num_columns + len(keys))
        if not new:
            hollow = []
        if -1 in hollow:
            lease.closed = True
            return Insertion(lease, version=self.changes)
        return Insertion(lease, keys, known, (*hollow, *new), len(hollow), self.changes)

    def insert(self, plan: Insertion, payloads: Sequence[Any]) -> int:
        """Publishes, and lengthens the lease to all that its row has. Returns the number of new blocks.

        Args:
          plan: just made.
          payloads: one for each column of `plan.wanted`, a reference that is the index's from now on.

        Raises:
          StalePlanError: the payloads stay the caller's.
        """
        lease = plan.lease
        self._check(lease)
        if plan.version != self.changes or len(payloads) != len(plan.wanted):
            raise StalePlanError("an insertion is older than the tree, or has other payloads than were asked for")
        node = lease.blocks[-1] if lease.blocks else self.roots.get(lease.scope.seed)
        for key in plan.keys[: plan.known]:
            assert node is not None
            node = node.children[key]
            self._take(lease, node)
            self.counts["duplicate_blocks"] += 1
        keys = plan.keys[plan.known :]
        room = self._make_room(len(keys), next((b for b in up(node) if b.pages is not None), None) if node else None)
        used = plan.revived + room if room else 0
        for payload in payloads[used:]:
            self._release(payload)
        if not room:
            return 0
        node = lease.blocks[-1] if lease.blocks else self.root(lease.scope)
        hollow = list(itertools.islice(up(node), plan.revived))
        for block, payload in zip(reversed(hollow), payloads, strict=False):
            assert block.parent is not None
            self._fill(block, (payload,), block.parent)
            block.tainted = block.tainted or lease.tainted
            self.counts["revived_blocks"] += 1
        for key, payload in zip(keys[:room], payloads[plan.revived : used], strict=True):
            node = self._add(node, key, (payload,), lease.tainted)
            self._take(lease, node)
        self.counts["inserted_blocks"] += room
        return room

    def _take(self, lease: Lease, block: Block) -> None:
        self._hold(block, refs=1)
        lease.blocks.append(block)
        lease.columns.append(lease.num_columns)
        lease.num_columns += 1

    def _make_room(self, blocks: int, base: Block | None) -> int:
        """How many of so many new blocks fit, once old ones have made room. The rows of `base` stay meanwhile."""
        if base is not None:
            base.rests += 1
        while self.num_blocks + blocks > self.max_blocks:
            victim = self.next_victim()
            if victim is None:
                break
            self.give_up(victim)
        room = min(blocks, self.max_blocks - self.num_blocks)
        if base is not None:
            base.rests -= 1
            if not room:
                self._shed(base)
        return room

    # Pruning.

    def plan_cut(self, scope: Scope, ids: np.ndarray, ranges: Iterable[Sequence[int]]) -> list[RangeRows]:
        """The rows of some ranges of a text, which must be known up to the last one. Changes nothing.

        A range that was pruned before may lie in a new one as a whole: what is left of it is pruned once more.

        Args:
          scope, ids: the text, uint32 [n].
          ranges: see `normal_ranges`.

        Raises:
          PruneError: the ranges are wrong, or lie partly in one that was pruned before.
          PrefixNotFoundError: the text is not known up to the last range.
        """
        wanted = normal_ranges(ranges, len(ids), self.block_tokens)
        path = self.path(scope, ids[: wanted[-1][1]])
        return [self._rows_of(path, start, stop) for start, stop in wanted]

    def _rows_of(self, path: tuple[Block, ...], start: int, stop: int) -> RangeRows:
        size = self.block_tokens
        base = path[start // size - 1] if start else self.roots[path[0].scope.seed]
        end = node = path[stop // size - 1]
        runs, positions = [], []
        while node is not None and node.depth > base.depth and node.pages is not None:
            runs.append((node, node.pages, node.base))
            rows = np.arange((node.depth - 1) * size, node.depth * size) if node.cut is None else node.cut.kept
            positions.append(rows.astype(np.int32))
            node = node.base
        if node is not base or base.pages is None:
            raise PruneError(f"range [{start}, {stop}) lies partly in one that was pruned before: take that in whole")
        runs.reverse()
        positions.reverse()
        pages = tuple(page for _, held, _ in runs for page in held)
        return RangeRows(start, stop, base, end, pages, np.concatenate(positions), tuple(runs))

    def cut(self, plan: Sequence[RangeRows], kept: Sequence[tuple[Sequence[Any], np.ndarray]], policy: str = "") -> int:
        """Takes rows from ranges. The text is found as before, also by those who read it now and keep what they have.

        Args:
          plan: from `plan_cut`.
          kept: for each range, payloads of the rows that are left, references that are the index's from now on, and the
            logical positions of these rows, int32, ascending.
          policy: for the record.

        Returns:
          the number of payloads that were given up, less those that were added.

        Raises:
          StalePlanError: a range is not as it was. Nothing was changed, and the payloads stay the caller's.
        """
        for rows, (pages, positions) in zip(plan, kept, strict=True):
            if not rows.current:
                raise StalePlanError(f"the rows of range [{rows.start}, {rows.stop}) have changed")
            some = np.isin(positions, rows.positions).all() and bool((np.diff(positions) > 0).all())
            if not some or len(positions) != len(pages) * self.block_tokens or len(pages) > len(rows.pages):
                raise ValueError("what is kept of a range must be some of its rows, in whole pages and in their order")
        before = self.num_pages
        for rows, (pages, positions) in zip(plan, kept, strict=True):
            if len(pages) == len(rows.pages):
                for payload in pages:
                    self._release(payload)
                continue
            cut = Cut(rows.start, rows.stop, positions.astype(np.int32), policy)
            self._stand_for(rows.exit, tuple(pages), rows.base, cut)
            self.counts["cuts"] += 1
            self.counts["cut_tokens"] += len(rows.positions) - len(positions)
        return before - self.num_pages

    # Books.

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what there is now."""
        return {
            **self.counts,
            "blocks": self.num_blocks,
            "pages": self.num_pages,
            "free_pages": self.free_pages,
            "pinned_pages": self.pinned_pages.total(),
            "leases": len(self.leases),
            "roots": len(self.roots),
        }

    def check_integrity(self, leases: set[Lease] | None = None) -> None:
        """Re-adds everything; `leases` are all that somebody has. Raises IntegrityError."""
        super().check_integrity()
        if leases is not None and leases != self.leases.keys():
            raise IntegrityError("a lease is lost, or has two owners")
        refs: dict[int, int] = {}
        pins: dict[int, int] = {}
        for lease in self.leases:
            for block in lease.blocks:
                refs[id(block)] = refs.get(id(block), 0) + 1
        for _, _, pin in self._pins:
            for block in pin.blocks:
                pins[id(block)] = pins.get(id(block), 0) + 1
        pinned: dict[str, int] = {}
        there = list(self.blocks())
        for block in there:
            if block.refs != refs.pop(id(block), 0) or block.pins != pins.pop(id(block), 0):
                raise IntegrityError("a block has other holders than it counts")
            if block.pins:
                pinned[block.scope.tenant] = pinned.get(block.scope.tenant, 0) + block.charge
        if refs or pins:
            raise IntegrityError("blocks are held that are not there")
        if pinned != {tenant: n for tenant, n in self.pinned_pages.items() if n}:
            raise IntegrityError("pinned pages are miscounted")
        if self.num_blocks > self.max_blocks or len(self._ghosts) > self._max_ghosts:
            raise IntegrityError("there are more blocks than allowed")
