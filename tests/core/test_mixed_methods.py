"""Requests of many methods, which evict at different times from pages of different kinds, share a pool and a device.

What each says is what it says alone, host and device agree on every row, and everything is given back.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsejax import registry
from sparsejax.request import Request, SamplingParams
from sparsejax.rows import State
from sparsejax.runner import DeviceRunner
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings
from tests.contracts.compositions import RAGGED, small
from tests.core.harness import TINY, tiny_weights, tokens_of

METHODS = ("dense", "h2o", "pyramidkv", "rkv", RAGGED[0])
"""No eviction; between chunks and while decoding; layers in turn; by the clock; heads that the device counts."""
REQUESTS = st.lists(
    st.tuples(st.sampled_from(METHODS), st.integers(1, 44), st.integers(1, 20), st.integers(0, 6), st.booleans()),
    min_size=3,
    max_size=7,
)
"""Method, prompt tokens, answer tokens, iterations until the next one comes, whether it is cancelled half way."""


@pytest.fixture(scope="module")
def runner() -> DeviceRunner:
    methods = {}
    for name in METHODS:
        methods[name], storage = registry.resolve(name, small(name))
    found = DeviceRunner(
        TINY,
        tiny_weights(TINY),
        TINY.geometry(4, 64),
        methods,
        storage,
        num_rows=4,
        num_sequence_pages=40,
        decode_buckets=(4,),
        prefill_buckets=((2, 24),),
        fail_on_retrace=True,
    )
    for _ in found.compile(found.programs(), 2):
        pass
    found.seal()
    return found


class Served:
    """A scheduler on the runner, and what it delivered."""

    def __init__(self, runner: DeviceRunner) -> None:
        self.runner = runner
        self.scheduler = Scheduler(runner, EngineSettings(min_decode_window_tokens=4, max_decode_window_tokens=4))
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str | None] = {}

    def submit(self, name: str, method: str, prompt: list[int], count: int) -> None:
        self.tokens[name] = []

        def hear(event) -> None:
            assert event.error is None
            self.tokens[name].extend(event.token_ids)
            self.reasons[name] = event.finish_reason

        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.scheduler.add(self.scheduler.prepare(Request(name, tuple(prompt), params, method), hear))

    def step(self) -> bool:
        busy = self.scheduler.step()
        self.scheduler.check_integrity()
        lengths = {name: np.asarray(array) for name, array in self.runner.state.lengths.items()}
        for seq in self.scheduler.running:
            if seq.pages is not None and seq.computed and seq.state is State.DECODE:
                held = lengths[seq.pages.granularity.value][:, :, seq.row]
                np.testing.assert_array_equal(held, seq.pages.lengths)
        return busy


ALONE: dict[tuple, list[int]] = {}


def alone(runner: DeviceRunner, method: str, prompt: list[int], count: int) -> list[int]:
    key = method, len(prompt), count
    if key not in ALONE:
        served = Served(runner)
        served.submit("alone", method, prompt, count)
        while served.step():
            pass
        ALONE[key] = served.tokens["alone"]
    return ALONE[key]


@given(requests=REQUESTS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mixed_methods_do_not_meet(runner, requests):
    cases = [(m, tokens_of(n, n), min(count, 64 - n), wait, cancel) for m, n, count, wait, cancel in requests]
    wanted = {str(i): alone(runner, *case[:3]) for i, case in enumerate(cases)}
    served, cancelled = Served(runner), {}
    for name, (method, prompt, count, wait, cancel) in zip(wanted, cases, strict=True):
        served.submit(name, method, prompt, count)
        if cancel:
            cancelled[name] = count // 2
        for _ in range(wait):
            served.step()
    while served.step():
        for name, limit in cancelled.items():
            if len(served.tokens[name]) > limit:
                served.scheduler.cancel(name)
    for name, tokens in wanted.items():
        said = served.tokens[name]
        assert said == tokens[: len(said)]
        assert len(said) == len(tokens) or (name in cancelled and served.reasons[name] == "cancelled")
    memory = served.scheduler.memory
    assert len(memory.free_rows) == 4
    assert not memory.holders
    memory.check_integrity()
