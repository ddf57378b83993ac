"""Programs before they are compiled, and compiling several of them at once.

Tracing and lowering are Python and stay in the calling thread; XLA's compilation lets go of the interpreter, so threads
share the cores.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

log = logging.getLogger("sparsejax.programs")

MOST_WORKERS = 8
"""Compilations at once at most: each holds a lowered module and what the compiler makes of it."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to compile.

    Attributes:
      name: what its compilations are counted under ("decode").
      key: tells it from all other programs of a runner.
      label: for people ("decode[dense rows=4]").
      function: jitted.
      args: gives arguments of the right shapes, arrays or `jax.ShapeDtypeStruct`s. They are looked at, not used: a
        donated one stays valid.
      static: keyword arguments that are static.
      options: options of XLA's compiler.
    """

    name: str
    key: Hashable
    label: str
    function: Any
    args: Callable[[], tuple]
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program that can be called, and the seconds of wall-clock time that its two parts took."""

    program: Program
    call: Callable[..., Any]
    lower_s: float
    compile_s: float


@dataclasses.dataclass(frozen=True)
class _Lowered:
    program: Program
    lowered: Any
    lower_s: float


def compile_workers() -> int:
    """How many compilations at once suit this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def compile_one(program: Program) -> Compiled:
    """Compiles in the calling thread; what is raised names the program in a note."""
    return _compile(_lower(program))


def compile_all(programs: Iterable[Program], workers: int) -> Iterator[Compiled]:
    """Compiles programs, `workers` at once, and gives each as it is done.

    No more than one lowered program waits for a worker. When one can't be compiled, or the caller stops asking (an
    interrupt, for one), those that have not begun are dropped. A compilation under way can't be stopped: this does not
    wait for it, but the end of the interpreter does.
    """
    if workers <= 1:
        yield from map(compile_one, programs)
        return
    pool = ThreadPoolExecutor(workers, "compile")
    running: set[Future[Compiled]] = set()
    try:
        for program in programs:
            if len(running) > workers:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
            running.add(pool.submit(_compile, _lower(program)))
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _lower(program: Program) -> _Lowered:
    start = time.perf_counter()
    try:
        lowered = program.function.lower(*program.args(), **program.static)
    except Exception as error:
        error.add_note(f"while lowering {program.label}")
        raise
    return _Lowered(program, lowered, time.perf_counter() - start)


def _compile(lowered: _Lowered) -> Compiled:
    start = time.perf_counter()
    try:
        call: jax.stages.Compiled = lowered.lowered.compile(lowered.program.options or None)
    except Exception as error:
        error.add_note(f"while compiling {lowered.program.label}")
        raise
    found = Compiled(lowered.program, call, lowered.lower_s, time.perf_counter() - start)
    log.debug("%s: lowered in %.2f s, compiled in %.2f s", found.program.label, found.lower_s, found.compile_s)
    return found
