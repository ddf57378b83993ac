"""The Method record: everything the engine wants to know of a sparse method.

A method is a frozen, hashable value with a few functions, so it can be a static argument of jit. It lives in one file
under `sparsejax/methods/`, answers the questions it cares about and leaves the rest at their defaults, which together
are dense attention. Nothing outside that folder knows methods by name.

Two worlds meet here. Device functions are traced: they see arrays. Host functions see integers only, so that the
scheduler knows when to compact and how many pages return without asking the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry, Granularity
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools

Phase = Literal["chunk", "prompt", "token", "pressure"]
"""What was just finished: a prompt chunk that is not the last, the whole prompt, or one decoded token.

"pressure" follows a decoded token when the pool has run out: whoever can give rows back before they are due says so.
"""

Aux = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class AuxSpec:
    """An extra array that a method keeps.

    Attributes:
      per: what has an entry each.
        "page": a head-page, [num_head_pages, *shape]. A reduction of the page's keys, which `on_write` builds and, for
          rows that a compaction packed, builds again.
        "token": a stored row, [num_head_pages, page_size, *shape]. Moves with its row; that of a new row holds anything
          until a hook writes it.
        "row": a layer of a resident request, [num_layers, num_rows + 1, *shape].
        "request": a resident request, [num_rows + 1, *shape]; zeros when a new owner begins.
      shape: the rest of the shape.
      dtype: dtype name; None is the compute dtype.
      counts_rows: of an integer per "row": it counts stored rows from the first one. Rows that are lent to a turn come
        before all others, so their number is added while they are there.
    """

    per: Literal["page", "token", "row", "request"]
    shape: tuple[int, ...]
    dtype: str | None = None
    counts_rows: bool = False


class Written(NamedTuple):
    """Rows that were just written to pages of one layer. `batch` sequences with up to `count` rows each.

    Attributes:
      phase: "chunk" or "token" for new rows, "pack" for rows that a compaction moved to fresh pages.
      rows: int32 [batch] request rows.
      layer: int32 scalar.
      keys: [batch, count, kv_heads, head_dim] as attention will read them back.
      queries: [batch, count, q_heads, head_dim] after RoPE, or None when packing.
      positions: int32 [batch, count] logical positions of new rows (unspecified when packing).
      head_pages: int32 [batch, count, kv_heads]; 0 for rows that are not valid.
      offsets: int32 [batch, count, kv_heads or 1] row index within the page. Offset 0 means the page is new.
      num_valid: int32 [batch]: the first `num_valid` rows are the valid ones.
      implementation: kernel implementation to hand to `pallas_kernels.api`.
      next_positions: int32 [batch], logical position of each request's next token, when packing; else None.
    """

    phase: Literal["chunk", "token", "pack"]
    rows: jax.Array
    layer: jax.Array
    keys: jax.Array
    queries: jax.Array | None
    positions: jax.Array
    head_pages: jax.Array
    offsets: jax.Array
    num_valid: jax.Array
    implementation: str | None = None
    next_positions: jax.Array | None = None


class ObserveContext(NamedTuple):
    """What `observe` sees: queries of one layer and all keys they may read, their own included.

    Attributes:
      phase: "chunk" or "token" for new rows, "replay" for rows that are only there to look at those before them.
      layer: int32 scalar.
      rows: int32 [batch] request rows.
      queries: [batch, count, q_heads, head_dim] after RoPE.
      num_valid: int32 [batch]: the first queries that count.
      positions: int32 [batch, count], logical.
      view: pages; `lengths` include the new rows.
      start: int32 [batch, heads or 1], rows before them.
      pools, names, load_tile: the stored rows, as the operations of `pallas_kernels.api` take them.
      page_aux: arrays per page and per token.
      row_aux: arrays per layer and request.
      part: int32 [batch], which replay this is, from 0; None in other phases.
      implementation: kernel implementation to hand to `pallas_kernels.api`.
    """

    geometry: Geometry
    phase: Literal["chunk", "token", "replay"]
    layer: jax.Array
    rows: jax.Array
    queries: jax.Array
    num_valid: jax.Array
    positions: jax.Array
    view: PageView
    start: jax.Array
    pools: Pools
    names: tuple[str, ...]
    load_tile: LoadTile
    page_aux: Aux
    row_aux: Aux
    part: jax.Array | None = None
    implementation: str | None = None


class DecodedContext(NamedTuple):
    """What `on_decoded` sees of a decode step.

    Attributes:
      rows: int32 [batch] request rows.
      live: bool [batch], False for padding.
      positions: int32 [batch], logical.
      queries: [num_layers, batch, q_heads, head_dim] after RoPE.
      row_aux: arrays per layer and request.
    """

    geometry: Geometry
    rows: jax.Array
    live: jax.Array
    positions: jax.Array
    queries: jax.Array
    row_aux: Aux


class HiddenContext(NamedTuple):
    """What `on_hidden` sees of a decode step after one layer.

    Attributes:
      rows: int32 [batch] request rows.
      live: bool [batch], False for padding.
      tokens: int32 [batch], the tokens that were just processed.
      positions: int32 [batch], their logical positions.
      hidden: [batch, hidden_size], the residual stream.
      request_aux: arrays per request.
    """

    geometry: Geometry
    rows: jax.Array
    live: jax.Array
    tokens: jax.Array
    positions: jax.Array
    hidden: jax.Array
    request_aux: Aux


class PrefillContext(NamedTuple):
    """What `attend_prefill` sees: a chunk of queries [batch, chunk, q_heads, head_dim] and all resident pages.

    Attributes:
      view: pages; `lengths` include the chunk.
      start: int32 [batch, heads or 1]: rows before the chunk. Query i sees rows <= start + i.
      num_new: int32 [batch]: queries that count.
      positions: int32 [batch, chunk], logical.
      carry: what an earlier layer handed on, or None.
      Others as in `ObserveContext`.
    """

    geometry: Geometry
    role: str
    layer: jax.Array
    queries: jax.Array
    view: PageView
    start: jax.Array
    num_new: jax.Array
    positions: jax.Array
    pools: Pools
    names: tuple[str, ...]
    load_tile: LoadTile
    page_aux: Aux
    carry: Any
    implementation: str | None = None


class Selection(NamedTuple):
    """What a decode query reads: `view` with explicit pages and the number of rows to read of them.

    `carry` is handed to the next layer's `select`.
    """

    view: PageView
    carry: Any = None


class SelectContext(NamedTuple):
    """What `select` sees: the query [batch, q_heads, head_dim], all resident pages, page aux and the carry."""

    geometry: Geometry
    role: str
    layer: jax.Array
    query: jax.Array
    view: PageView
    aux: Aux
    carry: Any
    implementation: str | None


class EvictContext(NamedTuple):
    """What `keep_rows` sees of one request in one layer.

    Attributes:
      phase: what was just finished.
      kept: number of rows to keep, static; the most that any layer or head keeps.
      counts: int32 [heads or 1] rows to keep, data: `kept` unless layers or heads differ. What `keep_rows` says past
        them is ignored, but must be valid.
      layer: int32 scalar.
      row: int32 scalar, request row.
      view: the request's pages (batch 1).
      length: int32 scalar, rows before (of the longest head).
      observed: int32 scalar, tokens processed in this phase since it began or since the last compaction.
      next_position: int32 scalar, logical position of the next token.
      pools, names, load_tile: the stored rows, as the operations of `pallas_kernels.api` take them.
      page_aux: arrays per page and per token.
      row_aux: this request's and layer's arrays.
      request_aux: this request's arrays.
      survey: what `survey` found in all layers, or None.
      implementation: kernel implementation to hand to `pallas_kernels.api`.
    """

    geometry: Geometry
    phase: Phase
    kept: int
    counts: jax.Array
    layer: jax.Array
    row: jax.Array
    view: PageView
    length: jax.Array
    observed: jax.Array
    next_position: jax.Array
    pools: Pools
    names: tuple[str, ...]
    load_tile: LoadTile
    page_aux: Aux
    row_aux: Aux
    request_aux: Aux
    survey: jax.Array | None = None
    implementation: str | None = None


def _no_aux(params: Any, geometry: Geometry) -> dict[str, AuxSpec]:
    return {}


def _one_role(params: Any, layer: int) -> str:
    return "dense"


def _keep_all(params: Any, phase: Phase, lengths: np.ndarray) -> np.ndarray:
    return lengths


def _grow(params: Any, lengths: np.ndarray, prompt_tokens: int, decode_tokens: int) -> np.ndarray:
    return lengths + prompt_tokens + decode_tokens


def _not_counted(params: Any, phase: Phase, lengths: np.ndarray) -> int:
    return 0


def _always(params: Any, phase: Phase, done_tokens: int) -> bool:
    return True


def _last_layer(params: Any, num_layers: int) -> int:
    return num_layers - 1


def _read_all(params: Any, length: int, geometry: Geometry) -> float:
    return length


def _no_checks(params: Any, geometry: Geometry) -> list[str]:
    return []


def _no_refusals(params: Any, others: tuple[Method, ...]) -> list[str]:
    return []


@dataclasses.dataclass(frozen=True)
class NoParams:
    """A method without knobs."""


@dataclasses.dataclass(frozen=True)
class Method:
    """One point of the design space. See docs/architecture.md for how the pieces meet.

    Attributes:
      name: name or composition, e.g. "a+b".
      axis: the question it answers: "retention" (which rows stay), "selection" (which rows a query reads), "prefill"
        or "none". A composition has at most one member per axis.
      params: frozen dataclass of knobs; its fields carry `help` and `unit` metadata and are checked on creation.
      summary, paper: one line, and the source.
      members: the composed methods, in order; empty for a single one.
      granularity: what one page allocation covers.
      aux: specs of the extra arrays by name (names are prefixed by the method's own).
      role: which layers behave alike; layers of one role share one trace.
      on_write: device hook, called right after rows were written: update aux. Returns page and row aux.
      observe: device hook, called once new rows can be read: learn from what queries think of rows. Returns page and
        row aux. Composed members that keep the same arrays have the same function here and in `on_write`: it runs once,
        with the params of the retention member.
      attend_token: device hook, attention of decoded tokens to everything, which learns from it: (out [batch, q_heads,
        head_dim], page aux). Asked instead of `observe` in phase "token", but where a member selects.
      on_decoded: device hook, called once at the end of a decode step: learn from the queries of all layers. Returns
        row aux. What needs no more than these costs much less here than in the `on_write` of every layer.
      on_hidden: device hook, called in decode steps after layer `hidden_layer`. Returns request aux.
      hidden_layer: (params, num_layers) -> layer index.
      select: device hook, which pages a decode query may read; None reads everything.
      attend_prefill: device hook, attention of a prompt chunk: (out [batch, chunk, q_heads, head_dim], carry). None is
        causal attention to everything.
      attends_end: `attend_prefill` is asked in the last layer too, where only each row's last token attends: a chunk of
        one query, which isn't all that was stored. Otherwise that token reads everything.
      survey: device hook, called for every layer before rows are chosen in any; `keep_rows` gets what all layers say
        together.
      survey_reduction: how: "sum" or "max".
      keep_rows: device hook, which rows survive a compaction: int32 [1 or kv_heads, kept], ascending.
      keep_count: host, rows that stay after a phase, for an array of lengths over (layers, heads) of the granularity;
        equal to the length where nothing is due. At its most for the longest row.
      counted: host, (params, phase, lengths) -> the most rows that a head may keep, where the device decides how many:
        `keep_count` then says how many it is per head on average, and granularity must be "head". 0 elsewhere.
      count_rows: device hook of methods that count, rows to keep of each head in this layer: int32 [kv_heads], at least
        1 each. Runs before the compaction, whose plan the host makes from what it gives.
      due: host, whether anything may be due after a phase of which so many tokens are done (since the prompt or the
        decoding began); asked before `keep_count`.
      peak: host, most rows held in each layer and head, for an array of lengths, while a prompt is appended and then
        decoded.
      prompt_peak: host, (params, lengths, prompt_tokens, chunk_tokens) -> most rows held while a prompt is appended in
        chunks of at most so many tokens; None where nothing is due between chunks.
      read_count: host, rows that a decode step reads, averaged over layers and heads.
      rotary: where rotary embedding sees a token: at its logical "position", or at the index of its "row". The latter
        needs heads of equal lengths; keys whose rows move up in a compaction are turned back as far.
      page_size: host, page size in tokens that the method insists on, or None.
      check: host, reasons why this model and page size can't be served.
      refuses: host, reasons why it can't be composed with these other members, from what they declare.
      chunk_dependent: results depend on how a prompt is cut into chunks.
      private_rows: what is kept beside a stored row goes on changing, so its page can't be shared by forks.
      replays: host, (params, prompt_tokens) -> tokens of each forward pass that a prompt needs once more behind itself
        before it is compacted, so that `observe` sees what their queries think of its rows (phase "replay"). Their rows
        are dropped again and `on_write` is not told of them. None, or an empty tuple, where nothing is replayed. A
        row is replayed and compacted after its first prompt only: what is appended to it later stays.
      replay_tokens: host, (params, prompt, index) -> int32 token ids of one of them.
      bind: (params, encode) -> params with the token ids that the method needs, where there is a tokenizer.
      pure_prefix: the rows of a prompt are a function of its tokens alone, so requests may share them. Derived: nothing
        is ever evicted or changed, chunks don't matter, and nothing is learned from queries.
      pure_tokens: so are those of decoded tokens: a token attends to everything then, as it would in a prompt chunk.
    """

    name: str
    axis: Literal["none", "retention", "selection", "prefill"]
    params: Any = NoParams()
    summary: str = ""
    paper: str = ""
    members: tuple[Method, ...] = ()
    granularity: Granularity = Granularity.SEQUENCE
    aux: Callable[[Any, Geometry], dict[str, AuxSpec]] = _no_aux
    role: Callable[[Any, int], str] = _one_role
    on_write: Callable[[Any, Geometry, Aux, Aux, Written], tuple[Aux, Aux]] | None = None
    observe: Callable[[Any, ObserveContext], tuple[Aux, Aux]] | None = None
    attend_token: Callable[[Any, ObserveContext], tuple[jax.Array, Aux]] | None = None
    on_decoded: Callable[[Any, DecodedContext], Aux] | None = None
    on_hidden: Callable[[Any, HiddenContext], Aux] | None = None
    hidden_layer: Callable[[Any, int], int] = _last_layer
    attend_prefill: Callable[[Any, PrefillContext], tuple[jax.Array, Any]] | None = None
    attends_end: bool = False
    select: Callable[[Any, SelectContext], Selection] | None = None
    survey: Callable[[Any, EvictContext], jax.Array] | None = None
    survey_reduction: Literal["sum", "max"] = "sum"
    keep_rows: Callable[[Any, EvictContext], jax.Array] | None = None
    keep_count: Callable[[Any, Phase, np.ndarray], np.ndarray] = _keep_all
    counted: Callable[[Any, Phase, np.ndarray], int] = _not_counted
    count_rows: Callable[[Any, EvictContext], jax.Array] | None = None
    due: Callable[[Any, Phase, int], bool] = _always
    peak: Callable[[Any, np.ndarray, int, int], np.ndarray] = _grow
    prompt_peak: Callable[[Any, np.ndarray, int, int], np.ndarray] | None = None
    read_count: Callable[[Any, int, Geometry], float] = _read_all
    rotary: Literal["position", "row"] = "position"
    page_size: Callable[[Any], int | None] = lambda params: None
    check: Callable[[Any, Geometry], list[str]] = _no_checks
    refuses: Callable[[Any, tuple[Method, ...]], list[str]] = _no_refusals
    chunk_dependent: bool = False
    private_rows: bool = False
    replays: Callable[[Any, int], tuple[int, ...]] | None = None
    replay_tokens: Callable[[Any, np.ndarray, int], np.ndarray] | None = None
    bind: Callable[[Any, Callable[[str], list[int]]], Any] | None = None

    @property
    def evicts(self) -> bool:
        return self.keep_rows is not None

    @property
    def pure_prefix(self) -> bool:
        learned = self.observe, self.attend_token, self.on_decoded, self.on_hidden
        changing = self.evicts or self.private_rows or self.chunk_dependent
        return not changing and all(hook is None for hook in learned)

    @property
    def pure_tokens(self) -> bool:
        return self.pure_prefix and self.select is None

    @property
    def whole_pages(self) -> bool:
        """Decoded tokens choose pages, so the rows of a page belong together."""
        return self.select is not None

    @property
    def rollback(self) -> bool:
        """Only their own rows know of the newest tokens."""
        return all(hook is None for hook in (self.on_write, self.observe, self.on_decoded, self.on_hidden))

    @property
    def replays_prompts(self) -> bool:
        return self.replays is not None

    @property
    def recalls(self) -> bool:
        """Dropped rows can be lent back: where a row lies says nothing of where it stands."""
        return self.rotary == "position"

    # The host's view (plans.MethodFacts): integers in, integers out.

    def kept_after(self, phase: str, length: np.ndarray) -> np.ndarray:
        """Rows per layer and head that stay once `phase` is over."""
        now: Any = phase  # one of Phase; the scheduler's side has no such type
        return np.asarray(self.keep_count(self.params, now, np.asarray(length, np.int32)), np.int32)

    @property
    def ragged(self) -> bool:
        """How many rows a head keeps is not always known beforehand."""
        return self.count_rows is not None

    def most_counted(self, phase: str, length: np.ndarray) -> int:
        """The most rows that a head keeps where the device counts them; 0 where `kept_after` says how many."""
        now: Any = phase
        return int(self.counted(self.params, now, np.asarray(length, np.int32)))

    def may_evict(self, phase: str, done_tokens: int) -> bool:
        """False if nothing is due, whatever the lengths, after `done_tokens` of this prompt or decode phase."""
        now: Any = phase
        return self.due(self.params, now, done_tokens)

    def peak_rows(
        self, length: np.ndarray, prompt_tokens: int, decode_tokens: int, chunk_tokens: int | None = None
    ) -> np.ndarray:
        """Most rows each layer and head holds while tokens are appended to `length` rows, prompts in such chunks."""
        length = np.asarray(length, np.int32)
        if chunk_tokens is None or not prompt_tokens or self.prompt_peak is None:
            return np.asarray(self.peak(self.params, length, prompt_tokens, decode_tokens), np.int32)
        prompt = np.minimum(length + prompt_tokens, self.prompt_peak(self.params, length, prompt_tokens, chunk_tokens))
        decoded = self.peak(self.params, self.kept_after("prompt", prompt), 0, decode_tokens)
        return np.maximum(prompt, decoded).astype(np.int32)

    def rows_read(self, length: int, geometry: Geometry) -> int:
        """Rows that a decode step at `length` reads, averaged over layers and heads."""
        return min(length, round(self.read_count(self.params, length, geometry)))

    def replay_lengths(self, prompt_tokens: int) -> tuple[int, ...]:
        """Tokens of each replay of a prompt."""
        return () if self.replays is None else self.replays(self.params, prompt_tokens)

    def replay_ids(self, prompt: np.ndarray, index: int) -> np.ndarray:
        """int32 token ids of one replay of a prompt."""
        assert self.replay_tokens is not None
        return self.replay_tokens(self.params, prompt, index)

    def min_final_chunk(self) -> int:
        """Fewest tokens of the last prompt chunk: 1, since every method carries its statistics across chunks."""
        return 1

    def roles(self, num_layers: int) -> tuple[str, ...]:
        """The role of each layer."""
        return tuple(self.role(self.params, layer) for layer in range(num_layers))

    def aux_specs(self, geometry: Geometry) -> dict[str, AuxSpec]:
        return self.aux(self.params, geometry)


def integer_param(name: str, value: object, low: int) -> None:
    """Raises MethodError unless `value` is an int (not a bool) of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise MethodError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise MethodError(f"{name} must be at least {low}, got {value}")


def choice_param(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises MethodError unless `value` is one of `choices`."""
    if value not in choices:
        raise MethodError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def number_param(name: str, value: object, low: float, high: float) -> None:
    """Raises MethodError unless `value` is a number (not a bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise MethodError(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}")


def knob(default: Any, help: str, unit: str = "") -> Any:
    """A dataclass field with the texts that flags and docs show."""
    return dataclasses.field(default=default, metadata={"help": help, "unit": unit})


def split_rows(rows: int) -> dict[str, Any]:
    """So many rows, as the three knobs that many methods have: an eighth of sinks and a quarter of recent ones.

    No more of both than the defaults.
    """
    sink, recent = min(64, rows // 8), min(512, rows // 4)
    return {"sink_keep_tokens": sink, "decode_keep_tokens": rows - sink - recent, "recent_keep_tokens": recent}
