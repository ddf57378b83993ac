"""Executes plans on the device: packs them into padded arrays, calls compiled programs, hands out tickets.

The runner owns the device state and nothing else. Every program is compiled ahead of time for its bucket and kept by
key, so "no compilation after start-up" is a property one can count, not a hope.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from sparsejax import exported, steps, transfers
from sparsejax.cache.evicted import EvictedPages
from sparsejax.geometry import Geometry
from sparsejax.method import Method
from sparsejax.models.spec import ModelSpec, Weights
from sparsejax.plans import (
    PHASES,
    CountRow,
    DecodeRow,
    ForkRow,
    FrontRow,
    LendPages,
    MaintainRow,
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
from sparsejax.programs import Compiled, Program, compile_all, compile_one
from sparsejax.prune_programs import PrunePrograms
from sparsejax.recall_programs import RecallPrograms, Scores
from sparsejax.sampling import GENERAL, GREEDY, INT_COLUMNS, NUM_LOGPROBS, SAMPLE, greedy_inputs
from sparsejax.state import IN_PROMPT, MAX_BIAS, MAX_STOP_IDS, KVState, StateSize, empty_state, sequence_page_nbytes
from sparsejax.storage import Storage

log = logging.getLogger("sparsejax.runner")

EXPORT_COLUMNS = 8
"""Sequence pages moved by one export or import program."""
CUBLAS_ROWS = 32
"""Rows from which a decode program multiplies through cuBLAS. The Triton products that XLA prefers are split along the
sum and need a kernel more: a step of 64 rows took 10.3 instead of 9.9 ms on an H200, but one of a single row 4.9
instead of 6.5. What lies between was not measured."""


class LateCompileError(RuntimeError):
    """A program was compiled while serving although `fail_on_retrace` forbids it."""


class StepTicket:
    """A step under way (see `plans.Ticket`): `packed` as in `steps.StepOutputs`."""

    def __init__(self, packed: jax.Array, logits: jax.Array, num_rows: int, wants_logprobs: bool):
        self._packed = packed
        self._num_rows = num_rows
        self._wants_logprobs = wants_logprobs
        self.logits = logits
        self._packed.copy_to_host_async()

    def is_ready(self) -> bool:
        return self._packed.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def result(self) -> StepResult:
        packed = np.asarray(self._packed)[: self._num_rows]
        tokens, ok = packed[:, 0], packed[:, 1].astype(bool)
        if not self._wants_logprobs:
            return StepResult(tokens, ok)
        ids, top = packed[:, 3 : 3 + NUM_LOGPROBS], packed[:, 3 + NUM_LOGPROBS :]
        return StepResult(
            tokens,
            ok,
            np.ascontiguousarray(packed[:, 2]).view(np.float32),
            np.ascontiguousarray(ids),
            np.ascontiguousarray(top).view(np.float32),
        )


class ReplayTicket:
    """A replay under way (see `plans.Ticket`): `ok` bool [rows of the program]."""

    def __init__(self, ok: jax.Array):
        self._ok = ok
        self._ok.copy_to_host_async()

    def is_ready(self) -> bool:
        return self._ok.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def result(self) -> StepResult:
        return StepResult(np.full(1, -1, np.int32), np.asarray(self._ok)[:1])


class ArrayTicket:
    """A small array under way (see `plans.ArrayTicket`)."""

    def __init__(self, array: jax.Array):
        self._array = array
        self._array.copy_to_host_async()

    def is_ready(self) -> bool:
        return self._array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def result(self) -> np.ndarray:
        return np.asarray(self._array)


class DeviceRunner:
    """Implements `plans.Runner` for one model, one storage and the methods that share it.

    Args:
      spec, weights: the model.
      geometry: attention shape, page size, window.
      methods: served methods by the name that requests use; the first is the default.
      storage: how rows are stored.
      num_rows: resident rows.
      num_sequence_pages: pool size, null page included.
      decode_buckets: decode batch sizes, ascending.
      prefill_buckets: (rows, chunk tokens).
      eos_ids: ids that end a text.
      implementation: kernel implementation or None.
      fail_on_retrace: raise when a program is compiled after `seal`.
      on_compile: called with (program name, seconds) for every compilation.
      identity, knobs: see `plans.RunnerLimits`.
      recall, prune: `programs` gives those of recall and of pruning, too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        geometry: Geometry,
        methods: dict[str, Method],
        storage: Storage,
        *,
        num_rows: int,
        num_sequence_pages: int,
        decode_buckets: tuple[int, ...],
        prefill_buckets: tuple[tuple[int, int], ...],
        eos_ids: tuple[int, ...] = (),
        implementation: str | None = None,
        fail_on_retrace: bool = False,
        on_compile: Callable[[str, float], None] | None = None,
        identity: Mapping[str, Any] | None = None,
        knobs: Mapping[str, Any] | None = None,
        recall: bool = False,
        prune: bool = False,
    ) -> None:
        self._limits = RunnerLimits(
            geometry=geometry,
            vocab_size=spec.vocab_size,
            num_rows=num_rows,
            num_sequence_pages=num_sequence_pages,
            decode_buckets=decode_buckets,
            prefill_buckets=prefill_buckets,
            eos_ids=eos_ids,
            methods=dict(methods),
            page_bytes=sequence_page_nbytes(geometry, tuple(methods.values()), storage),
            identity=identity or {},
            knobs=knobs or {},
        )
        self.weights = weights
        self._methods = methods
        self._kept = {name: self._most_kept(method) for name, method in methods.items()}
        self._implementation = implementation
        self._statics = {
            name: steps.Statics(spec, geometry, method, storage, implementation) for name, method in methods.items()
        }
        size = StateSize(num_rows, num_sequence_pages, spec.vocab_size)
        self.state: KVState = empty_state(geometry, size, tuple(methods.values()), storage)
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self._fail_on_retrace = fail_on_retrace
        self._sealed = False
        self._on_compile = on_compile or (lambda name, seconds: None)
        self.num_late_compiles = 0
        self._recall = RecallPrograms(self, self._statics, self._kept)
        self._prune = PrunePrograms(self, self._recall, self._statics)
        self._serves_recall, self._serves_prune = recall, prune

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    # Programs

    def _program(self, key: Hashable, describe: Callable[[], Program]) -> Callable[..., Any]:
        """The compiled program of `key`; compiled now, as `describe` says, if it must be."""
        call = self._programs.get(key)
        if call is None:
            program = describe()
            self._check_late(program)
            call = self._keep(compile_one(program)).call
        return call

    def _check_late(self, program: Program) -> None:
        if not self._sealed:
            return
        self.num_late_compiles += 1
        if self._fail_on_retrace:
            raise LateCompileError(f"{program.label} was compiled after start-up")
        log.warning("compiling %s after start-up", program.label)

    def _keep(self, compiled: Compiled) -> Compiled:
        self._programs[compiled.program.key] = compiled.call
        self._on_compile(compiled.program.name, compiled.lower_s + compiled.compile_s)
        return compiled

    def compile(self, programs: Iterable[Program], workers: int = 1) -> Iterator[Compiled]:
        """Compiles those of `programs` that are not there yet, `workers` at once, and gives each as it is done.

        Only while no step is submitted: programs are described by the state as it is.
        """

        def missing() -> Iterator[Program]:
            for program in programs:
                if program.key not in self._programs:
                    self._check_late(program)
                    yield program

        yield from map(self._keep, compile_all(missing(), workers))

    def forget(self, method: str) -> None:
        """Drops the compiled programs of a method that is not needed for now: they take memory, and maps of it."""
        self._programs = {key: call for key, call in self._programs.items() if not _is_of(key, method)}

    def seal(self) -> None:
        """Start-up is over: from now on a compilation is a defect (see `fail_on_retrace`)."""
        self._sealed = True

    def programs(self) -> Iterator[Program]:
        """Every program that serving needs, most needed first."""
        for name, method in self._methods.items():
            for bucket in self._limits.decode_buckets:
                yield self._describe_decode(name, bucket)
            for bucket in self._limits.prefill_buckets:
                yield self._describe_prefill(name, bucket)
            longest = max(method.replay_lengths(self._limits.geometry.max_model_len), default=0)
            for bucket in sorted({self._bucket(1, tokens) for tokens in range(1, longest + 1)}):
                yield self._describe_replay(name, bucket)
            if method.evicts:
                for phase, kept in sorted(self._kept[name].items()):
                    if self._counts(method, phase):
                        yield self._describe_count(name, phase, kept)
                    yield self._describe_maintain(name, phase, kept)
        sizes = {*self._limits.decode_buckets, *(size for size, _ in self._limits.prefill_buckets)}
        for size in sorted(sizes):
            for mode in self._sampling_modes:
                yield self._describe_sample(size, mode)
        # Methods of one granularity share the programs that set up, fork, swap out and restore rows.
        rows = (program for name in self._methods for program in self._describe_rows(name))
        yield from {program.key: program for program in rows}.values()
        if self._serves_recall:
            yield from self._recall.programs()
        if self._serves_prune:
            yield from self._prune.programs()

    def _describe_rows(self, name: str) -> Iterator[Program]:
        row = np.int32(0)
        yield self._describe("setup_row", None, transfers.setup_row, row, *_setup((), ()))
        block = np.zeros(self._limits.geometry.head_pages_per_sequence_page, np.int32)
        yield self._describe("copy_pages", None, transfers.copy_pages, block, block)
        yield self._describe("fork_row", name, transfers.fork_row, row, row, self._fork_updates(name, 0, None))
        yield self._describe("export_row_state", name, transfers.export_row_state, row)
        (ids,) = self._blocks(block)
        yield self._describe("export_rows", None, transfers.export_rows, ids)
        pages = jax.eval_shape(transfers.export_rows, self.state, ids)
        yield self._describe("import_rows", None, transfers.import_rows, ids, pages)
        export = functools.partial(transfers.export_row_state, granularity=self._methods[name].granularity.value)
        row_state, table = jax.eval_shape(export, self.state, row), self._whole_table(name, np.zeros((1, 1, 0)))
        yield self._describe("import_row_state", name, transfers.import_row_state, row, row_state, table)
        yield self._describe("park_row", None, transfers.park_row, row)
        numbers = np.zeros(table.shape[:2], np.int32), row, np.zeros(self._limits.vocab_size, np.int32)
        parked = transfers.ParkedState(row_state.row_aux, row_state.request_aux)
        yield self._describe("unpark_row", name, transfers.unpark_row, row, parked, table, *numbers)

    def _describe(self, name: str, method: str | None, function: Any, *args: Any) -> Program:
        """A program that moves rows: `args` after the state; of the method's granularity, or of any if None."""
        if method is None:
            return Program(name, name, name, function, lambda: (self.state, *args))
        granularity = self._methods[method].granularity.value
        static, label = {"granularity": granularity}, f"{name}[{granularity}]"
        return Program(name, (name, granularity), label, function, lambda: (self.state, *args), static)

    def _run(self, name: str, method: str | None, function: Any, *args: Any) -> Any:
        """Calls a program that moves rows (see `_describe`)."""
        program = self._describe(name, method, function, *args)
        return self._program(program.key, lambda: program)(self.state, *args)

    def _most_kept(self, method: Method) -> dict[str, int]:
        """The most rows that a layer or head keeps, by phase after which anything may be evicted."""
        geometry = self._limits.geometry
        longest = np.full(geometry.table_shape(method.granularity), geometry.max_model_len, np.int32)
        kept = {phase: method.kept_after(phase, longest) for phase in PHASES}
        due = {phase: int(rows.max()) for phase, rows in kept.items() if (rows < longest).any()}
        return {phase: self._counts(method, phase) or most for phase, most in due.items()}

    def _counts(self, method: Method, phase: str) -> int:
        """The most rows of a head where the device counts them, else 0."""
        geometry = self._limits.geometry
        return method.most_counted(phase, np.full(geometry.table_shape(method.granularity), geometry.max_model_len))

    def _describe_decode(self, name: str, bucket: int) -> Program:
        def args() -> tuple:
            return self._statics[name], self.weights, self.state, *self._decode_inputs(name, [], bucket)

        label = f"decode[{name} rows={bucket}]"
        options = _decode_options(bucket)
        return Program("decode", ("decode", name, bucket), label, steps.decode_logits, args, options=options)

    def _decode_program(self, name: str, bucket: int) -> Callable[..., Any]:
        return self._program(("decode", name, bucket), lambda: self._describe_decode(name, bucket))

    def _describe_prefill(self, name: str, bucket: tuple[int, int]) -> Program:
        def args() -> tuple:
            return self._statics[name], self.weights, self.state, *self._prefill_inputs(name, [], bucket)

        label = f"prefill[{name} rows={bucket[0]} tokens={bucket[1]}]"
        return Program("prefill", ("prefill", name, bucket), label, steps.prefill_logits, args)

    def _prefill_program(self, name: str, bucket: tuple[int, int]) -> Callable[..., Any]:
        return self._program(("prefill", name, bucket), lambda: self._describe_prefill(name, bucket))

    def _bucket(self, rows: int, tokens: int) -> tuple[int, int]:
        """The smallest prefill program that takes so many rows and so many tokens of each."""
        fitting = [b for b in self._limits.prefill_buckets if b[0] >= rows and b[1] >= tokens]
        if not fitting:
            raise ValueError(f"no program takes {tokens} tokens of each of {rows} rows")
        return min(fitting, key=lambda b: (b[0] * b[1], b))

    def _describe_replay(self, name: str, bucket: tuple[int, int]) -> Program:
        def args() -> tuple:
            return self._statics[name], self.weights, self.state, *self._replay_inputs(name, None, bucket)

        label = f"replay[{name} tokens={bucket[1]}]"
        return Program("replay", ("replay", name, bucket), label, steps.replay_chunk, args)

    def _replay_program(self, name: str, bucket: tuple[int, int]) -> Callable[..., Any]:
        return self._program(("replay", name, bucket), lambda: self._describe_replay(name, bucket))

    @functools.cached_property
    def _nothing(self) -> transfers.ParkedState:
        """What a row has beside its pages when nothing was learned of it."""
        row_aux: Any = {name: np.zeros((a.shape[0], *a.shape[2:]), a.dtype) for name, a in self.state.row_aux.items()}
        request_aux: Any = {name: np.zeros(a.shape[1:], a.dtype) for name, a in self.state.request_aux.items()}
        return jax.device_put(transfers.ParkedState(row_aux, request_aux))

    @functools.cached_property
    def _sampling_modes(self) -> tuple[int | None, ...]:
        """`mode` of the sampling programs. A CPU branches for nothing, so there one program serves every batch."""
        return (None,) if jax.default_backend() == "cpu" else (GREEDY, SAMPLE, None)

    def _describe_sample(self, size: int, mode: int | None) -> Program:
        def args() -> tuple:
            logits = jax.ShapeDtypeStruct((size, self._limits.vocab_size), np.dtype(np.float32))
            return self.state, logits, np.zeros((size, 2), np.int32), *greedy_inputs(size)

        label = f"sample[rows={size} mode={mode}]"
        static = {"mode": mode, "implementation": self._implementation}
        return Program("sample", ("sample", size, mode), label, steps.sample_step, args, static)

    def _sample_program(self, size: int, mode: int | None) -> Callable[..., Any]:
        return self._program(("sample", size, mode), lambda: self._describe_sample(size, mode))

    def _describe_maintain(self, name: str, phase: str, kept: int) -> Program:
        def args() -> tuple:
            shape = self._limits.geometry.table_shape(self._methods[name].granularity)
            pages = np.zeros((*shape, self._limits.geometry.pages(kept)), np.int32)
            inputs = steps.MaintainInputs(np.int32(0), np.zeros(shape, np.int32), pages, np.int32(0))  # type: ignore[arg-type]
            return self._statics[name], self.state, inputs

        label, static = f"maintain[{name} {phase} keep={kept}]", {"phase": phase, "kept": kept}
        return Program("maintain", ("maintain", name, phase, kept), label, steps.maintain_step, args, static)

    def _maintain_program(self, name: str, phase: str, kept: int) -> Callable[..., Any]:
        return self._program(("maintain", name, phase, kept), lambda: self._describe_maintain(name, phase, kept))

    def _describe_count(self, name: str, phase: str, kept: int) -> Program:
        def args() -> tuple:
            return self._statics[name], self.state, np.int32(0), np.int32(0)

        label, static = f"count[{name} {phase} most={kept}]", {"phase": phase, "kept": kept}
        return Program("count", ("count", name, phase, kept), label, steps.count_step, args, static)

    # Packing

    def _sampling(self, rows: list[SamplingRow], size: int) -> tuple[np.ndarray, np.ndarray]:
        ints, floats = greedy_inputs(size)
        for i, row in enumerate(rows):
            general = row.has_bias or row.mask_stops or row.presence_penalty or row.frequency_penalty
            general = general or row.repetition_penalty != 1.0
            mode = GENERAL if general else SAMPLE if row.temperature > 0 else GREEDY
            seed = row.seed % 2**64
            low, high = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
            ints[i] = (mode, row.top_k, low, high, row.position, row.logprobs, row.mask_stops, row.has_bias)
            floats[i] = (
                row.temperature,
                row.top_p,
                row.min_p,
                row.presence_penalty,
                row.frequency_penalty,
                row.repetition_penalty,
            )
        return ints, floats

    def _updates(self, rows: Iterable[tuple[int, np.ndarray | None]], width: int) -> np.ndarray:
        """int32 [width, 5] of (layer, head, row, column, page); padding sets the null row's entry to the null page."""
        packed = np.zeros((width, 5), np.int32)
        used = 0
        for row, updates in rows:
            if updates is None or not len(updates):
                continue
            end = used + len(updates)
            if end > width:
                raise ValueError(f"{end} page table updates do not fit a program made for {width}")
            packed[used:end, [0, 1, 3, 4]] = updates
            packed[used:end, 2] = row
            used = end
        return packed

    def _tables_per_row(self, name: str) -> int:
        layers, heads = self._limits.geometry.table_shape(self._methods[name].granularity)
        return layers * heads

    def _decode_inputs(self, name: str, rows: list[DecodeRow], bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """`rows` and `updates` of `steps.decode_logits`."""
        table = np.zeros((bucket, 2), np.int32)
        table[:, 1] = -1
        for i, row in enumerate(rows):
            table[i] = row.row, -1 if row.token is None else row.token
        updates = self._updates(((r.row, r.table_updates) for r in rows), bucket * self._tables_per_row(name))
        return table, updates

    def _prefill_inputs(
        self, name: str, rows: list[PrefillRow], bucket: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`tokens`, `rows` and `updates` of `steps.prefill_logits`."""
        size, chunk = bucket
        tokens = np.zeros((size, chunk), np.int32)
        table = np.zeros((size, 4), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = row.tokens
            table[i] = row.row, len(row.tokens), row.first, row.sample
        width = size * (self._limits.geometry.pages(chunk) + 1) * self._tables_per_row(name)
        updates = self._updates(((r.row, r.table_updates) for r in rows), width)
        return tokens, table, updates

    def _replay_inputs(
        self, name: str, plan: ReplayRow | None, bucket: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`tokens`, `rows` and `updates` of `steps.replay_chunk`."""
        size, chunk = bucket
        tokens, table = np.zeros((size, chunk), np.int32), np.zeros((size, 3), np.int32)
        if plan is not None:
            tokens[0, : len(plan.tokens)] = plan.tokens
            table[0] = plan.row, len(plan.tokens), plan.index
        updates = [] if plan is None else [(plan.row, plan.table_updates)]
        width = (self._limits.geometry.pages(chunk) + 1) * self._tables_per_row(name)
        return tokens, table, self._updates(updates, width)

    def _head_pages(self, name: str, pages: np.ndarray) -> np.ndarray:
        """int32 [n * head-pages per page] of page ids [n] of the method's granularity."""
        span = self._limits.geometry.head_pages_per_page(self._methods[name].granularity)
        return (pages.astype(np.int32)[:, None] * span + np.arange(span, dtype=np.int32)).reshape(-1)

    # Plans

    def setup_row(self, row: int, logit_bias: tuple[tuple[int, float], ...], stop_ids: tuple[int, ...]) -> None:
        inputs = _setup(logit_bias, stop_ids)
        self.state = self._run("setup_row", None, transfers.setup_row, np.int32(row), *inputs)

    def decode(self, method: str, rows: list[DecodeRow]) -> StepTicket:
        bucket = next(size for size in self._limits.decode_buckets if size >= len(rows))
        inputs = self._decode_inputs(method, rows, bucket)
        self.state, logits = self._decode_program(method, bucket)(self.weights, self.state, *inputs)
        return self._sample(logits, [(row.row, 1) for row in rows], [row.sampling for row in rows])

    def prefill(self, method: str, rows: list[PrefillRow]) -> StepTicket:
        bucket = self._bucket(len(rows), max(len(row.tokens) for row in rows))
        inputs = self._prefill_inputs(method, rows, bucket)
        self.state, logits = self._prefill_program(method, bucket)(self.weights, self.state, *inputs)
        return self._sample(logits, [(row.row, row.sample) for row in rows], [row.sampling for row in rows])

    def replay(self, method: str, plan: ReplayRow) -> ReplayTicket:
        bucket = self._bucket(1, len(plan.tokens))
        inputs = self._replay_inputs(method, plan, bucket)
        self.state, ok = self._replay_program(method, bucket)(self.weights, self.state, *inputs)
        return ReplayTicket(ok)

    def _sample(self, logits: jax.Array, rows: list[tuple[int, int]], sampling: list[SamplingRow]) -> StepTicket:
        """Submits the sampling of a step whose logits are under way. `rows` are (row, sample)."""
        size = logits.shape[0]
        table = np.zeros((size, 2), np.int32)
        table[: len(rows)] = rows
        ints, floats = self._sampling(sampling, size)
        wants_logprobs = any(row.logprobs >= 0 for row in sampling)
        mode = None if wants_logprobs else int(ints[:, INT_COLUMNS.index("mode")].max())
        program = self._sample_program(size, mode if mode in self._sampling_modes else None)
        self.state, packed = program(self.state, logits, table, ints, floats)
        return StepTicket(packed, logits, len(sampling), wants_logprobs)

    def count(self, method: str, plan: CountRow) -> ArrayTicket:
        kept = self._counts(self._methods[method], plan.phase)
        if not kept:
            raise ValueError(f"count: {method} counts nothing after {plan.phase!r}")
        key = "count", method, plan.phase, kept
        program = self._program(key, lambda: self._describe_count(method, plan.phase, kept))
        return ArrayTicket(program(self.state, np.int32(plan.row), np.int32(plan.observed_tokens)))

    def maintain(self, method: str, plan: MaintainRow) -> tuple[EvictedPages, ...]:
        if plan.asked is not None:
            return self._recall.spill(method, plan)
        geometry, due = self._limits.geometry, plan.kept < plan.length
        if not due.any() or (plan.kept > plan.length).any():
            raise ValueError(f"maintain: {plan.kept.tolist()} rows of {plan.length.tolist()} can't be kept")
        most = int(plan.kept[due].max())
        capacity = max(most, self._kept[method].get(plan.phase, most))
        pages = np.zeros((*plan.kept.shape, geometry.pages(capacity)), np.int32)
        pages[..., : plan.new_pages.shape[2]] = plan.new_pages
        numbers: tuple[Any, ...] = (
            np.int32(plan.row),
            plan.kept.astype(np.int32),
            pages,
            np.int32(plan.observed_tokens),
        )
        inputs = steps.MaintainInputs(*numbers)
        self.state = self._maintain_program(method, plan.phase, capacity)(self.state, inputs)
        return ()

    def probe(self, method: str, plan: ProbeRow) -> Scores:
        return self._recall.probe(method, plan)

    def lend(self, method: str, plan: LendPages) -> int:
        return self._recall.lend(method, plan)

    def front(self, method: str, plan: FrontRow) -> None:
        self._recall.front(method, plan)

    def score_rows(self, method: str, plan: ScoreRow, scores: RowScores | None) -> RowScores:
        return self._prune.score(method, plan, scores)

    def read_scores(self, scores: RowScores) -> ArrayTicket:
        return ArrayTicket(scores.payload)

    def pack_rows(self, method: str, plan: PackRows) -> None:
        self._prune.pack(method, plan)

    def fork(self, method: str, plan: ForkRow) -> None:
        if plan.copies:
            self.copy_pages(method, plan.copies)
        args = np.int32(plan.source), np.int32(plan.target), self._fork_updates(method, plan.target, plan.table_updates)
        self.state = self._run("fork_row", method, transfers.fork_row, *args)

    def _fork_updates(self, method: str, row: int, table_updates: np.ndarray | None) -> np.ndarray:
        return self._updates([(row, table_updates)], self._tables_per_row(method) * self._limits.geometry.max_pages)

    def _copy(self, source: np.ndarray, target: np.ndarray) -> None:
        block = self._limits.geometry.head_pages_per_sequence_page
        for start in range(0, len(source), block):
            part = slice(start, start + block)
            args = _padded(source[part], block), _padded(target[part], block)
            self.state = self._run("copy_pages", None, transfers.copy_pages, *args)

    def export_row(self, method: str, row: int, pages: np.ndarray) -> SwappedRow:
        head_pages = self._head_pages(method, pages[pages >= 0])
        row_state = self._run("export_row_state", method, transfers.export_row_state, np.int32(row))
        return self._export(head_pages, row_state)

    def _export(self, head_pages: np.ndarray, row_state: transfers.RowState | transfers.ParkedState) -> SwappedRow:
        blocks = [self._run("export_rows", None, transfers.export_rows, ids) for ids in self._blocks(head_pages)]
        return exported.swapped(exported.Exported(row_state, blocks, len(head_pages)))

    def import_row(self, method: str, row: int, pages: np.ndarray, swapped: SwappedRow) -> None:
        row_state = self._import_pages(method, pages, swapped)
        args = np.int32(row), row_state, self._whole_table(method, pages)
        self.state = self._run("import_row_state", method, transfers.import_row_state, *args)

    def _import_pages(self, method: str, pages: np.ndarray, swapped: SwappedRow) -> Any:
        """Writes a swapped row's pages; returns what it had beside them."""
        row: exported.Exported = swapped.payload
        head_pages = self._head_pages(method, pages[pages >= 0])
        if len(head_pages) != row.num_head_pages:
            raise ValueError(f"row of {row.num_head_pages} head-pages can't be restored into {len(head_pages)}")
        row_state, blocks = row.arrays
        for ids, block in zip(self._blocks(head_pages), blocks, strict=True):
            self.state = self._run("import_rows", None, transfers.import_rows, ids, transfers.to_device(block))
        return transfers.to_device(row_state)

    def park(self, method: str, row: int, leave: bool = True) -> ParkedRow:
        parked = self._run("park_row", None, transfers.park_row, np.int32(row))
        return ParkedRow(parked, _nbytes(parked))

    def trim(self, method: str, parked: ParkedRow, tokens: int) -> ParkedRow:
        return parked  # lengths and positions are the host's while nobody has the row

    def unpark(self, method: str, plan: UnparkRow) -> None:
        counts = np.zeros(self._limits.vocab_size, np.int32)
        counts[plan.seen] = IN_PROMPT
        numbers = plan.lengths.astype(np.int32), np.int32(len(plan.seen)), counts
        parked = self._nothing if plan.parked is None else plan.parked.payload
        args = np.int32(plan.row), parked, self._whole_table(method, plan.pages), *numbers
        self.state = self._run("unpark_row", method, transfers.unpark_row, *args)

    def bare(self, method: str, plan: UnparkRow) -> ParkedRow:
        return ParkedRow(self._nothing, _nbytes(self._nothing))

    def export_parked(self, method: str, pages: np.ndarray, parked: ParkedRow) -> SwappedRow:
        return self._export(self._head_pages(method, pages[pages >= 0]), parked.payload)

    def import_parked(self, method: str, pages: np.ndarray, swapped: SwappedRow) -> ParkedRow:
        row_state = self._import_pages(method, pages, swapped)
        parked = transfers.ParkedState(row_state.row_aux, row_state.request_aux)
        return ParkedRow(parked, _nbytes(parked))

    def export_pages(self, method: str, pages: np.ndarray) -> SwappedRow:
        return self._export(self._head_pages(method, pages), transfers.ParkedState({}, {}))

    def import_pages(self, method: str, pages: np.ndarray, swapped: SwappedRow) -> None:
        self._import_pages(method, pages, swapped)

    def arrived(self, swapped: SwappedRow) -> bool:
        return all(leaf.is_ready() for leaf in jax.tree.leaves(swapped.payload.arrays))

    def pack(self, method: str, swapped: SwappedRow) -> dict[str, np.ndarray]:
        return exported.pack(swapped)

    def unpack(self, method: str, arrays: dict[str, np.ndarray]) -> SwappedRow:
        return exported.unpack(arrays, self.state, self._block_size)

    def copy_pages(self, method: str, copies: tuple[tuple[int, int], ...]) -> None:
        source, target = np.asarray(copies, np.int32).T
        self._copy(self._head_pages(method, source), self._head_pages(method, target))

    def _whole_table(self, method: str, pages: np.ndarray) -> np.ndarray:
        """int32 [layers, heads, max_pages] of the pages [layers, heads, columns] of a row; -1 for none."""
        geometry = self._limits.geometry
        table = np.zeros((*geometry.table_shape(self._methods[method].granularity), geometry.max_pages), np.int32)
        table[:, :, : pages.shape[2]] = np.maximum(pages, 0)
        return table

    @property
    def _block_size(self) -> int:
        return EXPORT_COLUMNS * self._limits.geometry.head_pages_per_sequence_page

    def _blocks(self, head_pages: np.ndarray) -> Iterator[np.ndarray]:
        size = self._block_size
        for start in range(0, len(head_pages), size):
            yield _padded(head_pages[start : start + size], size)


def _is_of(key: Hashable, method: str) -> bool:
    return isinstance(key, tuple) and method in key


def _setup(logit_bias: tuple[tuple[int, float], ...], stop_ids: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """`bias_ids`, `bias_values` and `stop_ids` of `transfers.setup_row`."""
    ids, values = np.zeros(MAX_BIAS, np.int32), np.zeros(MAX_BIAS, np.float32)
    for i, (token, value) in enumerate(logit_bias):
        ids[i], values[i] = token, value
    stops = np.full(MAX_STOP_IDS, -1, np.int32)
    stops[: len(stop_ids)] = stop_ids
    return ids, values, stops


def _decode_options(rows: int) -> dict[str, Any]:
    """XLA's options for a decode program."""
    return {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" and rows >= CUBLAS_ROWS else {}


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out
