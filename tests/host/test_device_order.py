"""The scheduler on the real runner: submission order is execution order there too.

The mock proves the bookkeeping; this proves that a device agrees. A tiny model decodes greedily under preemption,
forks, eviction and pages that change hands while programs are in flight. Tokens must be those of a quiet engine.
"""

from __future__ import annotations

import collections

import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry, Granularity
from sparsejax.request import Request, SamplingParams, TokenEvent
from sparsejax.runner import DeviceRunner
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings
from tests.core.harness import TINY, tiny_weights, tokens_of
from tests.host.bench import observe

EVICTING = (
    "snapkv(sink_keep_tokens=4,decode_keep_tokens=12,recent_keep_tokens=8,observation_window_size=8,"
    "snapkv_decode_eviction=true,decode_eviction_interval=8)"
)
METHODS = ("dense", EVICTING)
SMALL_WINDOWS = EngineSettings(decode_window_tokens=4, min_decode_window_tokens=4, max_decode_window_tokens=4)


@pytest.fixture(scope="module")
def runner() -> DeviceRunner:
    geometry = Geometry(
        TINY.num_layers, TINY.num_q_heads, TINY.num_kv_heads, TINY.head_dim, 4, 160, TINY.head_dim**-0.5
    )
    resolved = [registry.resolve(name) for name in METHODS]
    return DeviceRunner(
        TINY,
        tiny_weights(),
        geometry,
        {method.name: method for method, _ in resolved},
        resolved[0][1],
        num_rows=5,
        num_sequence_pages=64,
        decode_buckets=(4,),
        prefill_buckets=((2, 16),),
    )


class Session:
    """A scheduler of its own on the shared runner: rows and pages start out free, whatever the device holds."""

    def __init__(self, runner: DeviceRunner, settings: EngineSettings | None = None) -> None:
        self.scheduler = Scheduler(runner, settings)
        self.events: dict[str, list[TokenEvent]] = collections.defaultdict(list)

    def submit(
        self, request_id: str, prompt: list[int], max_tokens: int, method: str, n: int = 1, seed: int = 0
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n, seed=seed)
        request = Request(request_id, tuple(prompt), params, method)
        self.scheduler.add(self.scheduler.prepare(request, self.events[request_id].append))

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        events = [event for event in self.events[request_id] if event.index == index]
        assert events[-1].finish_reason == "length", events[-1].error
        return [token for event in events for token in event.token_ids]

    def run(self, preempt_every: int = 0) -> None:
        steps = 0
        while self.scheduler.step():
            steps += 1
            observe(self.scheduler)
            self.scheduler.check_integrity()
            running = self.scheduler.running
            if preempt_every and steps < 60 and steps % preempt_every == 0 and running:
                self.scheduler._preempt(running[steps % len(running)])
        pool = self.scheduler.memory.pool
        assert pool.free_pages(Granularity.SEQUENCE) == pool.capacity(Granularity.SEQUENCE)


def workload(runner: DeviceRunner) -> list[tuple]:
    names = list(runner.limits.methods)
    return [(f"r{i}", tokens_of(i, 30 + 5 * i), 24, names[i % 2], 3 if i == 4 else 1, i) for i in range(6)]


@pytest.fixture(scope="module")
def quiet(runner: DeviceRunner) -> dict[tuple[str, int], list[int]]:
    """What each request generates alone, one step at a time."""
    out = {}
    for request_id, prompt, max_tokens, method, n, seed in workload(runner):
        session = Session(runner, EngineSettings(max_inflight_steps=1))
        session.submit(request_id, prompt, max_tokens, method, n, seed)
        session.run()
        assert session.scheduler.num_preemptions == 0
        out.update({(request_id, index): session.tokens(request_id, index) for index in range(n)})
    return out


@pytest.mark.parametrize(
    ("settings", "preempt_every"),
    [(EngineSettings(max_inflight_steps=3), 0), (SMALL_WINDOWS, 3), (EngineSettings(swap_bytes=0), 5)],
    ids=["company", "swapped", "rebuilt"],
)
def test_company_preemption_and_lookahead_change_no_token(
    runner: DeviceRunner, quiet: dict, settings: EngineSettings, preempt_every: int
) -> None:
    session = Session(runner, settings)
    for request in workload(runner):
        session.submit(*request)
    session.run(preempt_every)
    assert (session.scheduler.num_preemptions > 5) == bool(preempt_every)
    assert session.scheduler.num_evicted_pages > 0
    for request_id, index in quiet:
        assert session.tokens(request_id, index) == quiet[request_id, index], (request_id, index)
