"""Requests on pruned prefixes equal attention over a whole text of which those rows are masked, on a device runner."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.prune_jobs import POLICIES, PruneInfo, PrunePart, PruneRequest
from sparsejax.request import ChainOptions, PrefixOptions, Request, SamplingParams
from sparsejax.runner import DeviceRunner
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings
from tests.core.harness import TINY, tiny_weights, tokens_of
from tests.core.oracle import _forward

PAGE, WINDOW, CHUNK, COUNT = 4, 128, 24, 5
PROMPT, SUFFIX = tokens_of(1, 48), tokens_of(2, 7)
RANGES = [(8, 20), (28, 32)]
KNOBS = {"quest": {"quest_chunk_size": PAGE}}  # its read budget is larger than the window, so it reads all rows
NAMES = ["dense", "quest", "fp8_kv"]
ATOL = {"fp8_kv": 1e-3}  # of log-probabilities: codes of 8-bit floats may round the other way


class Served:
    """Requests and prune jobs, one after the other, in a scheduler on a device runner."""

    def __init__(self, name: str) -> None:
        method, storage = registry.resolve(name, KNOBS.get(name))
        self.name, self.storage = name, storage
        geometry = TINY.geometry(method.page_size(method.params) or PAGE, WINDOW)
        self.page = geometry.page_size
        self.runner = DeviceRunner(
            TINY,
            tiny_weights(TINY),
            geometry,
            {name: method},
            storage,
            num_rows=3,
            num_sequence_pages=120,
            decode_buckets=(4,),
            prefill_buckets=((1, CHUNK),),
        )
        self.scheduler = Scheduler(self.runner, EngineSettings(prefix_cache=True))
        self.number = 0

    def run(self) -> None:
        while self.scheduler.step():
            self.scheduler.check_integrity()

    def request(self, prompt: list[int], count: int = COUNT, chain: ChainOptions | None = None):
        """Its tokens, their log-probabilities, and its last event."""
        events: list = []
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=1)
        self.number += 1
        prefix = None if chain else PrefixOptions()
        request = Request(f"r{self.number}", tuple(prompt), params, prefix=prefix, chain=chain)
        self.scheduler.add(self.scheduler.prepare(request, events.append))
        self.run()
        last = events[-1]
        assert last.finish_reason == "length", last
        tokens = [token for event in events for token in event.token_ids]
        values = [each.logprob for event in events for each in event.logprobs or ()]
        return tokens, np.array(values), last

    def prune(self, ids: list[int], ranges=RANGES, keep: int = 0, **options) -> PruneInfo:
        part = PrunePart(tuple(ranges), keep)
        jobs = self.scheduler.prunes
        info = jobs.submit(PruneRequest(self.name, np.array(ids, np.uint32), (part,), **options))
        self.run()
        info = jobs.get(info.prune_id, "")
        assert info.status == "completed", info
        return info

    def masked(self, tokens: list[int], hidden: list[tuple[int, set[int]]]) -> np.ndarray:
        """Log-probabilities at every position of a text [n, vocab].

        Args:
          tokens: of the text.
          hidden: tokens that rows from some position on do not see.
        """
        size = self.runner.limits.geometry.max_model_len
        mask = np.ones((TINY.num_layers, TINY.num_kv_heads, size, size), bool) & np.tri(size, dtype=bool)
        for start, positions in hidden:
            for position in positions:
                mask[..., max(start, position + 1) :, position] = False
        padded = np.zeros(size, np.int32)
        padded[: len(tokens)] = tokens
        arguments = TINY, self.runner.limits.geometry, self.storage, tiny_weights(TINY)
        logits, *_ = _forward(*arguments, jnp.asarray(padded), jnp.asarray(mask))
        return np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))[: len(tokens)]

    def check(self, prompt: list[int], tokens: list[int], values: np.ndarray, hidden) -> None:
        """These tokens follow a prompt, with these log-probabilities."""
        expected = self.masked([*prompt, *tokens], hidden)[len(prompt) - 1 : -1]
        found = expected[np.arange(len(tokens)), tokens]
        atol = ATOL.get(self.name, 1e-4)
        np.testing.assert_allclose(values, found, atol=atol, rtol=0)
        assert (expected.max(-1) - found <= atol).all(), "the best token each time"


@pytest.fixture(scope="module", params=NAMES)
def served(request) -> Served:
    return Served(request.param)


@pytest.fixture(autouse=True)
def _empty(request) -> None:
    if "served" in request.fixturenames:
        served = request.getfixturevalue("served")
        for chain in list(served.scheduler.chains.index.chains.values()):
            served.scheduler.chains.index.drop(chain, "test")
        served.scheduler.radix.index.evict(1 << 30)


def dropped(ranges=RANGES) -> set[int]:
    return {position for start, stop in ranges for position in range(start, stop)}


def test_87_what_is_computed_on_a_pruned_prefix_does_not_see_what_is_gone(served: Served) -> None:
    served.request(PROMPT, 1)
    served.prune(PROMPT)
    prompt = [*PROMPT, *SUFFIX]
    tokens, values, last = served.request(prompt)
    assert last.stats.cached_tokens == 48
    served.check(prompt, tokens, values, [(48, dropped())])
    _, alone, _ = served.request([tokens_of(3, 1)[0], *prompt[1:]])
    assert not np.allclose(alone, values, atol=1e-2)


def test_chains_go_on_without_what_is_gone(served: Served) -> None:
    output, _, last = served.request(PROMPT, chain=ChainOptions())
    talk = [*PROMPT, *output]
    served.prune(talk, chain_id=last.chain.chain_id)
    chain = served.scheduler.chains.index.chains[last.chain.chain_id]
    hidden = [(chain.processed, dropped())]
    for turn in range(2):
        prompt = [*talk, *tokens_of(5 + turn, 6)]
        tokens, values, last = served.request(prompt, chain=ChainOptions(chain.chain_id, on_miss="error"))
        assert last.chain.prefilled_tokens == 7
        served.check(prompt, tokens, values, hidden)
        talk = [*prompt, *tokens]
        assert served.scheduler.chains.tiers.demote(chain)
        served.scheduler.radix.index.evict(1 << 30)  # its rows come back from the host, not from blocks


def cuts_of(served: Served, ids: list[int]) -> set[int]:
    """Tokens of a text without rows."""
    scope = served.scheduler.chains.scope(served.name, "", "")
    match = served.scheduler.radix.index.match(scope, np.array(ids, np.uint32), whole=True)
    return {p for cut in match.lost for p in range(cut.start, cut.stop)} - {int(p) for c in match.lost for p in c.kept}


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_87_rows_that_stay_are_those_of_the_best_scores(served: Served, policy: str) -> None:
    served.request(PROMPT, 1)
    info = served.prune(PROMPT, keep=8, policy=policy, observation_tokens=4)
    assert info.result["retained_tokens"] == 8
    gone = cuts_of(served, PROMPT)
    assert gone < dropped()
    assert len(gone) == len(dropped()) - 8
    prompt = [*PROMPT, *SUFFIX]
    tokens, values, _ = served.request(prompt)
    served.check(prompt, tokens, values, [(48, gone)])


@pytest.mark.parametrize("keep", [0, 8])
def test_exact_mode_equals_a_text_masked_from_its_start(served: Served, keep: int) -> None:
    served.request(PROMPT, 1)
    served.prune(PROMPT, keep=keep, policy=POLICIES[-1] if keep else "drop", recompute=True)
    gone = cuts_of(served, PROMPT)
    assert len(gone) == len(dropped()) - keep
    prompt = [*PROMPT, *SUFFIX]
    tokens, values, _ = served.request(prompt)
    served.check(prompt, tokens, values, [(0, gone)])
    output, _, last = served.request([*PROMPT, 1, 2, 3], chain=ChainOptions())
    assert last.chain.reused_tokens == 48
    talk = [*PROMPT, 1, 2, 3, *output]
    served.prune(talk, [(40, 44)], chain_id=last.chain.chain_id, recompute=True)
    prompt = [*talk, *SUFFIX]
    tokens, values, last = served.request(prompt, chain=ChainOptions(last.chain.chain_id, on_miss="error"))
    assert last.chain.prefilled_tokens == 1 + len(SUFFIX)
    served.check(prompt, tokens, values, [(0, gone | set(range(40, 44)))])


def test_56_requests_that_run_meanwhile_are_not_disturbed(served: Served) -> None:
    served.request(PROMPT, 1)
    other, count = tokens_of(9, 21), 30
    alone, values, _ = served.request(other, count)
    events: list = []
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=1)
    reader: list = []
    on_path = [*PROMPT, *SUFFIX]
    for name, prompt, seen in (("other", other, events), ("reader", on_path, reader)):
        prefix = PrefixOptions(salt="s" if name == "other" else "")
        request = Request(name, tuple(prompt), params, prefix=prefix)
        served.scheduler.add(served.scheduler.prepare(request, seen.append))
    for _ in range(6):
        served.scheduler.step()
    assert reader
    jobs = served.scheduler.prunes
    infos = [
        jobs.submit(PruneRequest(served.name, np.array(PROMPT, np.uint32), (PrunePart((pair,), 4),), POLICIES[-1], **o))
        for pair, o in (((8, 20), {}), ((28, 40), {"recompute": True}))
    ]
    served.run()
    assert [jobs.get(info.prune_id, "").status for info in infos] == ["completed"] * 2
    assert [token for event in events for token in event.token_ids] == alone
    found = np.array([each.logprob for event in events for each in event.logprobs or ()])
    np.testing.assert_allclose(found, values, atol=ATOL.get(served.name, 1e-4), rtol=0)
    tokens = [token for event in reader for token in event.token_ids]
    found = np.array([each.logprob for event in reader for each in event.logprobs or ()])
    served.check(on_path, tokens, found, [])
