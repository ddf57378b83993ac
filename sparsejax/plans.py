"""What the scheduler tells a runner to do. Host integers and numpy only.

A runner executes plans strictly in the order given and never blocks: the KV state is donated from program to program,
so submission order is execution order, and a page may be given to a new owner as soon as the plan that stopped using
it has been submitted. Only `Ticket.result` waits.

Row ids: row 0 is the null row that padding reads and writes; requests own rows 1..num_rows.
Table updates: int32 [n, 4] of (layer, head, column, page) for the row they stand with; layer and head are 0 where the
granularity shares them. Page 0 is the null page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from sparsejax.cache.evicted import EvictedPages, ScoreTicket
from sparsejax.geometry import Geometry, Granularity

PHASES = ("chunk", "prompt", "token", "pressure")
"""After which rows may be evicted: see `MaintainRow`."""
PROBE_TOKENS = 64
"""The most tokens of a `ProbeRow`."""


@dataclasses.dataclass(frozen=True)
class SamplingRow:
    """Sampling of one row in one step, as plain numbers. Defaults are greedy.

    `position` is the index of the token to sample within the completion: together with `seed` it is the whole state
    of the random generator. `mask_stops` forbids the row's stop ids (while fewer than `min_tokens` were generated).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    position: int = 0
    has_bias: bool = False
    mask_stops: bool = False
    logprobs: int = -1  # -1: none; else how many alternatives


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """One row of a decode batch: append the row's last token (on the device) and sample the next.

    `token` overrides the device's last token when it is not None (resumed rows, forced tokens).
    """

    row: int
    sampling: SamplingRow
    table_updates: np.ndarray | None = None
    token: int | None = None


@dataclasses.dataclass(frozen=True)
class PrefillRow:
    """One prompt chunk: append `tokens` to the row; if `sample`, sample the first output token from the last one.

    `first` marks the first chunk of a new owner: the device forgets the row's lengths, statistics and token counts.
    """

    row: int
    tokens: np.ndarray  # int32 [chunk]
    first: bool
    sample: bool
    sampling: SamplingRow
    table_updates: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class ReplayRow:
    """One pass over tokens behind a whole prompt, for the sake of what the method sees of it.

    It samples nothing and leaves lengths, positions and token counts as they were: its rows are gone once it has run,
    and the pages that the table updates give them may be somebody else's as soon as this plan was submitted. `index`
    counts the replays of a prompt from 0.
    """

    row: int
    tokens: np.ndarray  # int32 [tokens]
    index: int
    table_updates: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class MaintainRow:
    """Run one maintenance of the row's method, e.g. evict down to `kept_tokens` rows and pack them into new pages.

    Attributes:
      kind: name of the maintenance within the method ("evict").
      phase: "chunk", "prompt" or "token": what was just finished; "pressure" after a token when pages ran out.
      length: rows before, per [layer][head] of the granularity (int32 array of `Geometry.table_shape`).
      kept: rows after, same shape. Heads that keep as many as they have are left as they are.
      new_pages: int32 [layers, heads, columns] of fresh pages that will hold the kept rows of the others, in order; 0
        past the end.
      observed_tokens: tokens processed in this phase (prompt or decode) since it began or since the row's last
        compaction, whichever is later (bounds observation windows).
      asked: None, or the rows that the method keeps, int32 like `kept`: then what is dropped is whole pages of each
        head, `kept` are up to a page more than `asked`, and the dropped rows are packed and go to the host.
    """

    row: int
    kind: str
    phase: str
    length: np.ndarray
    kept: np.ndarray
    new_pages: np.ndarray
    observed_tokens: int
    asked: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class CountRow:
    """Ask the row's method how many rows each head keeps in the compaction that is due. Changes nothing.

    Attributes are those of `MaintainRow`.
    """

    row: int
    phase: str
    length: np.ndarray
    observed_tokens: int


@dataclasses.dataclass(frozen=True)
class ForkRow:
    """Make `target` a copy of `source` as it stands: same lengths, table, statistics.

    `table_updates` gives the whole table of the target; `copies` lists (from page, to page) for pages that can't be
    shared because a later append would write to them.
    """

    source: int
    target: int
    table_updates: np.ndarray
    copies: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class SwappedRow:
    """A row's state on the host: opaque to the scheduler, which owns it and may drop it."""

    payload: Any
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ParkedRow:
    """What a row had beside its pages, while it has no row: opaque, immutable, and no part of the donated state."""

    payload: Any
    nbytes: int


