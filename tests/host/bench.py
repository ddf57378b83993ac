"""A scheduler on a mock runner under a clock that tests move, and an observer that trusts none of the books."""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np

from sparsejax.chain_disk import Disk
from sparsejax.geometry import Granularity
from sparsejax.mock import MockRunner
from sparsejax.plans import Runner
from sparsejax.request import Request, SamplingParams, TokenEvent
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings


class Clock:
    """Seconds that pass only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Bench:
    """Submits, advances and remembers every event. Checks the books after every iteration."""

    def __init__(self, settings: EngineSettings | None = None, **mock: object) -> None:
        self.clock = Clock()
        mock.setdefault("step_s", 0.01)
        open_disk: Callable[[Runner], Disk] | None = mock.pop("open_disk", None)  # type: ignore[assignment]
        self.checks = True
        self.runner = MockRunner(clock=self.clock, sleep=self.clock.sleep, **mock)  # type: ignore[arg-type]
        disk = open_disk(self.runner) if open_disk is not None else None
        self.scheduler = Scheduler(self.runner, settings, clock=self.clock, disk=disk)
        self.scheduler.pause = self.clock.sleep
        self.events: dict[str, list[TokenEvent]] = collections.defaultdict(list)
        self.requests: dict[str, Request] = {}

    def submit(
        self, prompt: int | list[int], max_tokens: int | None = 8, method: str | None = None, **params: object
    ) -> str:
        """Queues a request; an int prompt means so many tokens, different for each request."""
        request_id = f"r{len(self.requests):03}"
        if isinstance(prompt, int):
            prompt = [(len(self.requests) * 37 + i * 11) % 250 for i in range(prompt)]
        params.setdefault("seed", len(self.requests))
        chain = params.pop("chain", None)
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        request = Request(request_id, tuple(prompt), sampling, method, arrival_s=self.clock(), chain=chain)  # type: ignore[arg-type]
        group = self.scheduler.prepare(request, self.events[request_id].append)
        self.requests[request_id] = request
        self.scheduler.add(group)
        return request_id

    def step(self, count: int = 1) -> bool:
        busy = True
        for _ in range(count):
            busy = self.scheduler.step()
            if self.checks:
                self.check()
        return busy

    def run(self, limit: int = 5000) -> None:
        """Until everything is done; fails if that takes too many iterations."""
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError(f"still busy after {limit} iterations: {self.where()}")
        if not self.scheduler.chains.index.chains:
            self.check_all_free()

    def where(self) -> list[tuple]:
        return [
            (s.group.request_id, s.index, s.state.value, s.computed, len(s.output))
            for g in self.scheduler.groups.values()
            for s in g.choices
        ]

    # What came out.

    def of(self, request_id: str, index: int = 0) -> list[TokenEvent]:
        return [event for event in self.events[request_id] if event.index == index]

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for event in self.of(request_id, index) for token in event.token_ids]

    def reason(self, request_id: str, index: int = 0) -> str | None:
        reasons = [event.finish_reason for event in self.of(request_id, index) if event.finish_reason]
        assert len(reasons) <= 1, f"{request_id} ended {reasons}"
        if reasons:
            assert self.of(request_id, index)[-1].finish_reason, "an event after the last one"
        return reasons[0] if reasons else None

    def last(self, request_id: str, index: int = 0) -> TokenEvent:
        return self.of(request_id, index)[-1]

    def alone(self, request_id: str, index: int = 0) -> list[int]:
        """What the script generates for this request without any engine."""
        request = self.requests[request_id]
        params = request.params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.runner.limits.eos_ids))
        seed = (params.seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
        limit = params.max_tokens or self.runner.limits.geometry.max_model_len - len(request.prompt_ids)
        return self.runner.generate(request.prompt_ids, limit, seed, sorted(stops), params.min_tokens)

    def check_done(self, *request_ids: str) -> None:
        """These ended by themselves, with exactly the tokens they would have had alone."""
        for request_id in request_ids:
            for index in range(self.requests[request_id].params.n):
                assert self.reason(request_id, index) in ("stop", "length"), self.last(request_id, index)
                assert self.tokens(request_id, index) == self.alone(request_id, index)

    # The books.

    def check(self) -> None:
        self.scheduler.check_integrity()
        observe(self.scheduler)

    def check_all_free(self) -> None:
        """Everything returned to baseline: pages, rows, promises, swap space, queues; without chains."""
        s = self.scheduler
        for chain in list(s.chains.index.chains.values()):
            s.chains.index.drop(chain, "test")
        s.radix.index.evict(1 << 30)
        while s.radix.host.give_way():
            s.radix.check_integrity([])
        assert not s.radix.index.num_blocks
        assert not s.radix.host.blocks
        assert not s.memory.shelf
        under_way = s.chains.tiers.disk is not None and s.chains.tiers.disk.pending
        assert s.chains.host.used_bytes == 0 or under_way
        assert s.memory.pool.free_head_pages == s.memory.pool.num_head_pages
        for granularity in Granularity:
            assert s.memory.pool.free_pages(granularity) == s.memory.pool.capacity(granularity)
        assert sorted(s.memory.free_rows) == list(range(1, s.limits.num_rows + 1))
        assert not s.memory.holders
        assert not any((s.waiting, s.running, s.swapped, s.groups, s.launches))
        assert s.swap.used_bytes == 0


def observe(scheduler: Scheduler) -> None:
    """Every head-page is free, or in exactly as many tables as it has references: counted from the tables alone."""
    pool, geometry = scheduler.memory.pool, scheduler.limits.geometry
    whole = geometry.head_pages_per_sequence_page
    holders, free, references = (np.zeros(pool.num_sequence_pages * whole, int) for _ in range(3))
    tables = [seq.pages for seq in scheduler.memory.holders.values()]
    tables += [seq.loan for seq in scheduler.memory.holders.values() if seq.loan is not None]
    for pages in (*tables, *scheduler.memory.shelf.values()):
        assert pages is not None
        assert (pages.lengths <= geometry.max_model_len).all()
        assert (pages.columns == -(-pages.lengths // geometry.page_size)).all(), "a row holds more than it needs"
        ids = pages.table[np.arange(pages.table.shape[-1]) < pages.columns[..., None]]
        width = geometry.head_pages_per_page(pages.granularity)
        np.add.at(holders, ids[:, None] * width + np.arange(width), 1)
    for granularity, ids in scheduler.radix.held():
        width = geometry.head_pages_per_page(granularity)
        np.add.at(holders, ids[:, None] * width + np.arange(width), 1)
    np.add.at(free, pool._free[: pool._num_free, None] * whole + np.arange(whole), 1)
    for code, granularity in enumerate(Granularity):
        width = geometry.head_pages_per_page(granularity)
        cut = np.repeat(pool._state == code, whole)
        refs = np.repeat(pool._refs[granularity], width)
        references[cut] = refs[cut]
        free[cut] += refs[cut] == 0
    assert (free <= 1).all(), "duplicate: listed free twice"
    assert not (free & (holders > 0)).any(), "alias: free and live"
    assert (holders == references).all(), "holders and references differ"
    assert ((free + (holders > 0))[whole:] == 1).all(), "missing: neither free nor held"
    assert holders[:whole].sum() == 0, "the null page is held"
    assert int(free[whole:].sum()) == pool.free_head_pages
