"""Compiling several programs at once: what is given back, how much is held, and what happens when it fails."""

from __future__ import annotations

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from sparsejax.programs import MOST_WORKERS, Program, compile_all, compile_one, compile_workers

TIMEOUT_S = 30.0


class Jitted:
    """Stands for a jitted function: `compile` runs when a lowered program is compiled."""

    def __init__(self, compile=lambda number: None) -> None:
        self._compile = compile
        self.lowered = 0  # but not compiled yet
        self.most_lowered = 0
        self.compiled: list[int] = []
        self.lowering_threads: set[int] = set()
        self._lock = threading.Lock()

    def lower(self, number: int):
        with self._lock:
            self.lowering_threads.add(threading.get_ident())
            self.lowered += 1
            self.most_lowered = max(self.most_lowered, self.lowered)
        return _Lowered(self, number)


@dataclasses.dataclass
class _Lowered:
    jitted: Jitted
    number: int

    def compile(self, options=None):
        self.jitted._compile(self.number)
        with self.jitted._lock:
            self.jitted.lowered -= 1
            self.jitted.compiled.append(self.number)
        return self.number


def programs(jitted: Jitted, count: int) -> list[Program]:
    return [Program("kind", i, f"program {i}", jitted, lambda i=i: (i,)) for i in range(count)]


@pytest.mark.parametrize("workers", [1, 3])
def test_every_program_is_given_once_and_few_are_held(workers):
    jitted = Jitted(lambda number: time.sleep(0.01))
    found = list(compile_all(programs(jitted, 12), workers))
    assert sorted(compiled.call for compiled in found) == list(range(12))
    assert all(compiled.call == compiled.program.key for compiled in found)
    assert all(compiled.compile_s >= 0.01 for compiled in found)
    assert jitted.most_lowered <= (1 if workers == 1 else workers + 1)
    assert jitted.lowering_threads == {threading.get_ident()}


def test_programs_are_compiled_at_once():
    both = threading.Barrier(2)
    jitted = Jitted(lambda number: both.wait(TIMEOUT_S))  # breaks if they come one after the other
    assert len(list(compile_all(programs(jitted, 4), 2))) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_names_the_program_and_drops_the_rest(workers):
    def fail(number: int) -> None:
        if number == 1:
            raise MemoryError("no room")

    jitted = Jitted(fail)
    with pytest.raises(MemoryError, match="no room") as raised:
        list(compile_all(programs(jitted, 20), workers))
    assert raised.value.__notes__ == ["while compiling program 1"]
    assert 1 not in jitted.compiled
    assert len(jitted.compiled) < 6


def test_what_cannot_be_lowered_is_named():
    program = Program("kind", 0, "program 0", Jitted(), lambda: 1 / 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError) as raised:
        compile_one(program)
    assert raised.value.__notes__ == ["while lowering program 0"]


def test_an_interrupt_drops_what_has_not_begun():
    go, begun = threading.Event(), threading.Semaphore(0)

    def wait(number: int) -> None:
        begun.release()
        go.wait(TIMEOUT_S)

    jitted = Jitted(wait)

    def interrupted():
        yield from programs(jitted, 3)
        for _ in range(2):
            assert begun.acquire(timeout=TIMEOUT_S)
        raise KeyboardInterrupt

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        list(compile_all(interrupted(), 2))
    assert time.perf_counter() - start < TIMEOUT_S / 2, "waited for compilations under way"
    go.set()
    deadline = time.perf_counter() + TIMEOUT_S
    while len(jitted.compiled) < 2 and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert not begun.acquire(timeout=0.1), "the third program was begun"
    assert sorted(jitted.compiled) == [0, 1]


def test_shapes_are_enough_and_donated_arguments_stay():
    add = jax.jit(lambda x, y: x + y, donate_argnums=0)
    array = jnp.arange(4.0)
    abstract = jax.ShapeDtypeStruct((4,), jnp.float32)
    by_array = Program("add", 0, "add", add, lambda: (array, array))
    by_shape = Program("add", 1, "add", add, lambda: (abstract, abstract))
    for compiled in compile_all([by_array, by_shape], 2):
        assert compiled.call(jnp.arange(4.0), array).tolist() == [0, 2, 4, 6]
    assert not array.is_deleted()


def test_workers_are_few():
    assert 1 <= compile_workers() <= MOST_WORKERS