@dataclasses.dataclass(frozen=True)
class UnparkRow:
    """Give a parked conversation a row again: its pages, and all that was processed in it.

    Attributes:
      row: of the new owner, set up already.
      pages: int32 [layers, heads, columns], -1 where a head has fewer.
      lengths: rows held, int32 [layers, heads].
      seen: int32, the tokens processed so far; all count as prompt.
      parked: from `park` or `import_parked`. None for a row that keeps nothing beside its pages (`pure_prefix`): of
        these a row may lie on fewer rows than were seen, where some were pruned.
    """

    row: int
    pages: np.ndarray
    lengths: np.ndarray
    seen: np.ndarray
    parked: ParkedRow | None


@dataclasses.dataclass(frozen=True)
class ProbeRow:
    """Run tokens behind a row for the sake of their queries, and score dropped rows by these.

    Lengths, positions, statistics and token counts stay as they were. The pages that the table updates give the tokens
    may be somebody else's as soon as this plan was submitted.

    Attributes:
      row: with its own pages only.
      tokens: int32 [n], at most PROBE_TOKENS.
      position: of the first token, which need not be the row's next.
      pages: to score.
    """

    row: int
    tokens: np.ndarray
    position: int
    table_updates: np.ndarray | None
    pages: tuple[EvictedPages, ...]


@dataclasses.dataclass(frozen=True)
class LendPages:
    """Copy dropped rows into pages of the pool, which no row has yet: from the device where all are `fresh` there.

    Attributes:
      pages: int32 [layers, heads, columns], -1 where a head has fewer.
      source: to copy from.
      entries: int32 [num_layers, kv_heads, columns], index of each page's content among the entries of `source` laid
        side by side; -1 past the end.
    """

    pages: np.ndarray
    source: tuple[EvictedPages, ...]
    entries: np.ndarray


@dataclasses.dataclass(frozen=True)
class FrontRow:
    """Lent pages come before a row's own, or are taken away again. The row's logical position stays.

    Attributes:
      pages: the whole table from now on, int32 [layers, heads, columns], -1 where a head has fewer.
      lengths: rows in them, int32 [layers, heads].
      lent: of these, rows that come first and are not the row's own, int32 [layers, heads]; 0 once they are away.
      shift: `lent` less what it was before.
    """

    row: int
    pages: np.ndarray
    lengths: np.ndarray
    lent: np.ndarray
    shift: np.ndarray


@dataclasses.dataclass(frozen=True)
class ScoreRow:
    """Run tokens behind some rows for the sake of their queries, and score these rows by them.

    No row takes part, so nothing is left of the tokens. Of methods that keep nothing beside their pages
    (`pure_prefix`).

    Attributes:
      pages: int32 [layers, heads, columns], full pages: all rows that the tokens see beside each other, in their order.
      scratch: int32 [layers, heads, n], pages that no row has, enough for the tokens. They may be somebody else's as
        soon as this plan was submitted.
      tokens: int32 [n], no more than the longest prefill program takes.
      position: of the first token, above those of all rows.
    """

    pages: np.ndarray
    scratch: np.ndarray
    tokens: np.ndarray
    position: int


@dataclasses.dataclass(frozen=True)
class RowScores:
    """Scores by row index, on the device: opaque and immutable."""

    payload: Any


@dataclasses.dataclass(frozen=True)
class PackRows:
    """Copy some rows of full pages to others, with all that is kept of them; what is kept of each page is built anew.

    Attributes:
      source: int32 [layers, heads, n], pages in the order of their rows.
      rows: int32 [k * page_size], ascending: indexes of the rows to copy, the same in all layers and heads.
      target: int32 [layers, heads, k], pages that no row has.
    """

    source: np.ndarray
    rows: np.ndarray
    target: np.ndarray


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Outputs of one step on the host, in the order of the submitted rows.

    Attributes:
      tokens: int32 [n]; -1 for prefill rows that did not sample.
      ok: bool [n]; False where the model produced non-finite logits.
      logprob: float32 [n] of the sampled tokens, or None when no row asked.
      top_ids, top_logprobs: [n, 20], or None.
    """

    tokens: np.ndarray
    ok: np.ndarray
    logprob: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


class Ticket(Protocol):
    """A step under way."""

    def is_ready(self) -> bool:
        """True if `result` would not wait."""
        ...

    def result(self) -> StepResult:
        """Waits for this step's small outputs only."""
        ...


class ArrayTicket(Protocol):
    """An array under way."""

    def is_ready(self) -> bool:
        """True if `result` would not wait."""
        ...

    def result(self) -> np.ndarray:
        """Waits for this array only."""
        ...


