"""The rows that a prune job works on, of a chain or of a path that others begin with, and how they are exchanged."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from sparsejax import prune_scores
from sparsejax.cache import row_layout
from sparsejax.cache.chain import Chain, Tier, as_ids, common_prefix
from sparsejax.cache.radix_prune import RangeRows, normal_ranges
from sparsejax.cache.radix_records import Match, StalePlanError
from sparsejax.cache.radix_tree import Cut, Scope
from sparsejax.cache.row_layout import Cuts
from sparsejax.chain_rows import DeviceRows, size_of
from sparsejax.chains import Chains
from sparsejax.errors import ChainMismatchError, PrefixDisabledError, PrefixNotFoundError, PruneError
from sparsejax.geometry import Granularity
from sparsejax.launches import call_runner
from sparsejax.memory import Memory
from sparsejax.plans import ParkedRow, Runner, UnparkRow
from sparsejax.prune_records import OBSERVE, PruneRequest
from sparsejax.radix_cache import RadixCache
from sparsejax.rows import RowPages, ceil_div

_PATIENCE = 256  # steps towards room for a chain's rows in one slice of a job


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """The rows of a text up to the end of the last range, as they were when a job looked at them.

    Attributes:
      scope: whose.
      ranges: [start, stop) tokens, ascending, none touching another of its part.
      parts: of each range, the index of its part.
      pages: int32 [layers, heads, columns], all full.
      cuts: ranges of the text that were pruned before.
      rows: int32, the token of each row.
      plan: rows of each range as others find them, or None where these are not pruned along.
      chain, version: of a chain.
    """

    scope: Scope
    ranges: tuple[tuple[int, int], ...]
    parts: tuple[int, ...]
    pages: np.ndarray
    cuts: Cuts
    rows: np.ndarray
    plan: tuple[RangeRows, ...] | None
    match: Match | None
    chain: Chain | None = None
    version: int = 0

    @property
    def stop(self) -> int:
        """Tokens up to the end of the last range."""
        return self.ranges[-1][1]

    def rows_of(self, i: int) -> tuple[int, int]:
        """Indexes [first, end) of the rows of a range."""
        return row_layout.rows_of(self.cuts, *self.ranges[i])

    def only(self, which: Sequence[int]) -> Target:
        """The same with some of its ranges."""
        return dataclasses.replace(
            self,
            ranges=tuple(self.ranges[i] for i in which),
            parts=tuple(self.parts[i] for i in which),
            plan=None if self.plan is None else tuple(self.plan[i] for i in which),
        )

    def check(self) -> None:
        """Raises StalePlanError if anything has changed since."""
        if self.plan is not None and not all(rows.current for rows in self.plan):
            raise StalePlanError("a path has changed")
        if self.chain is not None and (self.chain.version != self.version or self.chain.busy):
            raise StalePlanError("a chain has changed")


def ranges_of(request: PruneRequest, page_size: int) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """The ranges of a request, ascending, and the part of each. Raises PruneError."""
    tokens = len(request.ids)
    normal_ranges(request.ranges, tokens, page_size)
    found = [
        (pair, part)
        for part, each in enumerate(request.parts)
        for pair in normal_ranges(each.ranges, tokens, page_size)
    ]
    found.sort()
    return tuple(pair for pair, _ in found), tuple(part for _, part in found)


def _cuts(ranges: Sequence[tuple[int, int]]) -> list[Cut]:
    return [Cut(start, stop, np.zeros(0, np.int32)) for start, stop in ranges]


class Targets:
    """Finds and exchanges rows. The engine thread's."""

    def __init__(self, runner: Runner, memory: Memory, chains: Chains, radix: RadixCache) -> None:
        self.runner = runner
        self.memory = memory
        self.chains = chains
        self.radix = radix
        self.page_size = memory.geometry.page_size

    def granularity(self, method: str) -> Granularity:
        return self.runner.limits.methods[method].granularity

    def check(self, request: PruneRequest) -> None:
        """Raises RequestError if a request can't be carried out as things are."""
        request.validate()
        if request.method not in self.runner.limits.methods:
            raise PruneError(f"sparse_method {request.method!r} is not served", param="sparse_method")
        if not self.runner.limits.methods[request.method].pure_prefix:
            text = (
                f"rows of {request.method} are not of the same tokens in all layers and heads: no range can be pruned"
            )
            raise PruneError(text, param="sparse_method")
        ranges, _ = ranges_of(request, self.page_size)
        if request.policy == OBSERVE:
            prune_scores.observed(request, ranges, self.page_size)
        if request.chain_id is not None:
            row_layout.pruned(self.chain_of(request).cuts, _cuts(ranges))
        else:
            reason = self.radix.hindrance(request.method)
            if reason is not None:
                raise PrefixDisabledError(reason)
            self.find(request, None)

    def chain_of(self, request: PruneRequest) -> Chain:
        """The chain of a request. Raises ChainError."""
        chain = self.chains.index.find(request.chain_id or "", request.tenant)
        name, ids = chain.chain_id, as_ids(request.ids)
        if chain.method != request.method:
            text = f"chain {name} has method {chain.method}, not {request.method}"
            raise ChainMismatchError(text, chain_id=name, reason="method")
        same = common_prefix(chain.ledger, ids)
        if same < len(ids):
            text = f"chain {name} has other tokens than the request from token {same} on"
            raise ChainMismatchError(text, chain_id=name, reason="diverged", token=same)
        return chain

    def find(self, request: PruneRequest, chain: Chain | None) -> Target:
        """What a request is about: rows of `chain`, which is idle and on the device, or of a path.

        Raises:
          PruneError, PrefixNotFoundError.
        """
        ranges, parts = ranges_of(request, self.page_size)
        stop, size = ranges[-1][1], self.page_size
        ids = as_ids(request.ids)[:stop]
        scope = self.chains.scope(request.method, request.salt, request.tenant)
        if chain is not None:
            scope = Scope(chain.seed, chain.tenant, chain.method, chain.fingerprint)
        match = self.radix.fetch(scope, ids)
        if chain is None:
            plan = self._plan(scope, ids, ranges)
            if len(match.blocks) * size < stop:
                raise PruneError(f"range [{ranges[-1][0]}, {stop}) ends within one that was pruned before")
            shape = self.memory.geometry.table_shape(self.granularity(request.method))
            pages = np.zeros((*shape, 0), np.int32)
            if match.pages:
                pages = np.stack([page for _, page in match.pages], 1).reshape(*shape, -1)
            cuts = match.lost
            target = Target(scope, ranges, parts, pages, cuts, row_layout.positions(cuts, stop), plan, match)
        else:
            if stop > chain.processed:
                raise PruneError(f"range [{ranges[-1][0]}, {stop}) ends behind the {chain.processed} processed tokens")
            cuts = tuple(cut for cut in chain.cuts if cut.start < stop)
            first, end = row_layout.rows_of(cuts, 0, stop)
            pages = chain.payload.pages.table[..., first // size : end // size]
            rows = row_layout.positions(cuts, stop)[:end]
            plan = self._path_of(scope, ids, ranges, cuts, any(part.keep_tokens for part in request.parts))
            target = Target(scope, ranges, parts, pages, cuts, rows, plan, None, chain, chain.version)
        row_layout.pruned(target.cuts, _cuts(ranges))
        return target

    def _plan(self, scope: Scope, ids: np.ndarray, ranges: Sequence[tuple[int, int]]) -> tuple[RangeRows, ...]:
        index = self.radix.index
        plan = index.plan_cut(scope, ids, ranges)
        if len(plan) < len(ranges):  # some touch each other, and are not one because their budgets are two
            plan = [index.plan_cut(scope, ids, [pair])[0] for pair in ranges]
        return tuple(plan)

    def _path_of(
        self, scope: Scope, ids: np.ndarray, ranges: Sequence[tuple[int, int]], cuts: Cuts, keeps: bool
    ) -> tuple[RangeRows, ...] | None:
        """The rows that others find of a chain's ranges, if these can be pruned as the chain's are."""
        try:
            plan = self._plan(scope, ids, ranges)
        except (PruneError, PrefixNotFoundError):
            return None
        rows = row_layout.positions(cuts, ranges[-1][1])
        for found in plan if keeps else ():
            first, end = row_layout.rows_of(cuts, found.start, found.stop)
            if not np.array_equal(found.positions, rows[first:end]):
                return None
        return plan

    # Exchange.

    def exchange(self, target: Target, pieces: Sequence[np.ndarray], kept: Sequence[np.ndarray], policy: str) -> int:
        """Puts what is left of each range in its place.

        Args:
          target: as it is now.
          pieces: for each range int32 [layers, heads, n], pages of what is left of it. The caller's.
          kept: for each range int32, the tokens of these rows.
          policy: for the record.

        Returns:
          pages of a table that are not held any more.

        Raises:
          StalePlanError, RequestError: nothing was changed.
        """
        target.check()
        cuts = [
            Cut(start, stop, tokens.astype(np.int32), policy)
            for (start, stop), tokens in zip(target.ranges, kept, strict=True)
        ]
        chain, freed = target.chain, 0
        if chain is None:
            return self.cut_path(target, pieces, kept, policy)
        pages, parked = self._without(chain, target, pieces)
        try:
            if target.plan is not None:
                freed = self.cut_path(target, pieces, kept, policy)
        except BaseException:
            pages.release()
            raise
        freed = max(freed, (chain.payload.pages.count - pages.count) // pages.lengths.size)
        self.replace(chain, pages, parked, row_layout.pruned(chain.cuts, cuts), target.ranges[0][0])
        return freed

    def payloads(self, method: str, pages: np.ndarray) -> list[tuple[Granularity, np.ndarray]]:
        """What the index holds of pages [layers, heads, n], with references of its own."""
        granularity = self.granularity(method)
        self.memory.pool.share(granularity, pages.reshape(-1))
        return [(granularity, pages[..., i].reshape(-1).copy()) for i in range(pages.shape[-1])]

    @contextlib.contextmanager
    def freeing(self) -> Iterator[None]:
        """Frees what the index gives up meanwhile, in one call for each granularity."""
        with self.radix.index.collected() as gone:
            try:
                yield
            finally:
                for granularity in {granularity for granularity, _ in gone}:
                    ids = [ids for other, ids in gone if other is granularity]
                    self.memory.pool.free(granularity, np.concatenate(ids))

    def cut_path(self, target: Target, pieces: Sequence[np.ndarray], kept: Sequence[np.ndarray], policy: str) -> int:
        """Exchanges what others find (see `exchange`). Raises StalePlanError."""
        assert target.plan is not None
        payloads = [self.payloads(target.scope.method, piece) for piece in pieces]
        try:
            with self.freeing():
                return self.radix.index.cut(target.plan, list(zip(payloads, kept, strict=True)), policy)
        except BaseException:
            for each in payloads:
                for payload in each:
                    self.memory.pool.free(*payload)
            raise

    def _without(self, chain: Chain, target: Target, pieces: Sequence[np.ndarray]) -> tuple[RowPages, ParkedRow]:
        """A chain's table with other pages for some ranges, and what is parked beside it."""
        old, size = chain.payload.pages, self.page_size
        table, at, parts = old.padded(0), 0, []
        first = target.rows_of(0)[0]
        lost = 0
        for i, piece in enumerate(pieces):
            start, stop = (row // size for row in target.rows_of(i))
            parts += [table[..., at:start], piece]
            lost += stop - start - piece.shape[-1]
            at = stop
        pages = RowPages(self.memory.pool, old.granularity)
        pages.adopt(np.concatenate([*parts, table[..., at:]], -1))
        pages.truncate(int(pages.lengths.max()) - (int(old.lengths.max()) - lost * size))
        pages.unchanged = np.minimum(np.minimum(old.unchanged, first), pages.lengths).astype(np.int32)
        seen = chain.ledger[: chain.processed].astype(np.int32)
        plan = UnparkRow(0, pages.padded(-1), pages.lengths.copy(), seen, None)
        try:
            return pages, call_runner(self.runner.bare, chain.method, plan)
        except BaseException:
            pages.release()
            raise

    def replace(self, chain: Chain, pages: RowPages, parked: ParkedRow, cuts: Cuts, start: int) -> None:
        """An idle chain has other rows from now on: those behind `start` tokens are not what they were."""
        rows: DeviceRows = chain.payload
        tiers, index = self.chains.tiers, self.chains.index
        index.drop_behind(chain, start)
        if rows.lease is not None:
            self.radix.index.release(rows.lease)
            rows.lease = None
        base, rows.copy = rows.copy, None
        tiers.release(rows)
        pages.refresh_shared()
        self.memory.put_aside(pages)
        scope = Scope(chain.seed, chain.tenant, chain.method, chain.fingerprint)
        chain.cuts = cuts
        missing = row_layout.missing(cuts)
        chain.quality = dataclasses.replace(chain.quality, evicted_tokens=missing, pruned_tokens=missing)
        lease = None
        if self.radix.enabled:
            lease = self.radix.lease_of(scope, chain.ledger[: chain.processed], cuts, True)
        new = DeviceRows(chain.method, pages, parked, lease=lease)
        index.place(chain, new, size_of(new), Tier.DEVICE)
        tiers.begin(chain, base)
        tiers.keep(chain)
        self.chains.keep_turn_end(chain)

    def bring(self, chain: Chain) -> bool:
        """One step towards an idle chain being on the device. Returns whether it is there."""
        granularity, tiers = self.granularity(chain.method), self.chains.tiers
        for _ in range(_PATIENCE):
            if tiers.bring(chain):
                return True
            rows = chain.payload
            if rows is None:  # it was given up for room in host memory, as those go that make room for it
                return False
            need = int(ceil_div(rows.lengths, self.page_size).sum())
            if not rows.in_memory or self.memory.fits_aside(granularity, need):
                return False
            wanted = need * self.memory.geometry.head_pages_per_page(granularity)
            # Nothing is given up for what can't be done yet anyway.
            short = wanted > self.memory.pool.free_head_pages + tiers.reclaimable()
            if short or not self.chains.reclaim(keep=chain):
                return False
        return False
