"""A runner without a model: tokens come from a script, and every plan is checked against the contract.

The mock stores what a device would store, one number per row of each head-page, and reads everything back before each
step. So it notices pages that were freed or given to somebody else, wrong tables or lengths, appends to shared pages
and rows that act before they were set up. Server and scheduler tests run on it in milliseconds.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from sparsejax.cache.evicted import EvictedPages, PageScores
from sparsejax.errors import RequestError
from sparsejax.geometry import Geometry, Granularity
from sparsejax.mock_prune import MockPrune
from sparsejax.mock_recall import MockRecall
from sparsejax.mock_stamps import mix, next_stamp, positions_of
from sparsejax.plans import (
    CountRow,
    DecodeRow,
    ForkRow,
    FrontRow,
    LendPages,
    MaintainRow,
    MethodFacts,
    PackRows,
    ParkedRow,
    PrefillRow,
    ProbeRow,
    ReplayRow,
    RowScores,
    RunnerLimits,
    SamplingRow,
    ScoreRow,
    StepResult,
    SwappedRow,
    UnparkRow,
)
from sparsejax.rows import ceil_div

T = TypeVar("T")

Script = Callable[[Sequence[int], int, int], int]
"""(token history, index of the next token within the completion, seed) -> token."""

BOS, EOS = 256, 257
VOCAB_SIZE = 258
_MASK = (1 << 64) - 1
_LETTERS = b"abcdefghijklmnopqrstuvwxyz     "


class ContractError(AssertionError):
    """A plan broke the contract of `sparsejax.plans`."""


def hash_script(history: Sequence[int], position: int, seed: int) -> int:
    """A letter or a space that depends on the whole history and the seed."""
    state = mix(seed, position, len(history), *history)
    return _LETTERS[state % len(_LETTERS)]


def echo_script(history: Sequence[int], position: int, seed: int) -> int:
    """Repeats the history from its start."""
    return history[position]


SCRIPTS: dict[str, Script] = {"hash": hash_script, "echo": echo_script}


@dataclasses.dataclass(frozen=True)
class MockMethod:
    """Integers of a retention method.

    Attributes:
      name: under which it is served.
      granularity: what one page allocation covers.
      prompt_budget: rows kept after the prompt, or None for all.
      window: rows kept by evictions after chunks and tokens, or None.
      interval: rows above `window` at which such an eviction is due.
      layer_step: each further layer keeps so many rows fewer (at least one).
      yields: rows go back to `window` before they are due if the pool runs out.
      final_chunk: fewest tokens of the last prompt chunk.
      replay_chunk: prompt tokens of one replay, behind its first token, or None for no replays.
      ragged: heads share the prompt budgets of their layer as the device says.
      rollback: nothing but their own rows knows of the newest tokens.
      recalls: dropped rows can be lent back.
      selects: decoded tokens attend to a part of the rows.
    """

    name: str = "dense"
    granularity: Granularity = Granularity.SEQUENCE
    prompt_budget: int | None = None
    window: int | None = None
    interval: int = 4
    layer_step: int = 0
    yields: bool = False
    final_chunk: int = 1
    replay_chunk: int | None = None
    private_rows: bool = False
    chunk_dependent: bool = False
    ragged: bool = False
    rollback: bool = True
    recalls: bool = True
    selects: bool = False

    @property
    def pure_prefix(self) -> bool:
        return not (self.evicts or self.private_rows or self.chunk_dependent)

    @property
    def pure_tokens(self) -> bool:
        return self.pure_prefix and not self.selects

    @property
    def whole_pages(self) -> bool:
        return self.selects

    @property
    def replays_prompts(self) -> bool:
        return self.replay_chunk is not None

    @property
    def evicts(self) -> bool:
        return self.prompt_budget is not None or self.window is not None

    def kept_after(self, phase: str, length: np.ndarray) -> np.ndarray:
        kept = np.array(length, np.int32)
        layers = np.arange(kept.shape[0], dtype=np.int32)[:, None]
        if phase == "prompt" and self.prompt_budget is not None:
            kept = np.minimum(kept, np.maximum(1, self.prompt_budget - layers * self.layer_step))
        elif phase == "prompt" or self.window is None or (phase == "pressure" and not self.yields):
            return kept
        elif int(kept.max()) >= self.window + (0 if phase == "pressure" else self.interval):
            kept = np.minimum(kept, np.maximum(1, self.window - layers * self.layer_step))
        return kept

    def most_counted(self, phase: str, length: np.ndarray) -> int:
        counted = self.ragged and self.prompt_budget is not None and phase == "prompt"
        return min(2 * (self.prompt_budget or 0), int(length.max())) if counted else 0

    def may_evict(self, phase: str, done_tokens: int) -> bool:
        return True

    def peak_rows(
        self, length: np.ndarray, prompt_tokens: int, decode_tokens: int, chunk_tokens: int | None = None
    ) -> np.ndarray:
        # Between chunks of unknown size nothing is promised to go: the whole prompt may come in one.
        peak = decoded = length + prompt_tokens
        if self.window is not None and self.prompt_budget is None and prompt_tokens and chunk_tokens is not None:
            due = int(length.max()) if length.size else 0
            peak = decoded = np.minimum(peak, max(due, self.window + self.interval - 1) + chunk_tokens)
        if prompt_tokens and self.prompt_budget is not None:
            decoded = np.minimum(decoded, self.prompt_budget)
        decoded = decoded + decode_tokens
        if self.window is not None:
            decoded = np.minimum(decoded, np.maximum(peak, self.window + self.interval))
        return np.maximum(peak, decoded)

    def replay_lengths(self, prompt_tokens: int) -> tuple[int, ...]:
        if self.replay_chunk is None or self.prompt_budget is None or prompt_tokens <= self.prompt_budget:
            return ()
        starts = range(0, prompt_tokens, self.replay_chunk)
        return tuple(1 + min(self.replay_chunk, prompt_tokens - start) for start in starts)

    def replay_ids(self, prompt: np.ndarray, index: int) -> np.ndarray:
        assert self.replay_chunk is not None
        start = index * self.replay_chunk
        return np.concatenate([prompt[:1], prompt[start : start + self.replay_chunk]])

    def rows_read(self, length: int, geometry: Geometry) -> int:
        return length

    def min_final_chunk(self) -> int:
        return self.final_chunk


METHODS = (
    MockMethod("dense"),
    MockMethod("window", window=24, interval=8),
    MockMethod("prompt", Granularity.LAYER, prompt_budget=16),
    MockMethod("pyramid", Granularity.LAYER, prompt_budget=20, window=32, interval=8, layer_step=3),
    MockMethod("heads", Granularity.HEAD, prompt_budget=12, final_chunk=4),
    MockMethod("replay", Granularity.LAYER, prompt_budget=14, replay_chunk=7),
    MockMethod("ragged", Granularity.HEAD, prompt_budget=11, replay_chunk=9, ragged=True),
)
"""Keep all, a window, prompt eviction per layer, uneven layers, per-head pages with a long last chunk, replays, heads
that keep different numbers."""


def _knobs(method: MethodFacts) -> dict[str, str]:
    fields = dataclasses.asdict(method) if isinstance(method, MockMethod) else {}
    return {name: str(value) for name, value in fields.items()}


@dataclasses.dataclass
class _Row:
    """What the device knows of a row."""

    granularity: Granularity
    method: str
    history: list[int]
    stamps: list[list[np.ndarray]]  # per [layer][head of the granularity]: what each resident row should hold
    table: np.ndarray  # int32 [layers, heads, columns]
    last_token: int | None = None
    last_stamp: int = 0
    prompt_end: int = 0  # tokens processed when the prompt ended
    compacted_at: int = 0  # tokens processed at the last compaction
    replayed: int = 0
    counted: np.ndarray | None = None  # rows of the compaction that is due
    resumed: bool = False  # its first prompt was replayed and compacted before it was parked
    context: int | None = None  # sum of its stamps, where they are not those of the whole text
    lent: np.ndarray | None = None  # rows before its own that are lent, [layers, heads]
    loan: dict[tuple[int, int], np.ndarray] | None = None  # what they are, by layer and head: [parts, rows]

    def copy(self) -> _Row:
        stamps = [[s.copy() for s in layer] for layer in self.stamps]
        return _Row(
            self.granularity,
            self.method,
            list(self.history),
            stamps,
            self.table.copy(),
            self.last_token,
            self.last_stamp,
            self.prompt_end,
            self.compacted_at,
            self.replayed,
            self.counted,
            self.resumed,
            self.context,
        )


class MockTicket(Generic[T]):
    """A result that is there at once, after a delay, or when the runner is released."""

    def __init__(self, result: T | Exception, ready_s: float, gate: threading.Event, runner: MockRunner) -> None:
        self._result, self._ready_s, self._gate, self._runner = result, ready_s, gate, runner
        self.collected = False

    def is_ready(self) -> bool:
        return self._gate.is_set() and self._runner.clock() >= self._ready_s

    def result(self) -> T:
        if self.collected:
            raise ContractError("a ticket was collected twice")
        self._gate.wait()
        self._runner.wait_until(self._ready_s)
        self.collected = True
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class MockRunner:
    """Implements `sparsejax.plans.Runner` from a script.

    Args:
      script: "hash" (letters from a hash of everything before), "echo", or a function.
      methods: served methods, the first is the default. Defaults to one of each kind.
      eos_after: the token at this index of each completion is end-of-sequence, if it may be.
      step_s, token_s: device time of one program and of each of its tokens.
      verify: read back and compare all stored rows in every step.
    """

    def __init__(
        self,
        *,
        script: str | Script = "hash",
        methods: Sequence[MethodFacts] = METHODS,
        num_layers: int = 2,
        num_kv_heads: int = 2,
        page_size: int = 4,
        max_model_len: int = 4096,
        num_rows: int = 8,
        num_sequence_pages: int = 2049,
        decode_buckets: tuple[int, ...] = (1, 2, 4, 8),
        prefill_buckets: tuple[tuple[int, int], ...] = ((1, 16), (1, 64), (4, 64), (1, 256)),
        eos_after: int | None = None,
        step_s: float = 0.0,
        token_s: float = 0.0,
        verify: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        geometry = Geometry(num_layers, num_kv_heads, num_kv_heads, 8, page_size, max_model_len, 1.0)
        self._limits = RunnerLimits(
            geometry,
            VOCAB_SIZE,
            num_rows,
            num_sequence_pages,
            decode_buckets,
            prefill_buckets,
            (EOS,),
            {method.name: method for method in methods},
            {"weights": script if isinstance(script, str) else script.__name__},
            {method.name: _knobs(method) for method in methods},
        )
        self._script = SCRIPTS[script] if isinstance(script, str) else script
        self.eos_after = eos_after
        self.step_s, self.token_s, self.verify = step_s, token_s, verify
        self.clock, self._sleep = clock, sleep
        self._device_free_s = 0.0
        self._pool = np.zeros((num_sequence_pages * geometry.head_pages_per_sequence_page, page_size), np.int64)
        self._rows: dict[int, _Row] = {}
        self._stops: dict[int, tuple[int, ...]] = {}
        self._gate = threading.Event()
        self._gate.set()
        self._faults: dict[str, list[tuple[int, Exception, str]]] = {}
        self._poisoned: set[int] = set()
        self._refused: set[int] = set()
        self._derived: dict[int, int] = {}  # rows that were computed with others missing, and what they would be else
        self.recall = MockRecall(self)
        self.prune = MockPrune(self)
        self.calls: dict[str, int] = {}
        self.log: list[tuple] = []

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    # Faults and delays, for tests.

    def hold(self) -> None:
        """No ticket becomes ready until `release`."""
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def fail(self, call: str, nth: int, error: Exception, when: str = "before") -> None:
        """The nth call from now (1 is the next) raises: "before" it acts, "after", or at its ticket's "result"."""
        self._faults.setdefault(call, []).append((self.calls.get(call, 0) + nth, error, when))

    def poison(self, token: int) -> None:
        """Rows with this token in their history get non-finite logits."""
        self._poisoned.add(token)

    def refuse(self, token: int) -> None:
        """Batches with a row that has this token in its history are refused with RequestError, before they act."""
        self._refused.add(token)

    def wait_until(self, when_s: float) -> None:
        while (left := when_s - self.clock()) > 0:
            self._sleep(left)

    def generate(
        self, prompt: Sequence[int], count: int, seed: int = 0, stops: Sequence[int] = (EOS,), min_tokens: int = 0
    ) -> list[int]:
        """What a request generates alone: the oracle for tests. Ends after a stop token."""
        history, output = list(prompt), []
        while len(output) < count:
            sampling = SamplingRow(seed=seed, position=len(output), mask_stops=len(output) < min_tokens)
            token = self._next(history, sampling, tuple(stops))
            history.append(token)
            output.append(token)
            if token in stops:
                break
        return output

    def _next(self, history: Sequence[int], sampling: SamplingRow, stops: tuple[int, ...]) -> int:
        token = self._script(history, sampling.position, sampling.seed)
        if self.eos_after is not None and sampling.position >= self.eos_after:
            token = EOS
        if sampling.mask_stops and token in stops:
            token = next(t for t in range(ord("a"), VOCAB_SIZE) if t not in stops)
        return token

    # The runner.

    def setup_row(self, row: int, logit_bias: tuple[tuple[int, float], ...], stop_ids: tuple[int, ...]) -> None:
        self._enter("setup_row")
        self._require(1 <= row <= self._limits.num_rows, f"row {row} does not exist")
        self._stops[row] = stop_ids
        self._rows.pop(row, None)
        self._leave("setup_row")

    def prefill(self, method: str, rows: list[PrefillRow]) -> MockTicket:
        fits = [
            b for b in self._limits.prefill_buckets if b[0] >= len(rows) and b[1] >= max(len(r.tokens) for r in rows)
        ]
        self._require(bool(fits), f"no bucket for {len(rows)} chunks of {[len(r.tokens) for r in rows]} tokens")
        fault = self._enter("prefill", [(plan.row, plan.tokens.tolist()) for plan in rows])
        tokens = []
        for plan in rows:
            self._require(plan.tokens.dtype == np.int32 and len(plan.tokens) > 0, "a chunk is int32 and not empty")
            if plan.first:
                self._require(plan.row in self._stops, f"row {plan.row} was not set up")
                self._rows[plan.row] = self._empty(method)
            row = self._row(plan.row, method)
            self._append(plan.row, row, plan.tokens.tolist(), plan.table_updates)
            if plan.sample:
                row.prompt_end, row.replayed = len(row.history), 0
            tokens.append(self._sample(plan.row, row, plan.sampling) if plan.sample else -1)
        return self._ticket("prefill", rows, tokens, sum(len(plan.tokens) for plan in rows), fault)

    def replay(self, method: str, plan: ReplayRow) -> MockTicket:
        tokens = plan.tokens.tolist()
        self._require(
            any(b[1] >= len(tokens) for b in self._limits.prefill_buckets), f"no bucket for {len(tokens)} tokens"
        )
        fault = self._enter("replay", [(plan.row, tokens)])
        row, facts = self._row(plan.row, method), self._limits.methods[method]
        self._require(not row.resumed, f"row {plan.row} was continued: only a first prompt is replayed")
        self._require(0 < row.prompt_end == len(row.history), f"row {plan.row} does not stand at the end of its prompt")
        self._require(row.compacted_at < row.prompt_end, f"row {plan.row} was compacted before it was replayed")
        lengths = facts.replay_lengths(row.prompt_end)
        self._require(plan.index == row.replayed < len(lengths), f"replay {plan.index} of {lengths} is not the next")
        expected = facts.replay_ids(np.array(row.history, np.int32), plan.index)
        same = plan.tokens.dtype == np.int32 and tokens == expected.tolist() and len(tokens) == lengths[plan.index]
        self._require(same, f"replay {plan.index} of row {plan.row} has other tokens")
        self._check_contents(plan.row, row)
        self._update_table(row, plan.table_updates)
        for l, layer in enumerate(row.stamps):
            for h, stamps in enumerate(layer):
                pages, offsets = self._places(row, l, h, len(stamps), len(stamps) + len(tokens))
                self._pool[pages, offsets] = -mix(plan.row, plan.index)
        self._check_contents(plan.row, row)
        row.replayed += 1
        return self._ticket("replay", [plan], [-1], len(tokens), fault)

    def decode(self, method: str, rows: list[DecodeRow]) -> MockTicket:
        self._require(len(rows) <= self._limits.decode_buckets[-1], f"no bucket for {len(rows)} rows")
        fault = self._enter("decode", [(plan.row, []) for plan in rows])
        tokens = []
        for plan in rows:
            row = self._row(plan.row, method)
            token = row.last_token if plan.token is None else plan.token
            self._require(token is not None, f"row {plan.row} decodes before its first token was sampled")
            self._check_replayed(plan.row, row)
            assert token is not None
            self._append(plan.row, row, [token], plan.table_updates)
            tokens.append(self._sample(plan.row, row, plan.sampling))
        return self._ticket("decode", rows, tokens, len(rows), fault)

    def count(self, method: str, plan: CountRow) -> MockTicket[np.ndarray]:
        fault = self._enter("count")
        row, lengths = self._due_row(method, plan)
        facts = self._limits.methods[method]
        most, budget = facts.most_counted(plan.phase, lengths), facts.kept_after(plan.phase, lengths)
        self._require(most > 0 and bool((budget < lengths).any()), f"there is nothing to count after {plan.phase}")
        counts = np.ones_like(lengths)
        for layer in range(len(lengths)):
            # One row at a time to whoever a number says that still has room: any split that keeps the sum will do.
            for i in range(int(budget[layer].sum()) - lengths.shape[1]):
                room = np.flatnonzero(counts[layer] < np.minimum(lengths[layer], most))
                counts[layer, room[min(len(room) - 1, mix(len(row.history), layer, i) % (len(room) + 1))]] += 1
        row.counted = counts
        self._device_free_s = max(self.clock(), self._device_free_s) + self.step_s
        self._leave("count")
        return MockTicket(fault or counts.copy(), self._device_free_s, self._gate, self)

    def _due_row(self, method: str, plan: CountRow | MaintainRow) -> tuple[_Row, np.ndarray]:
        row = self._row(plan.row, method)
        self._alone(plan.row, row)
        lengths = self._lengths(row)
        self._require(
            bool((lengths == plan.length).all()),
            f"row {plan.row} has {lengths.tolist()} rows, not {plan.length.tolist()}",
        )
        since = max(row.compacted_at, row.prompt_end if plan.phase in ("token", "pressure") else 0)
        self._require(
            plan.observed_tokens == len(row.history) - since, "observed_tokens is not what this phase has processed"
        )
        self._check_contents(plan.row, row)
        if plan.phase == "prompt":
            self._check_replayed(plan.row, row)
            stays = row.resumed and self._limits.methods[method].replays_prompts
            self._require(not stays, f"what was appended to row {plan.row} stays")
        return row, lengths

    def maintain(self, method: str, plan: MaintainRow) -> tuple[EvictedPages, ...]:
        self._enter("maintain")
        row, lengths = self._due_row(method, plan)
        facts = self._limits.methods[method]
        expected = np.broadcast_to(facts.kept_after(plan.phase, lengths), lengths.shape)
        if facts.most_counted(plan.phase, lengths):
            self._require(row.counted is not None, f"row {plan.row} is compacted before its heads were counted")
            assert row.counted is not None
            expected, row.counted = row.counted, None
        if plan.asked is not None:
            self._require(bool((expected == plan.asked).all()), f"{method} asks for {expected.tolist()} rows")
            page_size = self._limits.geometry.page_size
            expected = lengths - (lengths - expected) // page_size * page_size
        self._require(
            bool((expected == plan.kept).all()), f"{method} keeps {expected.tolist()} rows, not {plan.kept.tolist()}"
        )
        row.compacted_at = len(row.history)
        self.log.append((method, plan.phase, len(row.history), lengths.tolist(), plan.kept.tolist()))
        due = plan.kept < lengths
        columns = np.where(due, self._pages(plan.kept), 0)
        self._require(plan.new_pages.shape == (*columns.shape, columns.max()), "new_pages has the wrong shape")
        fresh = plan.new_pages[np.arange(plan.new_pages.shape[-1]) < columns[..., None]]
        old = row.table[np.arange(row.table.shape[-1]) < self._pages(lengths)[..., None]]
        self._require(not set(fresh.tolist()) & {0, *old.tolist()}, "compaction must write to fresh pages")
        self._require(len(set(fresh.tolist())) == len(fresh), "a fresh page is listed twice")
        self._require(int((plan.new_pages != 0).sum()) == len(fresh), "new_pages lists more pages than are needed")
        row.table[due] = 0
        row.table[due, : plan.new_pages.shape[-1]] = plan.new_pages[due]
        dropped: list[list[np.ndarray]] = [[] for _ in row.stamps]
        for l, layer in enumerate(row.stamps):
            for h, stamps in enumerate(layer):
                # The contract fixes how many rows stay, not which: keep an arbitrary, ordered choice.
                rank = np.array([mix(int(s), l, h) for s in stamps])
                order = np.argsort(rank, kind="stable")
                layer[h] = stamps[np.sort(order[: int(plan.kept[l, h])])]
                dropped[l].append(stamps[np.sort(order[int(plan.kept[l, h]) :])])
        self._write(row, np.zeros(plan.kept.shape, np.int32))
        self._leave("maintain")
        return () if plan.asked is None else self.recall.spill(plan, lengths, dropped)

    def probe(self, method: str, plan: ProbeRow) -> MockTicket[PageScores]:
        fault = self._enter("probe", [(plan.row, plan.tokens.tolist())])
        row = self._row(plan.row, method)
        self._alone(plan.row, row)
        at = len(row.history)
        self._require(plan.position >= at and len(plan.tokens) > 0, f"row {plan.row} has seen {at} tokens already")
        self._check_contents(plan.row, row)
        self._update_table(row, plan.table_updates)
        scores = self.recall.probe(row, plan)
        self._check_contents(plan.row, row)
        self._device_free_s = max(self.clock(), self._device_free_s) + self.step_s
        self._leave("probe")
        return MockTicket(fault or scores, self._device_free_s, self._gate, self)

    def lend(self, method: str, plan: LendPages) -> int:
        self._enter("lend")
        moved = self.recall.lend(self._limits.methods[method].granularity, plan)
        self._leave("lend")
        return moved

    def front(self, method: str, plan: FrontRow) -> None:
        self._enter("front")
        row = self._row(plan.row, method)
        self._check_contents(plan.row, row)
        self.recall.front(row, plan)
        self._check_contents(plan.row, row)
        self._leave("front")

    def _alone(self, index: int, row: _Row) -> None:
        self._require(row.lent is None, f"row {index} has lent rows before its own")

    def fork(self, method: str, plan: ForkRow) -> None:
        self._enter("fork")
        source = self._row(plan.source, method)
        self._alone(plan.source, source)
        self._require(plan.target in self._stops and plan.target != plan.source, f"row {plan.target} was not set up")
        self._check_contents(plan.source, source)
        target = source.copy()
        target.table = np.zeros_like(source.table)
        for origin, copy in plan.copies:
            self._pool[self._span(source.granularity, copy)] = self._pool[self._span(source.granularity, origin)]
        self._rows[plan.target] = target
        self._update_table(target, plan.table_updates)
        self._check_contents(plan.target, target)
        self._leave("fork")

    def export_row(self, method: str, row: int, pages: np.ndarray) -> SwappedRow:
        self._enter("export_row")
        state = self._row(row, method)
        self._alone(row, state)
        self._check_pages(row, state, pages)
        self._check_contents(row, state)
        self._leave("export_row")
        return SwappedRow(state.copy(), int((pages >= 0).sum()) * 64)

    def import_row(self, method: str, row: int, pages: np.ndarray, swapped: SwappedRow) -> None:
        self._enter("import_row")
        self._require(row in self._stops, f"row {row} was not set up")
        state = swapped.payload.copy()
        self._require(state.method == method, "a row came back under another method")
        state.table = np.zeros_like(state.table)
        state.table[..., : pages.shape[-1]] = np.where(pages >= 0, pages, 0)
        self._rows[row] = state
        self._check_pages(row, state, pages)
        self._write(state, np.zeros_like(self._lengths(state)))
        self._leave("import_row")

    def park(self, method: str, row: int, leave: bool = True) -> ParkedRow:
        self._enter("park")
        state = self._row(row, method)
        self._alone(row, state)
        self._check_contents(row, state)
        if leave:
            del self._rows[row], self._stops[row]
        self._leave("park")
        return ParkedRow(state.copy(), 64)

    def trim(self, method: str, parked: ParkedRow, tokens: int) -> ParkedRow:
        self._enter("trim")
        row = parked.payload.copy()
        row.history = row.history[: len(row.history) - tokens]
        self._require(tokens > 0 and row.compacted_at <= len(row.history), "a compaction has seen what is taken back")
        row.stamps = [[s[: len(s) - tokens] for s in layer] for layer in row.stamps]
        self._settle(row)
        self._leave("trim")
        return ParkedRow(row, parked.nbytes)

    def unpark(self, method: str, plan: UnparkRow) -> None:
        self._enter("unpark")
        self._require(plan.row in self._stops, f"row {plan.row} was not set up")
        seen = plan.seen.tolist()
        row = self._found(method, plan) if plan.parked is None else plan.parked.payload.copy()
        self._require(row.method == method, "a parked row came back under another method")
        self._require(plan.seen.dtype == np.int32 and seen == row.history, "other tokens were seen")
        lengths = self._lengths(row)
        same = plan.lengths.shape == lengths.shape and bool((plan.lengths == lengths).all())
        self._require(same, f"{lengths.tolist()} rows were parked, not {plan.lengths.tolist()}")
        row.table = np.zeros_like(row.table)
        row.table[..., : plan.pages.shape[-1]] = np.maximum(plan.pages, 0)
        row.last_token, row.compacted_at, row.resumed = None, len(seen), True
        self._check_pages(plan.row, row, plan.pages)
        self._check_contents(plan.row, row)
        self._rows[plan.row] = row
        self._leave("unpark")

    def bare(self, method: str, plan: UnparkRow) -> ParkedRow:
        self._enter("bare")
        row = self._found(method, plan)
        self._check_contents(plan.row, row)
        self._leave("bare")
        return ParkedRow(row, 64)

    def _found(self, method: str, plan: UnparkRow) -> _Row:
        """A row of these tokens, whoever computed them: what is left of them, as it would be computed by itself."""
        self._pure(method)
        row, count = self._empty(method), int(plan.lengths.max())
        row.table[..., : plan.pages.shape[-1]] = np.maximum(plan.pages, 0)
        row.history, row.resumed = plan.seen.tolist(), True
        pages, offsets = self._places(row, 0, 0, 0, count)
        rows = self._pool[pages[0], offsets] - self._cells(row, 0, 0)[0]
        row.stamps = [[rows.copy() for _ in layer] for layer in row.stamps]
        self._settle(row)
        text, at = self._text(row.history), positions_of(rows)
        self._require(
            bool((np.diff(at) > 0).all()) and (not count or at[-1] < len(text)), "rows are not in their order"
        )
        for stamp, position in zip(rows.tolist(), at.tolist(), strict=True):
            known = stamp == text[position] or self._derived.get(stamp) == text[position]
            self._require(known, f"the row of token {position} is of another text")
        return row

    def _text(self, history: list[int]) -> list[int]:
        """What stands for tokens that were computed with all before them."""
        stamps = [0]
        for position, token in enumerate(history):
            stamps.append(next_stamp(stamps[-1], token, position))
        return stamps[1:]

    def _settle(self, row: _Row) -> None:
        """Finds out what the next token of a row sees."""
        text = self._text(row.history)
        row.last_stamp, row.context = text[-1] if text else 0, None
        if self._limits.methods[row.method].pure_prefix:
            rows = row.stamps[0][0].tolist()
            row.context = None if rows == text else sum(rows) & _MASK

    def _stamp(self, row: _Row, token: int) -> int:
        """What stands for the next token of a row: it depends on all before it, or on what is left of that."""
        stamp = row.last_stamp = next_stamp(row.last_stamp, token, len(row.history))
        if row.context is not None:
            stamp = next_stamp(row.context, token, len(row.history))
            row.context = (row.context + stamp) & _MASK
            self._derived[stamp] = row.last_stamp
        row.history.append(token)
        return stamp

    def _pure(self, method: str) -> None:
        self._require(self._limits.methods[method].pure_prefix, f"rows of {method} are no function of the tokens")

    def score_rows(self, method: str, plan: ScoreRow, scores: RowScores | None) -> RowScores:
        self._enter("score_rows")
        self._pure(method)
        scores = self.prune.probe(self._limits.methods[method].granularity, plan, scores)
        self._device_free_s = max(self.clock(), self._device_free_s) + self.step_s + self.token_s * len(plan.tokens)
        self._leave("score_rows")
        return scores

    def read_scores(self, scores: RowScores) -> MockTicket[np.ndarray]:
        fault = self._enter("read_scores")
        self._leave("read_scores")
        return MockTicket(fault or scores.payload.copy(), self._device_free_s, self._gate, self)

    def pack_rows(self, method: str, plan: PackRows) -> None:
        self._enter("pack_rows")
        self._pure(method)
        self.prune.pack(self._limits.methods[method].granularity, plan)
        self._leave("pack_rows")

    def export_parked(self, method: str, pages: np.ndarray, parked: ParkedRow) -> SwappedRow:
        self._enter("export_parked")
        state = parked.payload.copy()
        columns = self._pages(self._lengths(state))
        inside = np.arange(pages.shape[-1]) < columns[..., None]
        self._require(bool((pages[~inside] == -1).all()), "pages are copied that the row does not have")
        self._require(pages.dtype == np.int32 and pages.shape[-1] >= columns.max(), "the row has more pages")
        # They may be copies of those that were parked.
        state.table = np.zeros_like(state.table)
        state.table[..., : pages.shape[-1]] = np.maximum(pages, 0)
        self._check_contents(0, state, partial=True)
        rows = self._pool[self._head_pages(state.granularity, pages)]
        self._leave("export_parked")
        return SwappedRow((state, rows), int((pages >= 0).sum()) * 64)

    def import_parked(self, method: str, pages: np.ndarray, swapped: SwappedRow) -> ParkedRow:
        self._enter("import_parked")
        if isinstance(swapped.payload, _Row):  # from a row
            state, rows = swapped.payload.copy(), None
        else:
            state, rows = swapped.payload[0].copy(), swapped.payload[1]
        self._require(state.method == method, "a row came back under another method")
        state.table = np.zeros_like(state.table)
        if rows is None:
            state.table[..., : pages.shape[-1]] = np.maximum(pages, 0)
            self._check_pages(0, state, pages)
            self._write(state, np.zeros_like(self._lengths(state)))
        else:
            ids = self._head_pages(state.granularity, pages)
            self._require(len(ids) == len(rows), f"{len(rows)} head-pages can't be restored into {len(ids)}")
            self._pool[ids[ids > 0]] = rows[ids > 0]
        self._leave("import_parked")
        return ParkedRow(state, 64)

    def export_pages(self, method: str, pages: np.ndarray) -> SwappedRow:
        self._enter("export_pages")
        rows = self._pool[self._head_pages(self._limits.methods[method].granularity, pages)]
        self._leave("export_pages")
        return SwappedRow(rows, len(pages) * 64)

    def import_pages(self, method: str, pages: np.ndarray, swapped: SwappedRow) -> None:
        self._enter("import_pages")
        ids = self._head_pages(self._limits.methods[method].granularity, pages)
        self._require(len(ids) == len(swapped.payload), "other pages come back than were copied")
        self._pool[ids[ids > 0]] = swapped.payload[ids > 0]
        self._leave("import_pages")

    def arrived(self, swapped: SwappedRow) -> bool:
        return self._gate.is_set()

    def pack(self, method: str, swapped: SwappedRow) -> dict[str, np.ndarray]:
        state, rows = swapped.payload, None
        if not isinstance(state, _Row):
            state, rows = swapped.payload
        numbers = [state.last_stamp, state.prompt_end, state.compacted_at, state.replayed, state.resumed]
        arrays = {
            "history": np.array(state.history, np.int64),
            "lengths": self._lengths(state),
            "stamps": np.concatenate([s for layer in state.stamps for s in layer]),
            "numbers": np.array(numbers, np.int64),
        }
        return arrays if rows is None else arrays | {"rows": rows}

    def unpack(self, method: str, arrays: dict[str, np.ndarray]) -> SwappedRow:
        state = self._empty(method)
        lengths, stamps = arrays["lengths"], arrays["stamps"]
        if lengths.shape != (len(state.stamps), len(state.stamps[0])) or lengths.sum() != len(stamps):
            raise ValueError(f"{method} has no rows of shape {lengths.shape}")
        parts = iter(np.split(stamps, np.cumsum(lengths.reshape(-1))[:-1]))
        state.stamps = [[next(parts).astype(np.int64) for _ in layer] for layer in lengths]
        state.history = arrays["history"].tolist()
        state.last_stamp, state.prompt_end, state.compacted_at, state.replayed, resumed = arrays["numbers"].tolist()
        state.resumed = bool(resumed)
        self._settle(state)
        if state.context is not None:
            text, rows = self._text(state.history), state.stamps[0][0]
            self._derived |= {s: text[at] for s, at in zip(rows.tolist(), positions_of(rows).tolist(), strict=True)}
        if "rows" not in arrays:
            return SwappedRow(state, int(self._pages(lengths).sum()) * 64)
        span = self._limits.geometry.head_pages_per_page(state.granularity)
        return SwappedRow((state, arrays["rows"]), len(arrays["rows"]) // span * 64)

    def copy_pages(self, method: str, copies: tuple[tuple[int, int], ...]) -> None:
        self._enter("copy_pages")
        granularity = self._limits.methods[method].granularity
        for origin, copy in copies:
            self._require(origin > 0 and copy > 0, "the null page is copied")
            self._pool[self._span(granularity, copy)] = self._pool[self._span(granularity, origin)]
        self._leave("copy_pages")

    # What the device does.

    def _empty(self, method: str) -> _Row:
        granularity = self._limits.methods[method].granularity
        layers, heads = self._limits.geometry.table_shape(granularity)
        table = np.zeros((layers, heads, self._limits.geometry.max_pages), np.int32)
        return _Row(granularity, method, [], [[np.zeros(0, np.int64)] * heads for _ in range(layers)], table)

    def _row(self, row: int, method: str) -> _Row:
        self._require(row in self._rows, f"row {row} has no owner")
        self._require(self._rows[row].method == method, f"row {row} belongs to {self._rows[row].method}, not {method}")
        return self._rows[row]

    def _check_replayed(self, index: int, row: _Row) -> None:
        lengths = () if row.resumed else self._limits.methods[row.method].replay_lengths(row.prompt_end)
        wanted = len(lengths)
        self._require(row.replayed == wanted, f"row {index} goes on after {row.replayed} of {wanted} replays")

    def _pages(self, lengths: np.ndarray) -> np.ndarray:
        return ceil_div(lengths, self._limits.geometry.page_size)

    def _lengths(self, row: _Row) -> np.ndarray:
        return np.array([[len(s) for s in layer] for layer in row.stamps], np.int32)

    def _update_table(self, row: _Row, updates: np.ndarray | None) -> None:
        if updates is None:
            return
        self._require(
            updates.dtype == np.int32 and updates.ndim == 2 and updates.shape[1] == 4, "updates are int32 [n, 4]"
        )
        self._require(bool((updates[:, 3] > 0).all()), "an update points to the null page")
        row.table[updates[:, 0], updates[:, 1], updates[:, 2]] = updates[:, 3]

    def _append(self, index: int, row: _Row, tokens: list[int], updates: np.ndarray | None) -> None:
        self._check_contents(index, row)
        self._update_table(row, updates)
        stamps = [self._stamp(row, token) for token in tokens]
        before = self._lengths(row)
        for layer in row.stamps:
            for h, old in enumerate(layer):
                layer[h] = np.concatenate([old, np.array(stamps, np.int64)])
        self._write(row, before)
        self._check_contents(index, row)

    def _places(self, row: _Row, l: int, h: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Head-pages [parts, rows] and offsets [rows] of rows [start, stop)."""
        page_size = self._limits.geometry.page_size
        index = np.arange(start, stop) + (0 if row.lent is None else row.lent[l, h])
        pages = row.table[l, h, index // page_size]
        self._require(bool((pages > 0).all()), f"rows {start} to {stop} reach the null page")
        parts = self._limits.geometry.head_pages_per_page(row.granularity)
        return pages * parts + np.arange(parts)[:, None], index % page_size

    def _cells(self, row: _Row, l: int, h: int) -> np.ndarray:
        """[parts, 1]: which layer and head of the model each head-page of a page stands for; told apart in the pool."""
        parts = self._limits.geometry.head_pages_per_page(row.granularity)
        return ((l * row.table.shape[1] + h) * parts + np.arange(parts))[:, None]

    def _write(self, row: _Row, start: np.ndarray) -> None:
        for l, layer in enumerate(row.stamps):
            for h, stamps in enumerate(layer):
                first = int(start[l, h])
                pages, offsets = self._places(row, l, h, first, len(stamps))
                self._pool[pages, offsets] = stamps[first:] + self._cells(row, l, h)

    def _check_contents(self, index: int, row: _Row, partial: bool = False) -> None:
        """Reads everything back; with `partial` only what is in pages that the table lists."""
        if not self.verify:
            return
        for l, layer in enumerate(row.stamps):
            for h, stamps in enumerate(layer):
                listed = row.table[l, h, : -(-len(stamps) // self._limits.geometry.page_size)]
                start = int((listed == 0).sum()) * self._limits.geometry.page_size if partial else 0
                pages, offsets = self._places(row, l, h, start, max(start, len(stamps)))
                same = self._pool[pages, offsets] == stamps[start:] + self._cells(row, l, h)
                self._require(bool(same.all()), f"row {index} layer {l} head {h} reads what it did not write")
        self.recall.check(index, row)

    def _check_pages(self, index: int, row: _Row, pages: np.ndarray) -> None:
        columns = self._pages(self._lengths(row))
        mask = np.arange(pages.shape[-1]) < columns[..., None]
        right = pages.dtype == np.int32 and pages.shape[-1] >= columns.max() and bool((pages[~mask] == -1).all())
        self._require(right, f"row {index} has {columns.tolist()} pages, the plan lists others")
        self._require(bool((pages == row.table[..., : pages.shape[-1]])[mask].all()), f"row {index} has other pages")

    def _head_pages(self, granularity: Granularity, pages: np.ndarray) -> np.ndarray:
        """Those of all pages that are listed, in order."""
        parts = self._limits.geometry.head_pages_per_page(granularity)
        return (pages[pages >= 0][:, None] * parts + np.arange(parts)).reshape(-1)

    def _span(self, granularity: Granularity, page: int) -> slice:
        parts = self._limits.geometry.head_pages_per_page(granularity)
        return slice(page * parts, (page + 1) * parts)

    def _sample(self, index: int, row: _Row, sampling: SamplingRow) -> int:
        seen = row.history if row.context is None else [*row.history, row.context]
        row.last_token = self._next(seen, sampling, self._stops[index])
        return row.last_token

    def _ticket(
        self,
        call: str,
        rows: Sequence[PrefillRow] | Sequence[DecodeRow] | Sequence[ReplayRow],
        tokens: list[int],
        num_tokens: int,
        fault: Exception | None,
    ) -> MockTicket:
        count = len(rows)
        ok = np.array([self._poisoned.isdisjoint(self._rows[plan.row].history) for plan in rows])
        result = StepResult(np.array(tokens, np.int32), ok)
        if any(not isinstance(plan, ReplayRow) and plan.sampling.logprobs >= 0 for plan in rows):
            sampled = np.array(tokens, np.int32)[:, None]
            ids = np.concatenate([sampled, (sampled + np.arange(1, 20, dtype=np.int32)) % VOCAB_SIZE], 1).astype(
                np.int32
            )
            values = np.broadcast_to(-0.5 - np.arange(20, dtype=np.float32), (count, 20))
            result = dataclasses.replace(result, logprob=values[:, 0], top_ids=ids, top_logprobs=values)
        self._device_free_s = max(self.clock(), self._device_free_s) + self.step_s + self.token_s * num_tokens
        self._leave(call)
        return MockTicket(fault or result, self._device_free_s, self._gate, self)

    def _enter(self, call: str, rows: Sequence[tuple[int, list[int]]] = ()) -> Exception | None:
        """Counts the call, raises what was injected before it, returns what its ticket shall raise."""
        self.calls[call] = number = self.calls.get(call, 0) + 1
        for row, tokens in rows:
            history = self._rows[row].history if row in self._rows else []
            if not self._refused.isdisjoint([*history, *tokens]):
                raise RequestError(f"row {row} is refused")
        at_result = None
        for nth, error, when in self._faults.get(call, ()):
            if nth == number and when == "before":
                raise error
            if nth == number and when == "result":
                at_result = error
        return at_result

    def _leave(self, call: str) -> None:
        for nth, error, when in self._faults.get(call, ()):
            if nth == self.calls[call] and when == "after":
                raise error

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ContractError(message)