class MethodFacts(Protocol):
    """What the host must know of a method: integers only (see `sparsejax.method.Method`, which implements it).

    Row counts are int32 arrays of the granularity's `table_shape`, or of any one shape where only a length matters.
    """

    @property
    def name(self) -> str: ...
    @property
    def granularity(self) -> Granularity: ...
    @property
    def evicts(self) -> bool:
        """False if `kept_after` returns its argument for every phase and length."""
        ...

    @property
    def private_rows(self) -> bool:
        """What is kept beside a stored row goes on changing: rows that choices have in common can't share pages."""
        ...

    @property
    def pure_prefix(self) -> bool:
        """The rows of a prompt are a function of its tokens alone, and nothing is kept beside them."""
        ...

    @property
    def pure_tokens(self) -> bool:
        """So are those of decoded tokens."""
        ...

    @property
    def whole_pages(self) -> bool:
        """Decoded tokens choose pages, so the rows of a page belong together."""
        ...

    @property
    def rollback(self) -> bool:
        """The newest tokens can be taken back exactly, until a compaction: only their own rows know of them."""
        ...

    @property
    def replays_prompts(self) -> bool:
        """First prompts may be replayed; then what is appended to a row later is not compacted behind its prompt."""
        ...

    @property
    def recalls(self) -> bool:
        """Rows that were dropped can be lent back: attention takes stored keys as they are, wherever they lie."""
        ...

    @property
    def chunk_dependent(self) -> bool:
        """Results depend on how a prompt is cut into chunks."""
        ...

    def kept_after(self, phase: str, length: np.ndarray) -> np.ndarray:
        """Rows that stay once `phase` (see `MaintainRow`) is over; equal to `length` if nothing is due."""
        ...

    @property
    def ragged(self) -> bool:
        """There are phases after which the device says how many rows each head keeps."""
        ...

    def most_counted(self, phase: str, length: np.ndarray) -> int:
        """The most rows that a head keeps where the device counts them (see `CountRow`), else 0.

        `kept_after` then gives the mean over heads.
        """
        ...

    def may_evict(self, phase: str, done_tokens: int) -> bool:
        """False if nothing is due after so many tokens of this prompt or this decoding, whatever the lengths."""
        ...

    def peak_rows(
        self, length: np.ndarray, prompt_tokens: int, decode_tokens: int, chunk_tokens: int | None = None
    ) -> np.ndarray:
        """Most rows each layer and head holds while `prompt_tokens` are appended to `length` rows, then decoding.

        With `prompt_tokens` 0 the row is decoding already, and what follows a prompt is behind it. A prompt comes in
        chunks of at most `chunk_tokens`, or of any size if that is None.
        """
        ...

    def replay_lengths(self, prompt_tokens: int) -> tuple[int, ...]:
        """Tokens of each replay that a prompt needs before it is compacted; empty for methods that replay nothing."""
        ...

    def replay_ids(self, prompt: np.ndarray, index: int) -> np.ndarray:
        """int32 token ids of one replay."""
        ...

    def rows_read(self, length: int, geometry: Geometry) -> int:
        """Rows that a decode step at `length` reads, averaged over layers and heads."""
        ...

    def min_final_chunk(self) -> int:
        """Fewest tokens the last prompt chunk must have (1 for methods that carry their state across chunks)."""
        ...


@dataclasses.dataclass(frozen=True)
class RunnerLimits:
    """What a runner can hold and do. Fixed after start-up.

    Attributes:
      geometry: attention shape and page size.
      vocab_size: ids are below this.
      num_rows: rows that can be resident.
      num_sequence_pages: sequence-granular pages of the pool, the null page included.
      decode_buckets: allowed decode batch sizes, ascending; the last one is the largest batch.
      prefill_buckets: allowed (rows, chunk tokens) shapes.
      eos_ids: ids that end a text.
      methods: served methods by name; the first is the default.
      page_bytes: device bytes of one sequence-granular page, 0 where that is not known.
      identity: all else that makes rows comparable, by name: digests of weights and tokenizer, storage, ...
      knobs: of each method, by its name in `methods`.
    """

    geometry: Geometry
    vocab_size: int
    num_rows: int
    num_sequence_pages: int
    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[tuple[int, int], ...]
    eos_ids: tuple[int, ...]
    methods: Mapping[str, MethodFacts]
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    page_bytes: int = 0


