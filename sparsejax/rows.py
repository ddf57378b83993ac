"""The records the scheduler moves around: a request, its choices, and the pages of a row."""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np

from sparsejax.cache import row_layout
from sparsejax.cache.chain import Chain
from sparsejax.cache.chain_miss import Miss
from sparsejax.cache.evicted import EvictedPages, Recalled
from sparsejax.cache.pages import PagePool
from sparsejax.cache.radix_records import Lease, Match
from sparsejax.cache.row_layout import Cuts
from sparsejax.geometry import Granularity
from sparsejax.plans import ArrayTicket, MethodFacts, ParkedRow, SamplingRow, SwappedRow
from sparsejax.request import Request, RequestStats, TokenEvent

_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so the choices of one request get distinct seeds
_MASK64 = (1 << 64) - 1


def ceil_div(a: np.ndarray, b: int) -> np.ndarray:
    """a / b, rounded up."""
    return -(-a // b)


class State(enum.Enum):
    """Where a choice is. One in PREFILL, REPLAY or DECODE owns a row, unless its last token is already under way."""

    WAITING = "waiting"
    PREFILL = "prefill"
    REPLAY = "replay"
    DECODE = "decode"
    SWAPPED = "swapped"
    FINISHED = "finished"


class RowPages:
    """The pages of one row, per [layer][head] of its granularity. Owns one reference of each page in its table.

    Attributes:
      table: int32 [layers, heads, columns]; entries from `columns` on are 0.
      columns: int32 [layers, heads], pages held.
      lengths: int32 [layers, heads], rows (tokens) held.
      count: pages held in all.
      room: tokens that can be appended before any head needs a page.
      shared: another row may hold some of the pages too.
      unchanged: int32 [layers, heads], rows that are as they were when `mark` was last called; 0 before.
    """

    def __init__(self, pool: PagePool, granularity: Granularity) -> None:
        self._pool = pool
        self.granularity = granularity
        self.page_size = pool.geometry.page_size
        shape = pool.geometry.table_shape(granularity)
        self.table = np.zeros((*shape, 0), np.int32)
        self.columns = np.zeros(shape, np.int32)
        self.lengths = np.zeros(shape, np.int32)
        self.count = 0
        self.room = 0
        self.shared = False
        self.unchanged = np.zeros(shape, np.int32)

    @property
    def length(self) -> int:
        """Rows of a head, on average."""
        return self.lengths.item() if self.lengths.size == 1 else round(float(self.lengths.mean()))

    @property
    def head_pages(self) -> int:
        """Head-pages held."""
        return self.count * self._pool.geometry.head_pages_per_page(self.granularity)

    def columns_of(self, lengths: np.ndarray) -> np.ndarray:
        """Pages that hold so many rows in each head."""
        return ceil_div(lengths, self.page_size)

    @property
    def num_full(self) -> int:
        """Pages without room: those that a fork shares."""
        return int((self.lengths // self.page_size).sum())

    def held(self) -> np.ndarray:
        """All page ids, int32 [count]."""
        return self.table[self._mask(self.columns)]

    def padded(self, fill: int) -> np.ndarray:
        """The table, int32 [layers, heads, longest], with `fill` where a head has fewer pages."""
        width = int(self.columns.max())
        return np.where(self._mask(self.columns)[..., :width], self.table[..., :width], np.int32(fill))

    def updates(self) -> np.ndarray:
        """The whole table as int32 [n, 4] of (layer, head, column, page)."""
        layer, head, column = np.nonzero(self._mask(self.columns))
        return np.stack([layer, head, column, self.table[layer, head, column]], 1).astype(np.int32)

    def pages_for(self, tokens: int) -> int:
        """Pages that appending `tokens` takes from the pool."""
        if tokens <= self.room:
            return 0
        return int((self.columns_of(self.lengths + tokens) - self.columns).sum())

    def append(self, tokens: int) -> np.ndarray | None:
        """Makes room for `tokens` more rows in every head. Returns the table updates, or None if there are none.

        Raises PoolExhaustedError, with nothing changed.
        """
        if tokens <= self.room:
            self.lengths += tokens
            self.room -= tokens
            return None
        need = self.columns_of(self.lengths + tokens) - self.columns
        ids = self._pool.alloc(self.granularity, int(need.sum()))
        updates = self._place(need, ids)
        self.lengths += tokens
        self.room = int((self.columns * self.page_size - self.lengths).min())
        return updates

    def truncate(self, tokens: int) -> None:
        """Takes the last `tokens` rows of every head away; pages that hold no other are free at once."""
        lengths = self.lengths - tokens
        columns = self.columns_of(lengths)
        gone = self._mask(self.columns) & ~self._mask(columns)
        ids = self.table[gone]
        self.table[gone] = 0
        self.columns, self.lengths = columns.astype(np.int32), lengths.astype(np.int32)
        self.unchanged = np.minimum(self.unchanged, self.lengths)
        self.count -= len(ids)
        self.room = int((self.columns * self.page_size - self.lengths).min())
        self._pool.free(self.granularity, ids)

    def mark(self) -> None:
        """All rows are somewhere else too."""
        self.unchanged = self.lengths.copy()

    def owns_tail(self, tokens: int) -> bool:
        """The pages that would be last without the newest `tokens` rows are nobody else's: they may be written."""
        lengths = self.lengths - tokens
        column = lengths // self.page_size
        partial = lengths % self.page_size > 0
        layer, head = np.nonzero(partial)
        ids = self.table[layer, head, column[layer, head]]
        return not len(ids) or bool((self._pool.references(self.granularity, ids) == 1).all())

    def fresh_pages(self, kept: np.ndarray) -> int:
        """Pages that a compaction to these lengths takes from the pool."""
        return int(self.columns_of(kept)[kept < self.lengths].sum())

    def compact(self, kept: np.ndarray, submit: Callable[[np.ndarray], None]) -> int:
        """Moves the kept rows to fresh pages: allocates, calls `submit(new pages)`, then frees the old pages.

        Heads that keep all they have keep their pages. The old pages of the others may be reused at once: whatever is
        submitted later also runs later. Returns the pages that this row gave up.
        """
        due = kept < self.lengths
        columns = np.where(due, self.columns_of(kept), 0)
        ids = self._pool.alloc(self.granularity, int(columns.sum()))
        fresh = np.zeros((*columns.shape, int(columns.max())), np.int32)
        fresh[np.arange(fresh.shape[-1]) < columns[..., None]] = ids
        try:
            submit(fresh)
        except BaseException:
            self._pool.free(self.granularity, ids)
            raise
        old, before = self.table[due][self._mask(self.columns)[due]], self.count
        self.columns = np.where(due, columns, self.columns).astype(np.int32)
        table = np.zeros((*columns.shape, int(self.columns.max())), np.int32)
        table[~due] = self.table[..., : table.shape[-1]][~due]
        table[due, : fresh.shape[-1]] = fresh[due]
        self.table, self.lengths = table, np.where(due, kept, self.lengths).astype(np.int32)
        self.unchanged = np.where(due, 0, self.unchanged).astype(np.int32)
        self.count = int(self.columns.sum())
        self.room = int((self.columns * self.page_size - self.lengths).min())
        self.shared = self.shared and not due.all()
        self._pool.free(self.granularity, old)
        return before - self.count

    def fork(self, share: bool = True) -> tuple[RowPages, tuple[tuple[int, int], ...]]:
        """A second owner of the same rows: full pages are shared, partial ones (else all) get (from, to) copies."""
        full = self._mask(self.lengths // self.page_size if share else np.zeros_like(self.lengths))
        apart = self._mask(self.columns) & ~full
        source, shared = self.table[apart], self.table[full]
        fresh = self._pool.alloc(self.granularity, len(source))
        self._pool.share(self.granularity, shared)
        other = RowPages(self._pool, self.granularity)
        other.columns, other.lengths = self.columns.copy(), self.lengths.copy()
        other.table = self.table.copy()
        other.table[apart] = fresh
        other.count = len(shared) + len(fresh)
        other.room = int((other.columns * self.page_size - other.lengths).min())
        self.shared, other.shared = self.shared or share, share
        return other, tuple(zip(source.tolist(), fresh.tolist(), strict=True))

    def restore(self, lengths: np.ndarray) -> None:
        """Takes fresh pages for rows that come back from the host. The row must be empty."""
        columns = self.columns_of(lengths)
        self._place(columns, self._pool.alloc(self.granularity, int(columns.sum())))
        self.lengths = lengths.copy()
        self.room = int((self.columns * self.page_size - self.lengths).min())

    def extend(self, pages: np.ndarray) -> np.ndarray:
        """Takes so many more pages for each head, int32 [layers, heads], all full of rows that come from elsewhere.

        Returns their ids, int32 [layers, heads, most], -1 past the end. The pages before must be full.
        """
        before = self.columns
        self._place(pages, self._pool.alloc(self.granularity, int(pages.sum())))
        self.lengths = (self.lengths + pages * self.page_size).astype(np.int32)
        index = np.arange(int(pages.max()))
        columns = np.minimum(before[..., None] + index, self.table.shape[-1] - 1)
        return np.where(index < pages[..., None], np.take_along_axis(self.table, columns, 2), np.int32(-1))

    def adopt(self, pages: np.ndarray) -> None:
        """Begins with full pages, int32 [layers, heads, n], whose owners keep them too. The row must be empty."""
        self._pool.share(self.granularity, pages)
        self.table = pages.astype(np.int32)
        self.columns[:] = pages.shape[-1]
        self.lengths[:] = pages.shape[-1] * self.page_size
        self.count, self.room, self.shared = pages.size, 0, True

    def refresh_shared(self) -> None:
        """Looks whether another row really holds some of the pages."""
        self.shared = bool((self._pool.references(self.granularity, self.held()) > 1).any())

    def release(self) -> None:
        """Gives every page up. Idempotent."""
        held = self.held()
        self.columns[:] = 0
        self.lengths[:] = 0
        self.unchanged[:] = 0
        self.count = self.room = 0
        self._pool.free(self.granularity, held)

    def _mask(self, columns: np.ndarray) -> np.ndarray:
        return np.arange(self.table.shape[-1]) < columns[..., None]

    def _place(self, need: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Appends `need[layer, head]` pages to each head, `ids` in head order; returns the updates."""
        flat = need.reshape(-1)
        cell = np.repeat(np.arange(flat.size), flat)
        offset = np.arange(len(ids)) - np.repeat(np.cumsum(flat) - flat, flat)
        layer, head = np.divmod(cell, need.shape[1])
        column = self.columns.reshape(-1)[cell] + offset
        self.columns = (self.columns + need).astype(np.int32)
        width, wanted = self.table.shape[-1], int(self.columns.max())
        if wanted > width:
            grown = np.zeros((*need.shape, max(wanted, 2 * width)), np.int32)
            grown[..., :width] = self.table
            self.table = grown
        self.table[layer, head, column] = ids
        self.count += len(ids)
        return np.stack([layer, head, column, ids], 1).astype(np.int32)


class Group:
    """One request in the engine: what its choices share."""

    def __init__(
        self,
        request: Request,
        method: str,
        facts: MethodFacts,
        max_tokens: int,
        eos_ids: frozenset[int],
        seed: int,
        on_event: Callable[[TokenEvent], None],
    ) -> None:
        params = request.params
        self.request = request
        self.method = method
        self.facts = facts
        self.max_tokens = max_tokens
        self.on_event = on_event
        self.prompt = np.asarray(request.prompt_ids, np.int32)
        self.eos_ids = frozenset() if params.ignore_eos else eos_ids
        self.stop_ids = frozenset(params.stop_token_ids)
        self.min_final_chunk = max(1, facts.min_final_chunk())
        self.replays = facts.replay_lengths(len(self.prompt))
        # The choices part ways before their common last chunk, which each runs itself to sample with its own seed.
        shared = params.n > 1 and not facts.private_rows
        self.fork_at = max(0, len(self.prompt) - self.min_final_chunk) if shared else 0
        self.sampling = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "has_bias": bool(params.logit_bias),
            "logprobs": -1 if params.logprobs is None else params.logprobs,
        }
        self.choices = [Sequence(self, i, (seed + i * _SEED_STEP) & _MASK64) for i in range(params.n)]
        if self.fork_at:
            for choice in self.choices[1:]:
                choice.leader = self.choices[0]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def started(self) -> bool:
        """Some choice was admitted at least once."""
        return any(choice.admitted_s is not None for choice in self.choices)

    @property
    def finished(self) -> bool:
        return all(choice.state is State.FINISHED for choice in self.choices)

    @property
    def end_stop_ids(self) -> tuple[int, ...]:
        """Ids that end a choice, and that are masked before `min_tokens`."""
        return tuple(sorted(self.eos_ids | self.stop_ids))


class Sequence:
    """One choice of a request: a token history and how far the device has got with it.

    Attributes:
      output: collected (emitted) tokens; only ever appended to.
      computed: tokens of the history whose KV was submitted.
      replayed: replays that were submitted, of those in `Group.replays`.
      dispatched: output tokens whose sampling was submitted; those beyond `output` are in flight.
      prefill_len: tokens that go through prompt chunks: the prompt, or prompt and output after a rebuild.
      phase_due: maintenance phase that was reached but not yet carried out.
      counting: the counts under way of the compaction that is due.
      counts: its rows to keep in each layer and head, once they are known.
      observed_from: `computed` when the phase (prompt or decode) began or the row was last compacted.
      leader: the choice from which this one will fork, while it waits for that.
      reserved_pages: most pages the row may hold within its prompt and decode window; held ones included.
      window_end: the reservation covers decoding up to this many dispatched tokens.
      compaction_pages: most fresh pages that one compaction of this row needs.
      served_s: when the choice last got prefill work, or began to wait.
      chain, chain_status, chain_reason: the conversation that it continues, and how.
      chain_miss, diverged_at, restored_from, retained_tokens: more of the same (see `ChainReport`).
      kept_at: where the last checkpoint was made.
      checkpoint_at: where a chunk of its prompt must end because a checkpoint is kept there; 0 for nowhere.
      base: tokens of the prompt that were processed in earlier turns.
      begun: the chain's rows are the choice's own, if it has a chain.
      old_ledger: its tokens before the turn.
      attached: tokens of the prompt whose rows it found in the radix cache when it last got a row.
      lease, prefix_match, unconfirmed: more of that (see `radix_cache`): blocks that stay for it, what was found until
        it has its row, and the tokens up to the end of each prompt chunk under way, by iteration.
      promoted: what host memory had of its prompt was brought back, or there was no room for it.
      prefix_known, prefix_miss: what was last found while it waited, and why not more in the end.
      cuts: ranges of its tokens whose rows were pruned.
      tainted: it has rows that were computed while others were missing, or will have.
      parked: its state, once all steps of a chain's turn are submitted and it has left its row.
      evicted: rows of the chain that compactions have dropped, in host memory.
      recall, loan: which of them the turn gets back, and the pages where these are (see `recall`).
    """

    def __init__(self, group: Group, index: int, seed: int) -> None:
        self.group = group
        self.index = index
        self.seed = seed
        self.state = State.WAITING
        self.output: list[int] = []
        self.prefill_len = len(group.prompt)
        self.computed = 0
        self.replayed = 0
        self.dispatched = 0
        self.phase_due: str | None = None
        self.counting: ArrayTicket | None = None
        self.counts: np.ndarray | None = None
        self.observed_from = 0
        self.leader: Sequence | None = None
        self.row = 0  # 0: none
        self.pages: RowPages | None = None
        self.swapped: SwappedRow | None = None
        self.swapped_lengths: np.ndarray | None = None
        self.reserved_pages = 0
        self.window_end = 0
        self.compaction_pages = 0
        self.preemptions = 0
        self.rebuilt = False
        self.served_s = group.request.arrival_s
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.chain: Chain | None = None
        self.chain_status = ""
        self.chain_reason: str | None = None
        self.chain_miss: str | None = None
        self.diverged_at: int | None = None
        self.restored_from: str | None = None
        self.retained_tokens = 0
        self.chain_told: tuple[str, int] = "", 0  # status and base that the client was told
        self.base = 0
        self.checkpoint_at = self.kept_at = 0
        self.begun = False
        self.old_ledger = np.zeros(0, np.uint32)
        self.attached = 0
        self.lease: Lease | None = None
        self.prefix_match: Match | None = None
        self.prefix_known: Match | None = None
        self.promoted = False
        self.prefix_miss: Miss | None = None
        self.unconfirmed: dict[int, int] = {}
        self.cuts: Cuts = ()
        self.tainted = False
        self.parked: ParkedRow | None = None
        self.evicted: tuple[EvictedPages, ...] = ()
        self.recall: Recalled | None = None
        self.loan: RowPages | None = None
        self.resident_tokens = 0  # as last known: kept for the stats when the pages are gone
        self.read_tokens = 0

    @property
    def reused(self) -> int:
        """Tokens of the prompt that were not computed in this turn."""
        return max(self.base, self.attached)

    @property
    def resident_prefix(self) -> int:
        """Of these, those that had rows when the choice began, largest over layers and heads."""
        if self.base:
            return min(self.base, self.retained_tokens)
        return self.reused - row_layout.missing(self.cuts)

    @property
    def degraded_tokens(self) -> int:
        """Of these, those from the first pruned range on; all of them where it isn't known where that was."""
        return self.reused - self.cuts[0].start if self.cuts else self.reused if self.tainted else 0

    @property
    def decode_left(self) -> int:
        """Tokens that decode steps will still append: the last sampled one never is."""
        end = len(self.group.prompt) + self.group.max_tokens - 1
        return end - max(self.computed, self.prefill_len)

    @property
    def prefilled(self) -> bool:
        """The final prompt chunk was submitted."""
        return self.computed >= self.prefill_len

    @property
    def replaying(self) -> bool:
        """Replays of the prompt are left before it can be compacted and the first token decoded."""
        return self.prefilled and self.replayed < len(self.group.replays)

    @property
    def exhausted(self) -> bool:
        """Every token the request may have is under way."""
        return self.dispatched >= self.group.max_tokens

    @property
    def unseen(self) -> bool:
        """Of a chain: some processed token was not collected yet, so the turn may end before it."""
        return self.begun and self.computed > len(self.group.prompt) + len(self.output)

    @property
    def awaits_scores(self) -> bool:
        """Its prompt does not go on before it is known which dropped rows it gets back."""
        return self.recall is not None and self.recall.ticket is not None

    def append(self, tokens: int) -> np.ndarray | None:
        """Makes room for more rows: updates of the row's table, in which lent pages come first, or None."""
        assert self.pages is not None
        updates = self.pages.append(tokens)
        if updates is not None and self.loan is not None:
            updates[:, 2] += self.loan.columns[updates[:, 0], updates[:, 1]]
        return updates

    @property
    def chunk_end(self) -> int:
        """Where prefill must stop next: the fork point while other choices wait for it, else the end."""
        if self.computed < self.checkpoint_at:
            return self.checkpoint_at
        forking = self.computed < self.group.fork_at and any(c.leader is self for c in self.group.choices)
        return self.group.fork_at if forking else self.prefill_len

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """History tokens [start, stop), int32."""
        prompt = self.group.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        return np.concatenate([prompt, np.asarray(self.output, np.int32)])[start:stop]

    @property
    def first_position(self) -> int:
        """Position within the completion of the token that the final prompt chunk samples."""
        return self.prefill_len - len(self.group.prompt)

    def sampling_row(self, position: int) -> SamplingRow:
        """How to sample the token at this position of the completion."""
        masked = position < self.group.request.params.min_tokens
        return SamplingRow(seed=self.seed, position=position, mask_stops=masked, **self.group.sampling)

    def chunk_tokens(self, limit: int) -> int:
        """Tokens of the next chunk if at most `limit` fit: the final chunk is never shorter than the method's minimum.

        0 if the method needs a longer chunk than `limit`.
        """
        left, minimum = self.prefill_len - self.computed, self.group.min_final_chunk
        tokens = min(self.chunk_end - self.computed, limit)
        if 0 < left - tokens < minimum:
            tokens = min(tokens, left - minimum)
        return max(0, tokens)

    def stats(self, now: float) -> RequestStats:
        arrival, miss = self.group.request.arrival_s, self.prefix_miss
        why = (self.chain_miss, self.chain_reason, self.diverged_at)
        if self.chain is None and miss is not None:
            why = miss.reason, miss.text, miss.token if miss.reason == "diverged" else None
        admitted = now if self.admitted_s is None else self.admitted_s
        first = now if self.first_token_s is None else self.first_token_s
        return RequestStats(
            prompt_tokens=len(self.group.prompt),
            cached_tokens=self.reused,
            resident_prefix_tokens=self.resident_prefix,
            degraded_tokens=self.degraded_tokens,
            completion_tokens=len(self.output),
            queue_s=admitted - arrival,
            prefill_s=first - admitted,
            decode_s=now - first,
            ttft_s=first - arrival,
            seen_tokens=self.computed,
            resident_tokens=self.resident_tokens,
            read_tokens=self.read_tokens,
            preemptions=self.preemptions,
            rebuilt=self.rebuilt,
            miss=why[0],
            miss_reason=why[1],
            diverged_at=why[2],
        )
