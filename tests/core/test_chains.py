"""Turns that the scheduler resumes on a device runner equal the same session continued by hand, for every method."""

from __future__ import annotations

import numpy as np
import pytest

from sparsejax import combine, registry
from sparsejax.cache.chain import Tier
from sparsejax.chains import DeviceRows
from sparsejax.request import ChainOptions, Request, SamplingParams
from sparsejax.runner import DeviceRunner
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings
from tests.contracts.compositions import METHODS, RAGGED, small
from tests.core.harness import TINY, Session, tiny_weights, tokens_of

PAGE, WINDOW, CHUNK, COUNT = 4, 128, 24, 6
PROMPT, SUFFIXES = tokens_of(1, 37), [tokens_of(n, n) for n in (9, 26, 1)]
QUICK = ("dense", "snapkv", "h2o", *RAGGED[1:])


def encode(text: str) -> list[int]:
    return [7, 3]


def runner_of(name: str) -> DeviceRunner:
    method, storage = registry.resolve(name, small(name))
    page = method.page_size(method.params) or PAGE
    return DeviceRunner(
        TINY,
        tiny_weights(TINY),
        TINY.geometry(page, WINDOW),
        {name: combine.bound(method, encode)},
        storage,
        num_rows=3,
        num_sequence_pages=120,
        decode_buckets=(4,),
        prefill_buckets=((1, CHUNK),),
    )


class Conversation:
    """Turns of one chain in a scheduler."""

    def __init__(self, runner: DeviceRunner) -> None:
        self.runner = runner
        # With the prefix cache, blocks would stand for rows on the host.
        self.scheduler = Scheduler(runner, EngineSettings(prefix_cache=False))
        self.context: list[int] = []
        self.chain_id: str | None = None
        self.turns = 0

    def turn(self, tokens: list[int]) -> list[int]:
        self.turns += 1
        events: list = []
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        options = ChainOptions(self.chain_id, on_miss="error")
        prompt = (*self.context, *tokens)
        request = Request(f"t{self.turns}", prompt, params, chain=options)
        self.scheduler.add(self.scheduler.prepare(request, events.append))
        while self.scheduler.step():
            self.scheduler.check_integrity()
        assert events[-1].finish_reason == "length", events[-1]
        assert events[-1].chain.prefilled_tokens == len(tokens) + (self.turns > 1)
        answer = [token for event in events for token in event.token_ids]
        self.context, self.chain_id = [*prompt, *answer], events[-1].chain.chain_id
        return answer

    @property
    def chain(self):
        return self.scheduler.chains.index.chains[self.chain_id]

    def positions(self) -> list[list[list[int]]]:
        """What each layer and KV head keeps."""
        rows = self.chain.payload
        assert isinstance(rows, DeviceRows)
        pages, geometry = rows.pages, self.runner.limits.geometry
        stored = np.asarray(self.runner.state.pools["positions"])
        parts, found = geometry.head_pages_per_page(pages.granularity), []
        for layer in range(geometry.num_layers):
            found.append([])
            for head in range(geometry.num_kv_heads):
                l, h = min(layer, pages.columns.shape[0] - 1), min(head, pages.columns.shape[1] - 1)
                part = (
                    0
                    if parts == 1
                    else head
                    if parts == geometry.num_kv_heads
                    else layer * geometry.num_kv_heads + head
                )
                ids = pages.table[l, h][: int(pages.columns[l, h])] * parts + part
                found[layer].append(stored[ids].reshape(-1)[: int(pages.lengths[l, h])].tolist())
        return found


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_resumed_turns_equal_one_session_continued_by_hand(name: str) -> None:
    served = Conversation(runner_of(name))
    session = Session(name, params=small(name), encode=encode, max_len=WINDOW, chunk=CHUNK)
    layers, heads = range(session.geometry.num_layers), range(session.geometry.num_kv_heads)
    last: list[int] = []
    for n, tokens in enumerate([PROMPT, *SUFFIXES]):
        if n == 2:
            assert served.scheduler.chains.reclaim(), "checkpoints"
            while served.chain.tier is Tier.DEVICE:
                assert served.scheduler.chains.reclaim()
        logits = [session.prefill({1: [*last, *tokens]}, first=not n)[1]]
        logits += [session.decode([1])[0] for _ in range(COUNT - 1)]
        expected = np.stack(logits).argmax(-1).tolist()
        assert served.turn(tokens) == expected, f"turn {n + 1}"
        assert served.positions() == [[session.positions(1, l, h).tolist() for h in heads] for l in layers]
        last = expected[-1:]
    assert served.chain.turns == 1 + len(SUFFIXES)