class Runner(Protocol):
    """Executes plans on a device (`sparsejax.runner.DeviceRunner`) or from a script (`sparsejax.mock.MockRunner`)."""

    @property
    def limits(self) -> RunnerLimits: ...

    def setup_row(self, row: int, logit_bias: tuple[tuple[int, float], ...], stop_ids: tuple[int, ...]) -> None:
        """Stores a new owner's logit bias and the ids that `mask_stops` forbids. Comes before its first chunk."""
        ...

    def decode(self, method: str, rows: list[DecodeRow]) -> Ticket: ...

    def prefill(self, method: str, rows: list[PrefillRow]) -> Ticket: ...

    def replay(self, method: str, plan: ReplayRow) -> Ticket:
        """Runs one replay. Its result has a single row without a token."""
        ...

    def count(self, method: str, plan: CountRow) -> ArrayTicket:
        """Gives int32 [layers, heads], rows to keep."""
        ...

    def maintain(self, method: str, plan: MaintainRow) -> tuple[EvictedPages, ...]:
        """Compacts a row. Returns the dropped rows where the plan asks for them, on their way to the host."""
        ...

    def probe(self, method: str, plan: ProbeRow) -> ScoreTicket: ...

    def lend(self, method: str, plan: LendPages) -> int:
        """Returns the bytes that were copied."""
        ...

    def front(self, method: str, plan: FrontRow) -> None: ...

    def fork(self, method: str, plan: ForkRow) -> None: ...

    def export_row(self, method: str, row: int, pages: np.ndarray) -> SwappedRow:
        """Copies pages ([layers, heads, columns], -1 where a head has fewer) and the row's state to the host."""
        ...

    def import_row(self, method: str, row: int, pages: np.ndarray, swapped: SwappedRow) -> None:
        """Restores into fresh pages; lengths, statistics and the last token come back too."""
        ...

    def park(self, method: str, row: int, leave: bool = True) -> ParkedRow:
        """Takes a row's state off it: the row may have a new owner, the pages stay whose they are.

        Without `leave` the row goes on, and the state is that of copies of its pages.
        """
        ...

    def trim(self, method: str, parked: ParkedRow, tokens: int) -> ParkedRow:
        """The same row without its newest tokens, which no compaction saw. The caller gives up their pages."""
        ...

    def unpark(self, method: str, plan: UnparkRow) -> None: ...

    def bare(self, method: str, plan: UnparkRow) -> ParkedRow:
        """What `park` would give of a row that keeps nothing beside these pages (`pure_prefix`). Needs no row."""
        ...

    def export_parked(self, method: str, pages: np.ndarray, parked: ParkedRow) -> SwappedRow:
        """Copies the pages and the state of a parked row to the host; where `pages` says -1, a page is left out."""
        ...

    def import_parked(self, method: str, pages: np.ndarray, swapped: SwappedRow) -> ParkedRow:
        """Restores pages from `export_parked` or `export_row` into fresh ones, or drops them where `pages` says 0.

        Needs no row. `pages` has -1 where it had -1 when they were copied. A row that was copied in parts is restored
        part by part, and its state is that of the last one.
        """
        ...

    def export_pages(self, method: str, pages: np.ndarray) -> SwappedRow:
        """Copies pages of the method's granularity, int32 [n], to the host with all that is kept beside their rows."""
        ...

    def import_pages(self, method: str, pages: np.ndarray, swapped: SwappedRow) -> None:
        """Writes what `export_pages` has copied to as many pages, int32 [n], in the same order; 0 leaves one out."""
        ...

    def arrived(self, swapped: SwappedRow) -> bool:
        """The copy is done, and takes no device memory any more."""
        ...

    def pack(self, method: str, swapped: SwappedRow) -> dict[str, np.ndarray]:
        """The pages and the state as arrays of NumPy's own dtypes, for files. Waits for the copy. Any thread."""
        ...

    def unpack(self, method: str, arrays: dict[str, np.ndarray]) -> SwappedRow:
        """The reverse of `pack`, for `import_parked`. Any thread. Raises ValueError: they don't fit this engine."""
        ...

    def copy_pages(self, method: str, copies: tuple[tuple[int, int], ...]) -> None:
        """Copies pages (from, to) of the method's granularity with all that is kept beside their rows."""
        ...

    def score_rows(self, method: str, plan: ScoreRow, scores: RowScores | None) -> RowScores:
        """The largest attention that any query pays to each row in any layer and head, or that it had in `scores`."""
        ...

    def read_scores(self, scores: RowScores) -> ArrayTicket:
        """Gives float32 [max_pages * page_size]: in [0, 1], by index among the rows of a `ScoreRow`."""
        ...

    def pack_rows(self, method: str, plan: PackRows) -> None: ...
