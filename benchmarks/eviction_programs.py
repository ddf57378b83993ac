"""Prompt chunks, decode steps and compactions of several methods on one pool of random rows, each timed from one state.

    bench = Bench(spec, weights, shape, {"dense": dense, "other": method})
    failed = bench.compile()
    seconds = bench.chunk("other", 28672)()

Every method has its own arrays and page table; keys and values, which cost most memory, are shared. Before each
measured call table and lengths are set to what they were, so that calls repeat. Keys have a part in common.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import eviction_plan, filled_state, step_timing
from benchmarks.eviction_plan import Compaction
from sparsejax import steps
from sparsejax.arrays import tree_empty
from sparsejax.method import EvictContext
from sparsejax.programs import Program, compile_workers
from sparsejax.state import KVState, StateSize, empty_state, state_specs

Key = tuple[Any, ...]

ENOUGH_S = 0.05
"""Calls that are sent off together take about so long, so that one wait for the device weighs little."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes in tokens, but for `batches`, in rows, and `steps`, decode steps of one measurement.

    Attributes:
      answer: decoded tokens that plans follow.
    """

    page: int
    context: int
    chunk: int
    answer: int
    batches: tuple[int, ...]
    steps: int = 32


def spread_rows(params: Any, context: EvictContext) -> jax.Array:
    """As many rows as wanted, spread over the prompt: what a compaction costs where the choice costs nothing."""
    return (jnp.arange(context.kept, dtype=jnp.int32) * context.length // context.kept)[None]


def geometry_of(spec: Any, shape: Shape, methods: dict[str, Any]) -> Any:
    """With room for the prompt, its answer or what methods put behind it, and a page of new tokens."""
    longest = max(max(method.replay_lengths(shape.context), default=0) for method in methods.values())
    return spec.geometry(shape.page, step_timing.window(shape.context + max(longest, shape.answer), shape.page))


@jax.jit
def fresh(arrays: Any) -> Any:
    """Copies, which may be donated."""
    return jax.tree.map(jnp.copy, arrays)


@dataclasses.dataclass
class Side:
    """A method with its arrays: `aux` is page, row and request aux, `starts` tables, lengths and positions by start."""

    method: Any
    statics: steps.Statics
    plan: eviction_plan.Plan
    aux: tuple[Any, Any, Any]
    starts: dict[Key, Any] = dataclasses.field(default_factory=dict)


class Bench:
    """Programs of some methods for a model of some layers.

    Args:
      spec, weights: the model.
      shape: sizes.
      methods: by name; "dense" is among them.
      storage: of all.
      implementation: of the kernels, None to choose.
      resident: most rows of a row that decodes; as the plans say if not given.

    Attributes:
      sides: methods by name, with their plans.
      resident: as above.
      temp_bytes: what each program needs beside its arguments and results; None if XLA does not say.
    """

    def __init__(
        self,
        spec: Any,
        weights: Any,
        shape: Shape,
        methods: dict[str, Any],
        storage: Any,
        implementation: str | None,
        resident: int | None = None,
    ) -> None:
        self.spec, self.weights, self.shape = spec, weights, shape
        self.storage, self.implementation = storage, implementation
        self.geometry = geometry_of(spec, shape, methods)
        plans = {
            name: eviction_plan.plan(method, self.geometry, shape.context, shape.chunk, shape.answer)
            for name, method in methods.items()
        }
        self.resident = resident or max(int(plan.resident.max()) for name, plan in plans.items() if name != "dense")
        kept = [compaction.kept.max() for plan in plans.values() for compaction in plan.compactions.values()]
        self._deal(max(kept, default=0))
        self.size = StateSize(max(shape.batches), self.num_pages, spec.vocab_size)
        limits = types.SimpleNamespace(geometry=self.geometry, num_sequence_pages=self.num_pages)
        runner = types.SimpleNamespace(
            limits=limits, state=empty_state(self.geometry, self.size, (methods["dense"],), storage)
        )
        filled_state.fill_pages(runner, storage)
        pools = runner.state.pools
        self.state: KVState = runner.state.replace(pools={**pools, "k": _alike(pools["k"])})
        self.sides = {name: self._side(method, plans[name]) for name, method in methods.items()}
        self.tokens = np.random.default_rng(1).integers(0, spec.vocab_size, (1, shape.chunk)).astype(np.int32)
        self.logits: dict[str, jax.Array] = {}
        self.temp_bytes: dict[Key, int | None] = {}
        self._calls: dict[Key, Callable[..., Any]] = {}
        self._rest: dict[Key, tuple] = {}

    def _deal(self, kept: int) -> None:
        """Sequence pages of each row, in random order, and those that a compaction moves rows to."""
        pages, shape = self.geometry.pages, self.shape
        columns = self.geometry.max_pages, min(pages(self.resident + shape.steps + 1), self.geometry.max_pages)
        rows, new = max(shape.batches), pages(int(kept))
        self.num_pages = 1 + columns[0] + (rows - 1) * columns[1] + new
        order = 1 + np.random.default_rng(0).permutation(self.num_pages - 1).astype(np.int32)
        self._table = np.zeros((rows + 1, self.geometry.max_pages), np.int32)
        self._table[1] = order[: columns[0]]
        self._table[2:, : columns[1]] = order[columns[0] : self.num_pages - 1 - new].reshape(rows - 1, columns[1])
        self._new = order[self.num_pages - 1 - new :]

    def _side(self, method: Any, plan: eviction_plan.Plan) -> Side:
        specs = state_specs(self.geometry, self.size, (method,), self.storage)
        aux = tree_empty((specs.page_aux, specs.row_aux, specs.request_aux))
        return Side(method, self._statics(method), plan, jax.tree.map(_random, aux))

    def _statics(self, method: Any) -> steps.Statics:
        return steps.Statics(self.spec, self.geometry, method, self.storage, self.implementation)

    # States

    def _parts(self, method: Any) -> np.ndarray:
        """[layers, heads]: which part of a sequence page is whose."""
        layers, heads = self.geometry.table_shape(method.granularity)
        return np.arange(layers * heads, dtype=np.int32).reshape(layers, heads)

    def _start(self, side: Side, lengths: Any, position: int, rows: int = 1) -> Any:
        """Tables, lengths and positions in which rows 1..`rows` hold `lengths`. Made once and kept."""
        lengths = np.broadcast_to(np.asarray(lengths, np.int32), self._parts(side.method).shape)
        key = lengths.tobytes(), position, rows
        if key not in side.starts:
            parts, live = self._parts(side.method)[..., None, None], np.arange(len(self._table)) - 1 < rows
            live[0] = False
            table = np.where(self._table > 0, self._table * parts.size + parts, 0).astype(np.int32)
            held = np.where(live, lengths[..., None], 0).astype(np.int32)
            name = side.method.granularity.value
            positions = np.where(live, position, 0).astype(np.int32)
            arrays = jnp.asarray(table), jnp.asarray(held), jnp.asarray(positions)
            side.starts[key] = {name: arrays[0]}, {name: arrays[1]}, arrays[2]
        return side.starts[key]

    def _whole(self, side: Side, start: Any) -> KVState:
        aux = dict(zip(("page_aux", "row_aux", "request_aux"), side.aux, strict=True))
        tables, lengths, positions = start
        return self.state.replace(**aux, tables=tables, lengths=lengths, positions=positions)

    def _keep(self, side: Side, state: KVState) -> None:
        side.aux = state.page_aux, state.row_aux, state.request_aux
        self.state = state

    # Programs

    def _describe(self) -> Iterator[Program]:
        no_updates = np.zeros((1, 5), np.int32)
        for name, side in self.sides.items():
            rest = self.tokens, np.asarray([[1, self.shape.chunk, 0, 1]], np.int32), no_updates
            yield self._program((name, "chunk"), steps.prefill_logits, side, (self.weights,), rest)
            for batch in self.shape.batches:
                rows = np.stack([1 + np.arange(batch), np.full(batch, -1)], 1).astype(np.int32)
                yield self._program(
                    (name, "step", batch), steps.decode_logits, side, (self.weights,), (rows, no_updates)
                )
            if side.plan.replays:
                longest = max(side.plan.replays)
                padded = np.zeros((1, 1 << (longest - 1).bit_length()), np.int32)
                rest = padded, np.asarray([[1, longest, 0]], np.int32), no_updates
                yield self._program((name, "replay"), steps.replay_chunk, side, (self.weights,), rest)
            for when, compaction in side.plan.compactions.items():
                static = {"phase": compaction.phase, "kept": int(compaction.kept[compaction.due].max())}
                rest = (self._inputs(side.method, compaction),)
                yield self._program((name, when, "whole"), steps.maintain_step, side, (), rest, static)
                only = dataclasses.replace(side.method, keep_rows=spread_rows, survey=None)
                moving = dataclasses.replace(side, statics=self._statics(only))
                yield self._program((name, when, "moving"), steps.maintain_step, moving, (), rest, static)

    def _program(
        self, key: Key, function: Any, side: Side, first: tuple, rest: tuple, static: dict[str, Any] | None = None
    ) -> Program:
        def args() -> tuple:
            return side.statics, *first, self._whole(side, self._start(side, 1, 1)), *rest

        self._rest[key] = rest
        return Program(key[1], key, " ".join(map(str, key)), function, args, static or {})

    def _inputs(self, method: Any, compaction: Compaction) -> steps.MaintainInputs:
        due, kept = compaction.due, compaction.kept
        most = self.geometry.pages(int(kept[due].max()))
        parts = self._parts(method)
        pages = self._new[:most] * parts.size + parts[..., None]
        used = np.where(due, -(-kept // self.shape.page), 0)[..., None]
        pages = np.where(np.arange(most) < used, pages, 0).astype(np.int32)
        numbers = jnp.int32(1), jnp.asarray(kept, jnp.int32), jnp.asarray(pages), jnp.int32(compaction.observed)
        return steps.MaintainInputs(*numbers)

    def compile(self) -> dict[str, str]:
        """Compiles everything, several at once. Returns what went wrong, by method; those methods are given up."""
        failed: dict[str, str] = {}
        started: list[tuple[Key, Future]] = []
        with ThreadPoolExecutor(compile_workers()) as pool:
            for program in self._describe():
                try:
                    lowered = program.function.lower(*program.args(), **program.static)
                except Exception as error:  # one method must not cost the others a run
                    failed[program.key[0]] = f"lowering {program.label}: {type(error).__name__}: {error}"
                    continue
                started.append((program.key, pool.submit(lowered.compile)))
        for key, future in started:
            try:
                call = self._calls[key] = future.result()
            except Exception as error:
                failed[key[0]] = f"compiling {key}: {type(error).__name__}: {error}"
                continue
            self.temp_bytes[key] = getattr(call.memory_analysis(), "temp_size_in_bytes", None)
        for name in failed:
            del self.sides[name]
        return failed

    # Measurements: each returns a function that measures seconds once

    def _chunk(self, name: str, start: Any) -> None:
        side, key = self.sides[name], (name, "chunk")
        state, self.logits[name] = self._calls[key](self.weights, self._whole(side, start), *self._rest[key])
        self._keep(side, state)

    def chunk(self, name: str, history: int, repeats: int = 4) -> Callable[[], float]:
        """One prompt chunk after `history` rows."""
        start = self._start(self.sides[name], history, history)
        return self._timed(lambda: self._chunk(name, fresh(start)), repeats)

    def prompt(self, name: str) -> Callable[[], float]:
        """A whole prompt, in chunks that don't wait for one another; nothing is evicted."""
        start = self._start(self.sides[name], 0, 0)

        def run() -> None:
            self._chunk(name, fresh(start))
            for _ in range(self.shape.context // self.shape.chunk - 1):
                self._chunk(name, (self.state.tables, self.state.lengths, self.state.positions))

        return self._timed(run, 1)

    def step(self, name: str, batch: int, resident: Any) -> Callable[[], float]:
        """One decode step of rows that hold `resident` rows each, and a few more."""
        side, key = self.sides[name], (name, "step", batch)
        start = self._start(side, resident, self.shape.context, batch)

        def run() -> None:
            now = fresh(start)
            for _ in range(self.shape.steps):
                state, self.logits[name] = self._calls[key](self.weights, self._whole(side, now), *self._rest[key])
                self._keep(side, state)
                now = state.tables, state.lengths, state.positions

        whole = self._timed(run, 1)
        return lambda: whole() / self.shape.steps

    def replay(self, name: str) -> Callable[[], float]:
        """The longest replay of a whole prompt, in a program whose tokens are a power of two."""
        side, key = self.sides[name], (name, "replay")
        start = self._start(side, self.shape.context, self.shape.context)

        def run() -> None:
            state, _ = self._calls[key](self.weights, self._whole(side, fresh(start)), *self._rest[key])
            self._keep(side, state)

        return self._timed(run, 1)

    def compaction(self, name: str, when: str, part: str, repeats: int = 16) -> Callable[[], float]:
        """One compaction (see `Plan.compactions`): "whole" or only "moving"."""
        side, key = self.sides[name], (name, when, part)
        start = self._start(side, side.plan.compactions[when].lengths, self.shape.context)

        def run() -> None:
            self._keep(side, self._calls[key](self._whole(side, fresh(start)), *self._rest[key]))

        return self._timed(run, repeats)

    def _timed(self, run: Callable[[], None], repeats: int) -> Callable[[], float]:
        def measure(calls: int) -> float:
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            jax.block_until_ready(self.state)
            return (time.perf_counter() - begin) / calls

        measure(1)
        calls = max(1, min(repeats, int(ENOUGH_S / measure(1))))
        return lambda: measure(calls)

    def moved_bytes(self, name: str, compaction: Compaction) -> int:
        """What a compaction must read and write: the kept rows of layers and heads where something is due."""
        side = self.sides[name]
        specs = side.method.aux_specs(self.geometry)
        per_token = [array for aux, array in side.aux[0].items() if specs[aux].per == "token"]
        arrays = [*self.state.pools.values(), *per_token]
        row = sum(array.nbytes // (array.shape[0] * array.shape[1]) for array in arrays)
        heads = self.geometry.head_pages_per_sequence_page // compaction.kept.size
        return 2 * row * heads * int(compaction.kept[compaction.due].sum())

    def finite(self) -> dict[str, bool]:
        """Whether the last logits of each method were."""
        return {name: bool(jnp.isfinite(logits).all()) for name, logits in self.logits.items()}


@functools.partial(jax.jit, donate_argnums=0)
def _alike(keys: jax.Array) -> jax.Array:
    """Adds what all keys have in common: 7% of pairs get a cosine above 0.5, 98% of rows with one of the last 512."""
    return keys + jnp.asarray(0.5, keys.dtype)


def _random(array: jax.Array) -> jax.Array:
    """Random magnitudes for statistics, so that no choice is a tie; other arrays as they are."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return jnp.abs(jax.random.normal(jax.random.key(7), array.shape, jnp.float32)).astype(array.dtype)
