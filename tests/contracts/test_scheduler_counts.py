"""Compactions whose sizes the device decides: the row waits for its counts, others go on, nothing leaks."""

from __future__ import annotations

import numpy as np
import pytest

from sparsejax.geometry import Granularity
from sparsejax.mock import MockMethod
from sparsejax.settings import EngineSettings
from tests.contracts.test_scheduler_replays import only, watched
from tests.host.bench import Bench

RAGGED = MockMethod("ragged", Granularity.HEAD, prompt_budget=13, ragged=True)
BOTH = MockMethod("both", Granularity.HEAD, prompt_budget=13, replay_chunk=15, ragged=True)
METHODS = (MockMethod(), RAGGED, BOTH)
PROMPT = 40


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_counts_come_before_the_compaction_and_the_compaction_before_the_next_token(depth: int) -> None:
    bench, calls = watched(EngineSettings(max_inflight_steps=depth), methods=METHODS, prefill_buckets=((1, 16),))
    a, b = bench.submit(PROMPT, 4, "ragged"), bench.submit(PROMPT, 4, "both")
    bench.run()
    bench.check_done(a, b)
    names = [name for _, name in calls]
    assert names.count("count") == names.count("maintain") == 2
    assert names.index("maintain") > names.index("count")
    alone, calls = watched(EngineSettings(max_inflight_steps=depth), methods=METHODS, prefill_buckets=((1, 16),))
    alone.submit(PROMPT, 4, "both")
    alone.run()
    assert [name for _, name in calls] == ["prefill"] * 3 + ["replay"] * 3 + ["count", "maintain"] + ["decode"] * 3


def test_others_decode_while_a_row_waits_for_its_counts() -> None:
    bench, _ = watched(EngineSettings(max_inflight_steps=4), methods=METHODS, step_s=1.0, num_rows=4)
    decoders = [bench.submit(8, 60) for _ in range(2)]
    bench.step(3)
    a = bench.submit(PROMPT, 9, "ragged")
    waited = 0
    while not bench.reason(a):
        before = [only(bench, i).dispatched for i in decoders]
        bench.step()
        assert [only(bench, i).dispatched - n for i, n in zip(decoders, before, strict=True)] == [1, 1]
        seq = bench.scheduler.groups[a].choices[0] if a in bench.scheduler.groups else None
        if seq is not None and seq.counting is not None:
            waited += 1
            assert seq.dispatched == 1, "nothing is decoded before the compaction"
            assert seq.pages.lengths.max() == PROMPT
    assert 1 <= waited <= 4
    bench.run()
    bench.check_done(a, *decoders)


def test_heads_keep_what_the_device_says_and_their_pages_return() -> None:
    bench, _ = watched(methods=METHODS)
    a = bench.submit(PROMPT, 9, "ragged")
    while not (seq := only(bench, a)).pages or seq.pages.lengths.max() != PROMPT:
        bench.step()
    while seq.pages.lengths.min() == PROMPT:
        bench.step()
    kept = seq.pages.lengths - (seq.computed - PROMPT)
    assert kept.sum(1).tolist() == [2 * 13, 2 * 13]
    assert kept.min() < 13 < kept.max() <= 26
    assert seq.pages.count == int((-(-seq.pages.lengths // 4)).sum())
    bench.run()
    bench.check_done(a)


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("method", ["ragged", "both"])
def test_cancel_at_any_moment_leaks_nothing(steps: int, method: str) -> None:
    settings = EngineSettings(max_inflight_steps=4)
    bench, _ = watched(settings, methods=METHODS, step_s=1.0, prefill_buckets=((1, 16),), num_rows=2)
    a, b = bench.submit(PROMPT, 30, method), bench.submit(PROMPT, 8, method)
    if steps:
        bench.step(steps)
    bench.scheduler.cancel(a)
    bench.check()
    c = bench.submit(PROMPT, 8, method)
    bench.run()
    bench.check_done(b, c)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("method", ["ragged", "both"])
def test_preemption_at_any_moment_changes_no_token(steps: int, method: str, swap_bytes: int) -> None:
    """A row that was rebuilt is counted anew; the mock refuses a compaction with counts of before."""
    settings = EngineSettings(max_inflight_steps=4, swap_bytes=swap_bytes)
    bench, _ = watched(settings, methods=METHODS, step_s=1.0, prefill_buckets=((1, 16),), num_rows=2)
    a = bench.submit(PROMPT, 20, method)
    bench.step()
    b = bench.submit(8, 30)
    for _ in range(steps):
        bench.step()
    bench.scheduler._preempt(only(bench, a))
    bench.check()
    bench.run()
    bench.check_done(a, b)


@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("method", ["ragged", "both"])
def test_real_use_never_exceeds_the_reservation(method: str, window: int) -> None:
    settings = EngineSettings(decode_window_tokens=window, min_decode_window_tokens=1, max_decode_window_tokens=window)
    bench = Bench(settings, methods=METHODS, prefill_buckets=((1, 16), (1, 32)))
    ids = [bench.submit(30 + 7 * i, 40, method) for i in range(4)]
    while bench.step():
        for seq in bench.scheduler.memory.holders.values():
            assert seq.pages.count <= seq.reserved_pages
    bench.check_done(*ids)


def test_the_least_pool_suffices_however_heads_share() -> None:
    facts, least = RAGGED, None
    for pages in range(8, 60):
        bench = Bench(methods=METHODS, num_sequence_pages=pages)
        memory = bench.scheduler.memory
        if memory.most_tokens(facts, PROMPT, 30) == 30:
            least = pages
            break
    assert least is not None
    for seed in range(6):
        bench = Bench(methods=METHODS, num_sequence_pages=least)
        ids = [bench.submit([seed + i] * PROMPT, 30, "ragged") for i in range(2)]
        bench.run()
        bench.check_done(*ids)


@pytest.mark.parametrize("counts", [np.full((2, 2), 0), np.full((2, 2), 41), np.full((2, 1), 13)])
def test_impossible_counts_end_only_their_request(counts: np.ndarray) -> None:
    bench, _ = watched(methods=METHODS)
    a, b = bench.submit(PROMPT, 9, "ragged"), bench.submit(PROMPT, 9)
    while not bench.reason(a):
        seq = only(bench, a)
        if seq.counts is not None or seq.counting is not None:
            seq.counts, seq.counting = counts.astype(np.int32), None
        bench.step()
    assert bench.reason(a) == "error"
    assert "counts" in str(bench.last(a).error)
    bench.run()
    bench.check_done(b)


def test_choices_of_one_prompt_are_counted_each() -> None:
    bench, calls = watched(methods=METHODS)
    a = bench.submit(41, 10, "ragged", n=3)
    bench.run()
    bench.check_done(a)
    assert [name for _, name in calls].count("count") == 3
