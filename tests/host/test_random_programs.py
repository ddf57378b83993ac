"""Random programs of requests, cancellations, stops, faults and time on small pools, against the script run alone.

After every iteration all books are re-added; at the end everything is free, every choice has ended exactly once, and
what it emitted is a prefix of (or, if it ended by itself, equal to) what it would have generated alone.
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from sparsejax.errors import RequestError
from sparsejax.mock import METHODS
from sparsejax.settings import EngineSettings
from tests.host.bench import Bench

NAMES = [method.name for method in METHODS]
POISON, REFUSED = 252, 253  # never sampled by the script, never in an ordinary prompt

submits = st.tuples(
    st.just("submit"),
    st.sampled_from(NAMES),
    st.integers(1, 70),  # prompt tokens
    st.integers(1, 60),  # max_tokens
    st.sampled_from([1, 1, 1, 2, 4]),  # n
    st.sampled_from(["", "", "", "", "poison", "refuse", "stop id", "min tokens"]),
)
operations = st.one_of(
    submits,
    submits,
    st.tuples(st.just("advance"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("stop"), st.integers(0, 9), st.integers(0, 3)),
    st.tuples(st.just("preempt"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 3.0])),
)
machines = st.fixed_dictionaries(
    {
        "num_rows": st.integers(1, 6),
        "num_sequence_pages": st.integers(24, 60),
        "decode_buckets": st.sampled_from([(1, 2), (1, 2, 4, 8)]),
        "prefill_buckets": st.sampled_from([((1, 16),), ((2, 8), (1, 32)), ((1, 16), (4, 16), (1, 64), (2, 128))]),
        "eos_after": st.sampled_from([None, None, 5]),
        "step_s": st.sampled_from([0.0, 0.01]),
    }
)
engine_settings = st.builds(
    EngineSettings,
    max_inflight_steps=st.integers(1, 4),
    decode_window_tokens=st.sampled_from([1, 4, 1024]),
    min_decode_window_tokens=st.just(1),
    max_decode_window_tokens=st.sampled_from([1, 4, 4096]),
    stall_target_ms=st.sampled_from([0.1, 100.0]),
    swap_bytes=st.sampled_from([0, 4000, 1 << 30]),
)


def play(settings_: EngineSettings, machine: dict, program: list[tuple]) -> Bench:
    bench = Bench(settings_, **machine)
    bench.runner.poison(POISON)
    bench.runner.refuse(REFUSED)
    submitted: list[tuple[str, str]] = []
    for operation, *args in program:
        if operation == "submit":
            method, prompt_tokens, max_tokens, n, twist = args
            prompt = [(len(submitted) * 37 + i * 11) % 250 for i in range(prompt_tokens)]
            params: dict = {"n": n}
            if twist in ("poison", "refuse"):
                prompt[-1] = POISON if twist == "poison" else REFUSED
            elif twist == "stop id":
                params["stop_token_ids"] = (ord("e"), ord(" "))
            elif twist == "min tokens":
                params.update(min_tokens=min(8, max_tokens), stop_token_ids=(ord("e"),))
            try:
                submitted.append((bench.submit(prompt, max_tokens, method, **params), twist))
            except RequestError:
                continue
        elif operation == "advance":
            bench.step(args[0])
        elif operation == "wait":
            bench.clock.sleep(args[0])
        elif operation == "preempt":
            running = bench.scheduler.running
            if running:
                bench.scheduler._preempt(running[args[0] % len(running)])
                bench.check()
        elif submitted:
            request_id = submitted[args[0] % len(submitted)][0]
            if operation == "cancel":
                bench.scheduler.cancel(request_id)
            else:
                bench.scheduler.stop(request_id, args[1])
            bench.check()
    bench.run()
    for request_id, twist in submitted:
        for index in range(bench.requests[request_id].params.n):
            reason, tokens = bench.reason(request_id, index), bench.tokens(request_id, index)
            expected = bench.alone(request_id, index)
            assert reason is not None, "no last event"
            assert tokens == expected[: len(tokens)], "other tokens than alone"
            if twist in ("poison", "refuse"):
                assert reason in ("error", "cancelled", "stop")
                assert not tokens
            else:
                assert reason != "error", bench.last(request_id, index).error
            if reason == "length":
                assert tokens == expected
    return bench


@settings(max_examples=int(os.environ.get("SPARSEJAX_PROGRAMS", "120")), suppress_health_check=list(HealthCheck))
@given(engine_settings, machines, st.lists(operations, min_size=1, max_size=30))
def test_random_programs(settings_: EngineSettings, machine: dict, program: list[tuple]) -> None:
    play(settings_, machine, program)


@pytest.mark.slow
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(engine_settings, machines, st.lists(operations, min_size=1, max_size=200))
def test_many_long_random_programs(settings_: EngineSettings, machine: dict, program: list[tuple]) -> None:
    play(settings_, machine, program)
