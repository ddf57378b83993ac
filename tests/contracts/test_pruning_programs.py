"""Prune jobs beside everything else, in any order: no page is lost, and nobody gets rows that are not what he was told.

What a hit finds is checked row by row, and what a request makes of it against a text that was read token by token on
the same rows (see `pruning_programs`).
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.contracts.pruning_programs import Program, run

_OTHERS = [
    "cancel",
    "cancel_job",
    "fork",
    "demote",
    "preempt",
    "evict",
    "drop",
    "fault",
    "pin",
    "keep",
    "delete",
    "wait",
]
small, any_ = st.integers(0, 9), st.integers(0, 999)
operations = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 110), st.integers(1, 12), st.integers(0, 34)),
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 110), st.integers(1, 12), st.integers(0, 34)),
    st.tuples(st.just("turn"), small, st.integers(1, 25), st.integers(1, 12), st.integers(0, 34)),
    st.tuples(st.just("turn"), small, st.integers(1, 25), st.integers(1, 12), st.integers(0, 34)),
    st.tuples(st.just("prune"), any_, st.integers(0, 29), st.integers(1, 9), st.integers(0, 59)),
    st.tuples(st.just("prune"), any_, st.integers(0, 29), st.integers(1, 9), st.integers(0, 59)),
    st.tuples(st.just("prune"), any_, st.integers(0, 29), st.integers(1, 9), st.integers(0, 59)),
    st.tuples(st.just("advance"), st.integers(1, 14)),
    st.tuples(st.just("advance"), st.integers(1, 14)),
    st.tuples(st.just("advance"), st.integers(1, 14)),
    st.tuples(st.sampled_from(_OTHERS), small),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(operations, min_size=20, max_size=60),
    st.integers(60, 240),
    st.integers(1, 4),
    st.sampled_from([0, 4000, 1 << 30]),
)
def test_random_programs(program, pages: int, inflight: int, swap_bytes: int) -> None:
    engine = Program(pages, inflight, swap_bytes)
    for operation, *args in program:
        engine.do(operation, *args)
    engine.finish()
    assert not engine.wrong


def test_a_long_program_prunes_and_finds() -> None:
    """What hypothesis draws may stay shallow; this one does not."""
    counts, wrong = run(750, 5)
    assert not wrong
    assert counts["hits"] > 100
    assert counts["hits_on_pruned"] > 40
    assert counts["compared_on_pruned"] > 40
    assert counts["job_completed"] > 30


@pytest.mark.slow
def test_no_hit_of_10000_operations_is_wrong() -> None:
    counts, wrong = run(10_000, 0)
    assert not wrong, wrong
    assert counts["hits"] > 2000
