"""Requests that scheduler and runner replay or count equal the steps driven by hand, alone and in company."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from sparsejax import combine, registry
from sparsejax.capacity import check_replays
from sparsejax.errors import MethodError
from sparsejax.request import Request, SamplingParams
from sparsejax.runner import DeviceRunner
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings
from tests.contracts.compositions import RAGGED, small
from tests.core.harness import TINY, Session, tiny_weights, tokens_of

PAGE, WINDOW, COUNT = 4, 64, 9
PROMPT, OTHER = tokens_of(1, 37), tokens_of(2, 30)


def encode(text: str) -> list[int]:
    return [7, 3]


@pytest.fixture(scope="module", params=["kvzip", "kvzip+fp8_kv", *RAGGED])
def runner(request) -> DeviceRunner:
    name = request.param
    dense = "dense+fp8_kv" if name.endswith("fp8_kv") else "dense"
    methods = {}
    for each in (name, dense):
        method, storage = registry.resolve(each, small(each))
        methods[each] = combine.bound(method, encode)
    found = DeviceRunner(
        TINY,
        tiny_weights(TINY),
        TINY.geometry(PAGE, WINDOW),
        methods,
        storage,
        num_rows=4,
        num_sequence_pages=60,
        decode_buckets=(4,),
        prefill_buckets=((1, 24), (2, 24)),
        fail_on_retrace=True,
    )
    for _ in found.compile(found.programs(), 2):
        pass
    found.seal()
    return found


class Served:
    """Requests in a scheduler on a device runner."""

    def __init__(self, runner: DeviceRunner, **settings: int) -> None:
        self.runner = runner
        self.scheduler = Scheduler(runner, EngineSettings(**settings))
        self.tokens: dict[str, list[int]] = {}

    def submit(self, name: str, prompt: list[int], method: str | None = None) -> None:
        self.tokens[name] = []
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        request = Request(name, tuple(prompt), params, method)
        self.scheduler.add(self.scheduler.prepare(request, lambda event: self.tokens[name].extend(event.token_ids)))

    def run(self, watch: str | None = None) -> list[list[list[int]]]:
        """Until all is done; positions [layers][kv_heads] that a request held when last seen on its row."""
        held: list[list[list[int]]] = []
        while self.scheduler.step():
            self.scheduler.check_integrity()
            group = self.scheduler.groups.get(watch) if watch else None
            if group and group.choices[0].pages is not None:
                held = self.positions(group.choices[0].pages)
        return held

    def positions(self, pages) -> list[list[list[int]]]:
        geometry, stored = self.runner.limits.geometry, np.asarray(self.runner.state.pools["positions"])
        parts = geometry.head_pages_per_page(pages.granularity)
        found: list[list[list[int]]] = [[] for _ in range(geometry.num_layers)]
        for layer in range(geometry.num_layers):
            for head in range(geometry.num_kv_heads):
                at = (layer, head) if parts == 1 else (0, 0)
                part = 0 if parts == 1 else layer * geometry.num_kv_heads + head
                ids = pages.table[at][: int(pages.columns[at])] * parts + part
                found[layer].append(stored[ids].reshape(-1)[: int(pages.lengths[at])].tolist())
        return found


@functools.cache
def by_hand(name: str, prompt: tuple[int, ...]) -> tuple[list[int], list[list[list[int]]]]:
    session = Session(name, params=small(name), encode=encode)
    logits = session.generate(1, list(prompt), COUNT)
    geometry = session.geometry
    heads = range(geometry.num_kv_heads)
    kept = [[session.positions(1, l, h).tolist() for h in heads] for l in range(geometry.num_layers)]
    return logits.argmax(-1).tolist(), kept


@pytest.mark.parametrize("depth", [1, 2])
def test_served_equals_driven_by_hand(runner, depth):
    name = next(iter(runner.limits.methods))
    tokens, kept = by_hand(name, tuple(PROMPT))
    served = Served(runner, max_inflight_steps=depth)
    served.submit("a", PROMPT)
    held = served.run("a")
    assert served.tokens["a"] == tokens
    last = held[0][0][-1]  # it leaves its row with its last step
    assert last in (kept[0][0][-1], kept[0][0][-1] - 1)
    assert held == [[[at for at in rows if at <= last] for rows in layer] for layer in kept]
    assert len({len(rows) for layer in held for rows in layer}) == 1 or runner.limits.methods[name].ragged


def test_in_company_as_alone(runner):
    name, dense = runner.limits.methods
    served = Served(runner)
    served.submit("a", PROMPT)
    served.submit("b", OTHER, dense)
    served.submit("c", OTHER)
    served.run()
    assert served.tokens["a"] == by_hand(name, tuple(PROMPT))[0]
    assert served.tokens["b"] == by_hand(dense, tuple(OTHER))[0]
    assert served.tokens["c"] == by_hand(name, tuple(OTHER))[0]


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
def test_a_place_lost_before_the_compaction_changes_nothing(runner, swap_bytes):
    name = next(iter(runner.limits.methods))
    served = Served(runner, swap_bytes=swap_bytes)
    served.submit("a", PROMPT)
    seq = served.scheduler.groups["a"].choices[0]
    while seq.replayed < len(seq.group.replays) - 1 or not seq.prefilled:
        served.scheduler.step()
    served.scheduler._preempt(seq)
    served.submit("b", OTHER)
    served.run()
    assert served.tokens["a"] == by_hand(name, tuple(PROMPT))[0]
    assert served.tokens["b"] == by_hand(name, tuple(OTHER))[0]


def test_pieces_longer_than_a_chunk_are_refused_at_start():
    method, _ = registry.resolve("kvzip", small("kvzip"))
    methods = {"kvzip": method}
    check_replays(methods, 64, ((1, 19),))
    check_replays(methods, 13, ((1, 8),))  # within the budget nothing is read again
    with pytest.raises(MethodError, match=r"kvzip reads prompts once more in pieces of 19 tokens.* has 18"):
        check_replays(methods, 64, ((1, 18),))
    with pytest.raises(MethodError, match="pieces of 21 tokens"):
        check_replays({"kvzip": combine.bound(method, encode)}, 64, ((1, 20),))
