"""The engine's own scheduler on a full batch: a window of consecutive decode steps, and whether it counts.

The contract: all rows are admitted and prefilled, warm-up steps of the whole batch follow, then the window. The device
is waited for at the window's two edges only; in between the engine schedules, decodes, samples, scores and evicts as it
does when it serves. A window is invalid if the batch was ever not full, if anything else than decode steps and their
evictions was asked for, if anything was compiled, or if a token is missing.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.plans import PrefillRow, StepResult
from sparsejax.request import Request, SamplingParams, TokenEvent
from sparsejax.runner import DeviceRunner
from sparsejax.scheduler import Scheduler
from sparsejax.state import KVState

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
# Evictions belong to decoding; everything else that a runner can be asked for does not.
EXPECTED = ("decode", "maintain")


@functools.cache
def _compilations() -> list[float]:
    """Seconds of every compilation in this process from the first call on."""
    found: list[float] = []

    def note(event: str, seconds: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    return found


@dataclasses.dataclass(frozen=True)
class Given:
    """The results of a program that did not run."""

    tokens: np.ndarray

    def is_ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return StepResult(self.tokens, np.ones(len(self.tokens), bool))


@functools.partial(jax.jit, static_argnames=("granularity",), donate_argnames=("state",))
def _place(state: KVState, rows: jax.Array, updates: jax.Array, *, granularity: str) -> KVState:
    """What a prompt chunk does to the books of its rows: int32 [n, 4] of (row, tokens, first, last token)."""
    layer, head, row, column, page = updates.T
    table = state.tables[granularity].at[layer, head, row, column].set(page)
    rows, tokens, first, last = rows.T
    lengths = state.lengths[granularity]
    start = lengths[:, :, rows] * (1 - first)[None, None, :]
    return state.replace(
        tables={**state.tables, granularity: table},
        lengths={**state.lengths, granularity: lengths.at[:, :, rows].set(start + tokens[None, None, :])},
        positions=state.positions.at[rows].set(state.positions[rows] * (1 - first) + tokens),
        last_tokens=state.last_tokens.at[rows].set(last),
    )


class FilledRunner(DeviceRunner):
    """Takes prompts as read: their rows are whatever lies in the pages they are given (`filled_state.fill_pages`)."""

    def prefill(self, method: str, rows: list[PrefillRow]) -> Given:  # type: ignore[override]
        geometry = self.limits.geometry
        tokens = np.array([row.tokens[-1] for row in rows], np.int32)
        table = np.array([(row.row, len(row.tokens), row.first, row.tokens[-1]) for row in rows], np.int32)
        width = len(rows) * geometry.max_pages * self._tables_per_row(method)
        updates = self._updates(((row.row, row.table_updates) for row in rows), width)
        granularity = self._methods[method].granularity.value
        self.state = _place(self.state, table, updates, granularity=granularity)
        return Given(np.where([row.sample for row in rows], tokens, -1).astype(np.int32))


def fill_row_aux(runner: DeviceRunner, seed: int = 0) -> None:
    """Random numbers from 0 to 1 in what methods remember of each row (observation windows, masses)."""
    filled = {}
    for i, (name, array) in enumerate(sorted(runner.state.row_aux.items())):
        key = jax.random.fold_in(jax.random.key(seed), i)
        random = jnp.issubdtype(array.dtype, jnp.floating)
        filled[name] = jax.random.uniform(key, array.shape, jnp.float32).astype(array.dtype) if random else array
    runner.state = runner.state.replace(row_aux=filled)


class Watched:
    """A runner that notes what it is asked for: `calls` by name, and the rows of every decode step."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.calls: collections.Counter[str] = collections.Counter()
        self.batches: list[int] = []

    @property
    def limits(self) -> Any:
        return self._runner.limits

    @property
    def state(self) -> Any:
        return self._runner.state

    def decode(self, method: str, rows: list[Any]) -> Any:
        self.batches.append(len(rows))
        return self._call("decode", method, rows)

    def _call(self, name: str, *args: Any) -> Any:
        self.calls[name] += 1
        return getattr(self._runner, name)(*args)

    def __getattr__(self, name: str) -> Any:
        if name in ("setup_row", "prefill", "maintain", "fork", "export_row", "import_row"):
            return functools.partial(self._call, name)
        raise AttributeError(name)


