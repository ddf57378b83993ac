"""Replays: what the scheduler promises of methods that read a prompt once more before its row is compacted."""

from __future__ import annotations

import dataclasses

import pytest

from sparsejax.errors import CacheTooSmallError, ContextLengthError, RequestError
from sparsejax.geometry import Granularity
from sparsejax.mock import MockMethod
from sparsejax.rows import State
from sparsejax.settings import EngineSettings
from tests.host.bench import Bench

REPLAY = MockMethod("replay", Granularity.LAYER, prompt_budget=14, replay_chunk=7)
HEADS = MockMethod("heads", Granularity.HEAD, prompt_budget=9, replay_chunk=10)
METHODS = (MockMethod(), REPLAY, HEADS)
PROMPT = 40  # six replays of 8 tokens, of which the last has 6, or four of 11


def watched(settings: EngineSettings | None = None, **mock: object) -> tuple[Bench, list[tuple[int, str]]]:
    """A bench, and what it submits: (iteration, call)."""
    mock.setdefault("methods", METHODS)
    bench, calls = Bench(settings, **mock), []

    def noting(name: str, call):
        def noted(*args):
            calls.append((bench.scheduler.step_number, name))
            return call(*args)

        return noted

    for name in ("prefill", "replay", "count", "decode", "maintain"):
        setattr(bench.runner, name, noting(name, getattr(bench.runner, name)))
    return bench, calls


def only(bench: Bench, request_id: str):
    return bench.scheduler.groups[request_id].choices[0]


def until_replaying(bench: Bench, request_id: str, replayed: int = 1):
    """Steps until so many replays were submitted."""
    for _ in range(50):
        bench.step()
        seq = only(bench, request_id)
        if seq.state is State.REPLAY and seq.replayed == replayed:
            return seq
    raise AssertionError(bench.where())


@pytest.mark.parametrize("method", ["replay", "heads"])
@pytest.mark.parametrize("depth", [1, 3])
def test_replays_come_between_the_prompt_and_its_compaction(method: str, depth: int) -> None:
    bench, calls = watched(EngineSettings(max_inflight_steps=depth), prefill_buckets=((1, 16),))
    a = bench.submit(PROMPT, 5, method)
    bench.run()
    bench.check_done(a)
    count = len(bench.runner.limits.methods[method].replay_lengths(PROMPT))
    assert [name for _, name in calls] == ["prefill"] * 3 + ["replay"] * count + ["maintain"] + ["decode"] * 4


def test_a_short_prompt_is_not_replayed() -> None:
    bench, calls = watched()
    a = bench.submit(REPLAY.prompt_budget, 5, "replay")
    bench.run()
    bench.check_done(a)
    assert "replay" not in {name for _, name in calls}


def test_the_first_token_does_not_wait_for_replays() -> None:
    bench, calls = watched(EngineSettings(max_inflight_steps=1))
    a = bench.submit(PROMPT, 5, "replay")
    while not bench.tokens(a):
        bench.step()
    assert [name for _, name in calls].count("replay") <= 1
    bench.run()
    bench.check_done(a)


def test_a_prompt_of_a_single_answer_token_is_not_replayed() -> None:
    bench, calls = watched()
    a = bench.submit(PROMPT, 1, "replay")
    bench.run()
    bench.check_done(a)
    assert [name for _, name in calls] == ["prefill"]


def test_an_answer_that_ends_at_once_stops_its_replays() -> None:
    bench, calls = watched(eos_after=0, step_s=1.0)
    a = bench.submit(PROMPT, 9, "replay")
    bench.run()
    bench.check_done(a)
    assert bench.reason(a) == "stop"
    assert [name for _, name in calls].count("replay") <= 3
    assert "maintain" not in {name for _, name in calls}


def test_decoders_step_beside_replays_and_nothing_else_does() -> None:
    bench, calls = watched(num_rows=6, prefill_buckets=((1, 16), (2, 16)))
    decoders = [bench.submit(8, 80) for _ in range(2)]
    bench.step(4)
    began = bench.scheduler.step_number
    replaying = [bench.submit(PROMPT, 6, "replay"), bench.submit(PROMPT, 6, "heads"), bench.submit(100, 6)]
    while not all(bench.reason(i) for i in replaying):
        before = [only(bench, i).dispatched for i in decoders]
        bench.step()
        assert [only(bench, i).dispatched - n for i, n in zip(decoders, before, strict=True)] == [1, 1]
    for step in range(began, bench.scheduler.step_number):
        assert sum(at == step and name in ("prefill", "replay") for at, name in calls) <= 1
    bench.run()
    bench.check_done(*decoders, *replaying)


def test_a_replay_does_not_starve_a_short_prompt() -> None:
    bench, _ = watched(num_rows=4, step_s=0.2, methods=(MockMethod(), dataclasses.replace(REPLAY, replay_chunk=1)))
    long = bench.submit(200, 3, "replay")
    until_replaying(bench, long)
    started, short = bench.clock(), bench.submit(10, 3)
    while not bench.tokens(short):
        bench.step()
    assert bench.clock() - started < 2 * bench.scheduler.settings.starvation_bound_s
    assert only(bench, long).state is State.REPLAY
    bench.run()
    bench.check_done(long, short)


