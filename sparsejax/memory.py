"""Rows, pages and promises: who may hold how much.

Every row that is resident reserves the most pages it may hold within its prompt and its decode window, so admitted
work never finds the pool empty. What is reserved but not yet held is a promise; `fits` weighs all promises together,
slab by slab, because a slab cut for one granularity is of no use to another.

Compaction writes kept rows to fresh pages before the old ones are freed. Compactions are submitted one row at a time
and a row's old pages are free as soon as its plan is submitted, so all rows can share one transient reserve: the
largest single compaction among the resident rows. A forked row is the exception: its old pages may outlive its
compaction in another row's table, so it reserves the copies for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from sparsejax.cache.pages import IntegrityError, PagePool, PoolExhaustedError
from sparsejax.geometry import Granularity
from sparsejax.plans import PHASES, MethodFacts, RunnerLimits
from sparsejax.rows import RowPages, Sequence, ceil_div

_MAX_REMEMBERED = 100_000


class Memory:
    """The rows and pages of one runner. Mutated by the engine thread only."""

    def __init__(self, limits: RunnerLimits) -> None:
        self.limits = limits
        self.geometry = limits.geometry
        self.max_chunk = max(chunk for _, chunk in limits.prefill_buckets)
        self.pool = PagePool(limits.geometry, limits.num_sequence_pages)
        self.free_rows = list(range(limits.num_rows, 0, -1))
        self.holders: dict[int, Sequence] = {}  # by row
        self.lent_rows: set[int] = set()  # to prune jobs
        self.shelf: dict[int, RowPages] = {}  # pages that are held without a row, by id of their table
        self.also_held: Callable[[], Iterable[tuple[Granularity, np.ndarray]]] = tuple  # pages that no row has
        self._kept: dict[tuple[str, str, bytes], np.ndarray | None] = {}  # asked for every row in every step

    # What a row needs, from integers alone.

    def kept(self, facts: MethodFacts, phase: str, lengths: np.ndarray) -> np.ndarray | None:
        """Rows that stay after a phase, or None if nothing is due."""
        if not facts.evicts:
            return None
        key = facts.name, phase, lengths.tobytes()
        if key not in self._kept:
            kept = np.broadcast_to(np.asarray(facts.kept_after(phase, lengths), np.int32), lengths.shape)
            if ((kept < 0) | (kept > lengths)).any():
                raise ValueError(f"{facts.name} keeps {kept.max()} of {lengths.max()} rows after {phase!r}")
            if len(self._kept) >= _MAX_REMEMBERED:
                self._kept.clear()
            self._kept[key] = None if (kept == lengths).all() else kept
        return self._kept[key]

    def peak(
        self, facts: MethodFacts, lengths: np.ndarray | None, prompt_tokens: int, decode_tokens: int
    ) -> np.ndarray:
        """Most rows of each layer and head while tokens are appended to `lengths` (None: to nothing)."""
        shape = self.geometry.table_shape(facts.granularity)
        start = np.zeros(shape, np.int32) if lengths is None else lengths
        peak = facts.peak_rows(start, prompt_tokens, decode_tokens, self.max_chunk)
        slack = self._slack(facts) if prompt_tokens else 0
        return np.broadcast_to(np.asarray(peak, np.int32), shape) + slack

    def _slack(self, facts: MethodFacts) -> int:
        """Rows to add to a mean over heads: however they share, they need no more pages than heads of this length."""
        return self.geometry.page_size - 1 if facts.ragged else 0

    def _pages(self, rows: np.ndarray) -> int:
        """Pages that hold so many rows of each layer and head."""
        return int(ceil_div(rows, self.geometry.page_size).sum())

    def _compaction_pages(self, facts: MethodFacts, peak: np.ndarray) -> int:
        """Most fresh pages of one compaction of a row that never holds more than `peak` rows."""
        kept = (self.kept(facts, phase, peak) for phase in PHASES)
        slack = self._slack(facts)
        return max((self._pages(k[k < peak] + slack) for k in kept if k is not None), default=0)

    def _peak_of(self, seq: Sequence, window: int, lengths: np.ndarray | None) -> np.ndarray:
        """Most rows of each layer and head, from `lengths` on, until `window` more tokens are decoded."""
        facts, left = seq.group.facts, max(0, seq.prefill_len - seq.computed)
        held = np.zeros(self.geometry.table_shape(facts.granularity), np.int32) if lengths is None else lengths
        start = held
        if seq.replaying or (seq.prefilled and seq.phase_due == "prompt"):  # it will be compacted before it decodes
            kept = self.kept(facts, "prompt", held)
            start = held if kept is None else kept + self._slack(facts)
        rows = np.maximum(held, self.peak(facts, start, left, window))
        if seq.base and facts.replays_prompts:
            rows = held + left + window  # what is appended to such a row is not compacted behind its prompt
        replays = seq.group.replays[seq.replayed :]
        return np.maximum(rows, held + left + max(replays)) if replays else rows

    def _needs(self, seq: Sequence, window: int, lengths: np.ndarray | None) -> int:
        """Most pages the row holds, from `lengths` on, until `window` more tokens are decoded."""
        pages = seq.pages
        needs = self._pages(self._peak_of(seq, window, lengths))
        if pages is not None:
            # Never less than the next step takes, even if a method understates its peak.
            needs = max(needs, pages.count + (pages.pages_for(1) if seq.prefilled else 0))
            if pages.shared:
                needs += seq.compaction_pages
        return needs

    def pages_alone(
        self, facts: MethodFacts, prompt_tokens: int, max_tokens: int, lengths: np.ndarray | None = None
    ) -> int:
        """Pages that must exist for this request to run, even alone: its peak and one compaction.

        `lengths` are the rows that its chain holds already; then `prompt_tokens` are appended to them.
        """
        peak = self.peak(facts, lengths, prompt_tokens, max_tokens - 1)
        if lengths is not None:
            if facts.replays_prompts:
                peak = lengths + prompt_tokens + max_tokens - 1
            tail = peak.size * (self.geometry.page_size > 1)  # a last page that another chain reads too
            return self._pages(peak) + self._compaction_pages(facts, peak) + tail
        longest = max(facts.replay_lengths(prompt_tokens), default=0)
        held = np.maximum(peak, prompt_tokens + longest) if longest else peak
        return self._pages(held) + self._compaction_pages(facts, peak)

    def most_tokens(self, facts: MethodFacts, prompt_tokens: int, limit: int, lengths: np.ndarray | None = None) -> int:
        """The most tokens, up to `limit`, that a request could generate alone on this pool; 0 if none."""
        capacity = self.pool.capacity(facts.granularity)
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.pages_alone(facts, prompt_tokens, middle, lengths) <= capacity:
                low = middle
            else:
                high = middle - 1
        return low

    # Promises.

    def _promised(self, seq: Sequence | None) -> tuple[dict[Granularity, int], dict[Granularity, int]]:
        """Pages promised to the other rows, and the largest compaction of all; by granularity."""
        promises, compaction = dict.fromkeys(Granularity, 0), dict.fromkeys(Granularity, 0)
        if seq is not None:
            compaction[seq.group.facts.granularity] = seq.compaction_pages
        for other in self.holders.values():
            if other is not seq and other.pages is not None:
                granularity = other.pages.granularity
                promises[granularity] += max(0, other.reserved_pages - other.pages.count)
                compaction[granularity] = max(compaction[granularity], other.compaction_pages)
        return promises, compaction

    def reserve(self, seq: Sequence, window: int, least: int) -> bool:
        """Reserves the largest window of at most `window` and at least `least` tokens that fits, halving it."""
        granularity = seq.group.facts.granularity
        held = seq.pages.count if seq.pages else 0
        lengths = seq.pages.lengths if seq.pages else seq.swapped_lengths
        promises, compaction = self._promised(seq)
        window = min(window, seq.decode_left)
        while True:
            needs = self._needs(seq, window, lengths)
            wanted = {g: promises[g] + compaction[g] for g in Granularity}
            wanted[granularity] += needs - held
            if self.pool.fits(wanted):
                seq.reserved_pages = needs
                seq.window_end = seq.dispatched + window
                return True
            if window <= least:
                return False
            window = max(least, window // 2)

    def missing(self, seq: Sequence, window: int) -> int:
        """Head-pages that must at least come free before `reserve` can promise `window` tokens."""
        facts = seq.group.facts
        self._set_compaction(seq)
        lengths = seq.pages.lengths if seq.pages else seq.swapped_lengths
        promises, compaction = self._promised(seq)
        wanted = {g: promises[g] + compaction[g] for g in Granularity}
        wanted[facts.granularity] += self._needs(seq, min(window, seq.decode_left), lengths)
        wanted[facts.granularity] -= seq.pages.count if seq.pages else 0
        return sum(n * self.geometry.head_pages_per_page(g) for g, n in wanted.items()) - self.pool.free_head_pages

    def _set_compaction(self, seq: Sequence) -> None:
        """Sizes the largest compaction of a choice that has no row."""
        group, facts = seq.group, seq.group.facts
        if seq.base:
            lengths = seq.pages.lengths if seq.pages else seq.swapped_lengths
            peak = self.peak(facts, lengths, max(0, seq.prefill_len - seq.computed), max(0, seq.decode_left))
        else:
            peak = self.peak(facts, None, len(group.prompt), group.max_tokens - 1)
        seq.compaction_pages = self._compaction_pages(facts, peak)

    def tighten(self) -> None:
        """Cuts every decoding row's window down to its next step."""
        for seq in self.holders.values():
            if seq.prefilled and seq.pages is not None:
                seq.window_end = min(seq.window_end, seq.dispatched + 1)
                self.shrink(seq)

    def fits_beside(self, seq: Sequence, pages: int) -> bool:
        """True if a row could be lent so many pages while all promises are kept."""
        granularity = seq.group.facts.granularity
        promises, compaction = self._promised(seq)
        wanted = {g: promises[g] + compaction[g] for g in Granularity}
        wanted[granularity] += max(0, seq.reserved_pages - (seq.pages.count if seq.pages else 0)) + pages
        return self.pool.fits(wanted)

    def must_renew(self, seq: Sequence) -> bool:
        """True if the next decode step is not covered by the reservation."""
        assert seq.pages is not None
        return seq.dispatched >= seq.window_end or seq.pages.count + seq.pages.pages_for(1) > seq.reserved_pages

    def shrink(self, seq: Sequence) -> None:
        """Gives back what the rest of the window does not need (any more)."""
        assert seq.pages is not None
        window = min(max(0, seq.window_end - seq.dispatched), seq.decode_left)
        seq.reserved_pages = min(seq.reserved_pages, self._needs(seq, window, seq.pages.lengths))

    # Rows.

    def admit(self, seq: Sequence, window: int, least: int) -> bool:
        """Gives the choice a row and a reservation, if both can be had. A swapped choice gets its pages too."""
        if not self.free_rows:
            return False
        self._set_compaction(seq)
        if not self.reserve(seq, window, least):
            return False
        if seq.pages is None:
            seq.pages = RowPages(self.pool, seq.group.facts.granularity)
        if seq.swapped_lengths is not None:
            seq.pages.restore(seq.swapped_lengths)
            seq.swapped_lengths = None
        self._seat(seq)
        return True

    def fork(self, source: Sequence, target: Sequence, window: int) -> tuple[tuple[int, int], ...] | None:
        """Makes `target` a second owner of the rows of `source`.

        Returns the page copies to run, or None, with nothing changed, if row or pages can't be had.
        """
        assert source.pages is not None
        if not self.free_rows:
            return None
        # A compaction of either may no longer return the pages they share.
        lost = 0 if source.pages.shared else source.compaction_pages
        source.reserved_pages += lost
        target.computed = source.computed
        target.compaction_pages = source.compaction_pages
        window = min(window, target.decode_left)
        needs = self._needs(target, window, source.pages.lengths) + target.compaction_pages
        promises, compaction = self._promised(target)
        promises[source.group.facts.granularity] += needs - source.pages.num_full
        if not self.pool.fits({g: promises[g] + compaction[g] for g in Granularity}):
            source.reserved_pages -= lost
            target.computed = target.compaction_pages = 0
            return None
        target.pages, copies = source.pages.fork()
        target.reserved_pages = needs
        target.window_end = window
        self._seat(target)
        return copies

    def fork_aside(self, seq: Sequence, share: bool) -> tuple[RowPages, tuple[tuple[int, int], ...]] | None:
        """A second owner of a row's pages, without a row, and the copies to run; None if there is no room."""
        assert seq.pages is not None
        facts = seq.group.facts
        lost = seq.compaction_pages if share and not seq.pages.shared else 0
        seq.reserved_pages += lost
        promises, compaction = self._promised(seq)
        promises[facts.granularity] += max(0, seq.reserved_pages - seq.pages.count)
        promises[facts.granularity] += seq.pages.count - (seq.pages.num_full if share else 0)
        if not self.pool.fits({g: promises[g] + compaction[g] for g in Granularity}):
            seq.reserved_pages -= lost
            return None
        pages, copies = seq.pages.fork(share)
        self.put_aside(pages)
        return pages, copies

    def fork_idle(self, pages: RowPages, share: bool) -> tuple[RowPages, tuple[tuple[int, int], ...]]:
        """A second owner of pages that have no row, without a row too, and the copies to run.

        Raises PoolExhaustedError, with nothing changed, if what is free is promised to others.
        """
        promises, compaction = self._promised(None)
        promises[pages.granularity] += pages.count - (pages.num_full if share else 0)
        if not self.pool.fits({g: promises[g] + compaction[g] for g in Granularity}):
            raise PoolExhaustedError("the pages for a copy are not free, or promised to others")
        return pages.fork(share)

    def fits_aside(self, granularity: Granularity, pages: int) -> bool:
        """True if so many pages can be taken without a row while all promises are kept."""
        promises, compaction = self._promised(None)
        promises[granularity] += pages
        return self.pool.fits({g: promises[g] + compaction[g] for g in Granularity})

    def restore_aside(self, granularity: Granularity, lengths: np.ndarray) -> RowPages | None:
        """Fresh pages without a row, for rows that come back; None, if these are promised to others or not free."""
        promises, compaction = self._promised(None)
        promises[granularity] += self._pages(lengths)
        if not self.pool.fits({g: promises[g] + compaction[g] for g in Granularity}):
            return None
        pages = RowPages(self.pool, granularity)
        pages.restore(lengths)
        self.put_aside(pages)
        return pages

    def _seat(self, seq: Sequence) -> None:
        seq.row = self.free_rows.pop()
        self.holders[seq.row] = seq

    def borrow_row(self) -> int | None:
        """A row that no choice has, until it is given back; None if there is none."""
        if not self.free_rows:
            return None
        row = self.free_rows.pop()
        self.lent_rows.add(row)
        return row

    def return_row(self, row: int) -> None:
        self.lent_rows.remove(row)
        self.free_rows.append(row)

    def put_aside(self, pages: RowPages) -> None:
        """From now on these pages are held without a row."""
        self.shelf[id(pages)] = pages

    def take_up(self, pages: RowPages) -> None:
        """A row holds them, or nobody will."""
        self.shelf.pop(id(pages), None)

    def vacate(self, seq: Sequence) -> None:
        """Gives row and promise back; the pages stay the choice's."""
        assert seq.pages is not None
        pages, seq.pages = seq.pages, None
        self.release(seq)
        seq.pages = pages
        self.put_aside(pages)

    def end_loan(self, seq: Sequence) -> None:
        """Gives lent pages back. Idempotent."""
        if seq.loan is not None:
            seq.loan.release()
            seq.loan = None

    def release(self, seq: Sequence) -> None:
        """Gives row, pages and promise back. Idempotent."""
        self.end_loan(seq)
        if seq.pages is not None:
            self.take_up(seq.pages)
            seq.pages.release()
            seq.pages = None
        if seq.row:
            del self.holders[seq.row]
            self.free_rows.append(seq.row)
            seq.row = 0
        seq.reserved_pages = 0

    def check_integrity(self) -> None:
        """Re-adds rows and pages; raises IntegrityError."""
        rows = sorted([*self.free_rows, *self.holders, *self.lent_rows])
        if rows != list(range(1, self.limits.num_rows + 1)):
            raise IntegrityError(f"rows are lost or owned twice: {rows}")
        tables = [seq.pages for seq in self.holders.values() if seq.pages is not None]
        tables += [seq.loan for seq in self.holders.values() if seq.loan is not None]
        tables += self.shelf.values()
        owners = [(pages.granularity, pages.held()) for pages in tables]
        self.pool.check_integrity([*owners, *self.also_held()])
        for pages in tables:
            if (pages.columns_of(pages.lengths) != pages.columns).any() or pages.count != pages.columns.sum():
                raise IntegrityError("a row holds more or fewer pages than its length needs")


class SwapSpace:
    """The host memory that swapped-out rows may take. Counts bytes; the scheduler owns the payloads."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._page_bytes: dict[str, float] = {}  # by method, as last seen

    def has_room(self, method: str, pages: int) -> bool:
        """True if a row of so many pages is expected to fit."""
        return self.used_bytes + pages * self._page_bytes.get(method, 0.0) < self.capacity_bytes

    def fits(self, nbytes: int) -> bool:
        """True if so many bytes are free."""
        return self.used_bytes + nbytes <= self.capacity_bytes

    def put(self, method: str, pages: int, nbytes: int) -> bool:
        """Takes the bytes of a row, or returns False if they don't fit."""
        self._page_bytes[method] = nbytes / max(1, pages)
        if self.used_bytes + nbytes > self.capacity_bytes:
            return False
        self.used_bytes += nbytes
        return True

    def take(self, nbytes: int) -> None:
        """The row is back, or dropped."""
        self.used_bytes -= nbytes