@dataclasses.dataclass(frozen=True)
class Window:
    """One measured window.

    Attributes:
      seconds: from one edge to the other.
      batches: rows of each decode step in it.
      calls: what the runner was asked for in it.
      compilations: programs compiled in it.
      delivered: tokens that the consumers got of these steps; what the device has at the end counts as well.
      ended: reasons of requests that ended before it did.
      lengths: resident tokens of each row at its start.
    """

    seconds: float
    batches: tuple[int, ...]
    calls: dict[str, int]
    compilations: int
    delivered: int
    ended: tuple[str, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Completed by the device between the edges."""
        return sum(self.batches)


def reasons(window: Window, batch: int, steps: int) -> list[str]:
    """Why a window is invalid; nothing if it is valid."""
    found = []
    if len(window.batches) != steps:
        found.append(f"{len(window.batches)} decode steps instead of {steps}")
    if partial := sum(size != batch for size in window.batches):
        found.append(f"{partial} steps without all {batch} rows")
    found += [f"{window.calls[name]} x {name}" for name in sorted(set(window.calls) - set(EXPECTED))]
    if window.compilations:
        found.append(f"{window.compilations} programs compiled")
    if window.ended:
        found.append(f"{len(window.ended)} requests ended: {', '.join(sorted(set(window.ended)))}")
    if window.delivered != batch * steps:
        found.append(f"{window.delivered} tokens delivered instead of {batch * steps}")
    return found


def resident_over(method: Any, lengths: Sequence[int], steps: int) -> float:
    """Mean resident tokens that the steps of a window attend to, the new one included, from lengths at its start."""
    now = np.asarray(lengths, np.int32)
    total = 0.0
    for _ in range(steps):
        now = now + 1
        total += float(now.mean())
        now = np.asarray(method.kept_after("token", now), np.int32)
    return total / steps


class FullBatch:
    """Requests of one method on a runner, driven by the engine's scheduler.

    Args:
      runner: holds the model; its last decode bucket must hold the batch.
      settings: of the engine.
      method: name of one of its methods.
      context: prompt tokens of each request.
    """

    def __init__(self, runner: Any, settings: Any, method: str, batch: int, context: int) -> None:
        self._runner, self._settings, self._method = runner, settings, method
        self._batch, self._context = batch, context
        self._delivered, self._ended = 0, []

    def _on_event(self, event: TokenEvent) -> None:
        self._delivered += len(event.token_ids)
        if event.finish_reason is not None:
            self._ended.append(event.finish_reason if event.error is None else f"{event.finish_reason}: {event.error}")

    def window(self, warm_up: int, steps: int, seed: int) -> Window:
        """Admits all requests, decodes `warm_up` steps with all of them, then measures `steps` more.

        Raises:
          RuntimeError: the batch can't be filled; says why.
        """
        compilations = _compilations()
        watched = Watched(self._runner)
        scheduler = Scheduler(watched, self._settings)
        self._delivered, self._ended = 0, []
        self._add(scheduler, seed)
        self._fill(scheduler, watched, warm_up)
        jax.block_until_ready(watched.state)
        before, delivered, compiled = watched.calls.copy(), self._submitted(scheduler), len(compilations)
        first = len(watched.batches)
        lengths = tuple(seq.pages.length for seq in scheduler.running if seq.pages is not None)
        start = time.perf_counter()
        for _ in range(steps):
            scheduler.step()
        jax.block_until_ready(watched.state)
        seconds = time.perf_counter() - start
        window = Window(
            seconds,
            tuple(watched.batches[first:]),
            dict(watched.calls - before),
            len(compilations) - compiled,
            self._submitted(scheduler) - delivered,
            tuple(self._ended),
            lengths,
        )
        for name in list(scheduler.groups):
            scheduler.cancel(name)
        while scheduler.step():
            pass
        return window

    def _submitted(self, scheduler: Scheduler) -> int:
        """Tokens that consumers have, and those that wait to be collected."""
        return self._delivered + sum(len(launch.rows) for launch in scheduler.launches)

    def _add(self, scheduler: Scheduler, seed: int) -> None:
        rng = np.random.default_rng(seed)
        limits = self._runner.limits
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=limits.geometry.max_model_len - self._context
        )
        for i in range(self._batch):
            ids = tuple(rng.integers(0, limits.vocab_size, self._context).tolist())
            scheduler.add(scheduler.prepare(Request(f"{i}", ids, params, self._method), self._on_event))

    def _fill(self, scheduler: Scheduler, watched: Watched, warm_up: int) -> None:
        """Steps until `warm_up` decode steps in a row had the whole batch."""
        chunk = max(tokens for _, tokens in self._runner.limits.prefill_buckets)
        most = admission_steps(self._batch, self._context, chunk) + warm_up
        for _ in range(most):
            if len(watched.batches) >= warm_up and set(watched.batches[-warm_up:]) == {self._batch}:
                return
            scheduler.step()
            if self._ended:
                raise RuntimeError(f"a request ended before the batch was full: {self._ended[0]}")
        raise RuntimeError(f"{max(watched.batches, default=0)} of {self._batch} rows after {most} steps")


def admission_steps(batch: int, context: int, chunk: int) -> int:
    """Most scheduler steps until the last of a batch of prompts is decoding: one chunk a step, and some to spare."""
    return batch * (-(-context // chunk) + 2) + 8