@pytest.mark.parametrize("method", ["replay", "heads"])
def test_pages_of_replays_are_promised_and_given_back(method: str) -> None:
    bench, _ = watched(prefill_buckets=((1, 16),))
    a = bench.submit(PROMPT, 4, method)
    memory, facts = bench.scheduler.memory, bench.runner.limits.methods[method]
    lengths = facts.replay_lengths(PROMPT)
    cells = 4 if method == "heads" else 2
    seq = until_replaying(bench, a)
    while seq.state is State.REPLAY:
        longest = max(lengths[seq.replayed :])
        assert seq.pages.count == 10 * cells, "the prompt's pages, and no more"
        assert seq.reserved_pages >= -(-(PROMPT + longest) // 4) * cells
        bench.step()
    kept = -(-(facts.prompt_budget + 3) // 4) * cells
    assert seq.reserved_pages <= kept
    bench.run()
    bench.check_done(a)
    assert memory.pool.free_head_pages == memory.pool.num_head_pages


def test_what_a_replay_needs_must_exist() -> None:
    """40 rows, 8 of a replay, 14 of the compaction: 12 and 4 pages of each of two layers."""
    assert Bench(methods=METHODS, num_sequence_pages=17).submit(PROMPT, 2, "replay")
    with pytest.raises(CacheTooSmallError):
        Bench(methods=METHODS, num_sequence_pages=16).submit(PROMPT, 2, "replay")
    bench = Bench(methods=METHODS, num_sequence_pages=17)
    ids = [bench.submit(PROMPT, 9, "replay") for _ in range(3)]
    bench.run()
    bench.check_done(*ids)


def test_what_can_never_be_replayed_is_refused_at_the_door() -> None:
    with pytest.raises(ContextLengthError, match="prompt of 60 tokens once more behind itself, in pieces of up to 8"):
        Bench(methods=METHODS, max_model_len=64).submit(60, 2, "replay")
    with pytest.raises(RequestError, match="pieces of 11 tokens, but the largest chunk is 8"):
        Bench(methods=METHODS, prefill_buckets=((4, 8),)).submit(PROMPT, 2, "heads")
    bench = Bench(methods=METHODS, max_model_len=64, prefill_buckets=((4, 8),))
    a = bench.submit(56, 2, "replay")
    bench.run()
    bench.check_done(a)


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("method", ["replay", "heads"])
def test_cancel_at_any_moment_leaks_nothing(steps: int, method: str) -> None:
    bench, _ = watched(step_s=1.0, prefill_buckets=((1, 16),), num_rows=2)
    a, b = bench.submit(PROMPT, 30, method), bench.submit(PROMPT, 8, method)
    if steps:
        bench.step(steps)
    bench.scheduler.cancel(a)
    bench.check()
    assert bench.reason(a) == "cancelled"
    c = bench.submit(PROMPT, 8, method)
    bench.run()
    bench.check_done(b, c)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
@pytest.mark.parametrize("steps", range(13))
@pytest.mark.parametrize("method", ["replay", "heads"])
def test_preemption_at_any_moment_changes_no_token(steps: int, method: str, swap_bytes: int) -> None:
    """The mock checks that every replay runs once, in order, before the compaction, also after a rebuild."""
    bench, calls = watched(EngineSettings(swap_bytes=swap_bytes), step_s=1.0, prefill_buckets=((1, 16),), num_rows=2)
    a = bench.submit(PROMPT, 20, method)
    bench.step()
    b = bench.submit(8, 30)
    for _ in range(steps):
        bench.step()
    seq = only(bench, a)
    replayed = seq.replayed
    bench.scheduler._preempt(seq)
    bench.check()
    assert seq.replayed == (replayed if swap_bytes else 0)
    bench.run()
    bench.check_done(a, b)
    count = len(bench.runner.limits.methods[method].replay_lengths(PROMPT))
    assert [name for _, name in calls].count("replay") == count + (0 if swap_bytes else replayed)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
def test_many_share_a_small_pool(swap_bytes: int) -> None:
    windows = {"decode_window_tokens": 4, "min_decode_window_tokens": 4, "max_decode_window_tokens": 4}
    bench, _ = watched(EngineSettings(swap_bytes=swap_bytes, **windows), num_sequence_pages=30, num_rows=6)
    ids = [bench.submit(30 + i, 40, ("replay", "heads", None)[i % 3]) for i in range(9)]
    bench.run()
    bench.check_done(*ids)


@pytest.mark.parametrize("method", ["replay", "heads"])
def test_choices_of_one_prompt_are_replayed_each(method: str) -> None:
    bench, calls = watched()
    a = bench.submit(41, 10, method, n=3)
    bench.run()
    bench.check_done(a)
    assert bench.runner.calls["fork"] == 2
    count = len(bench.runner.limits.methods[method].replay_lengths(41))
    assert [name for _, name in calls].count("replay") == 3 * count


@pytest.mark.parametrize("nth", [1, 3])
def test_a_refused_replay_ends_only_its_request(nth: int) -> None:
    bench, _ = watched()
    bench.runner.fail("replay", nth, RequestError("refused on purpose"))
    a, b = bench.submit(PROMPT, 9, "replay"), bench.submit(PROMPT, 9)
    bench.run()
    assert bench.reason(a) == "error"
    bench.check_done(b)


def test_an_engine_failure_in_a_replay_is_not_taken_for_a_refusal() -> None:
    bench, _ = watched()
    bench.runner.fail("replay", 2, ArithmeticError("device"))
    bench.submit(PROMPT, 9, "replay")
    with pytest.raises(RuntimeError, match="device"):
        bench.run()
