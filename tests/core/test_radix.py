"""Requests that begin with pages of others equal the same requests computed alone, on a device runner."""

from __future__ import annotations

import numpy as np
import pytest

from sparsejax import registry
from sparsejax.request import PrefixOptions, Request, SamplingParams
from sparsejax.runner import DeviceRunner
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings
from tests.contracts.compositions import METHODS, small
from tests.core.harness import TINY, tiny_weights, tokens_of

PAGE, WINDOW, CHUNK, COUNT = 4, 128, 24, 6
SHARED = tokens_of(1, 37)
PROMPTS = [[*SHARED, *tokens_of(seed, 3 + seed)] for seed in (2, 3)]


class Served:
    """One request after the other in a scheduler."""

    def __init__(self, name: str) -> None:
        method, storage = registry.resolve(name, small(name))
        self.name = name
        self.runner = DeviceRunner(
            TINY,
            tiny_weights(TINY),
            TINY.geometry(method.page_size(method.params) or PAGE, WINDOW),
            {name: method},
            storage,
            num_rows=3,
            num_sequence_pages=120,
            decode_buckets=(4,),
            prefill_buckets=((1, CHUNK),),
        )
        self.forget()

    def forget(self) -> None:
        self.scheduler = Scheduler(self.runner, EngineSettings(prefix_cache=True))

    def request(self, prompt: list[int]) -> tuple[list[int], int]:
        """Its tokens, and how many of the prompt were not computed."""
        events: list = []
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        self.scheduler.add(
            self.scheduler.prepare(Request("r", tuple(prompt), params, prefix=PrefixOptions()), events.append)
        )
        while self.scheduler.step():
            self.scheduler.check_integrity()
        return [token for event in events for token in event.token_ids], events[-1].stats.cached_tokens

    def stored(self, tokens: int) -> dict[bytes, dict[str, np.ndarray]]:
        """What is in the blocks within the first tokens of each text, by digest."""
        state, width = self.runner.state, self.runner.limits.geometry.head_pages_per_sequence_page
        found = {}
        for block in self.scheduler.radix.index.blocks():
            if block.depth * self.scheduler.radix.index.block_tokens <= tokens:
                ((_, page),) = block.pages
                pages = page[0] * width + np.arange(width)
                arrays = {**state.pools, **state.page_aux}
                found[block.digest] = {name: np.asarray(array[pages]) for name, array in arrays.items()}
        return found


@pytest.mark.parametrize("name", ["dense", "quest", "fp8_kv"])
def test_attached_rows_equal_computed_ones(name: str) -> None:
    served = Served(name)
    page = served.runner.limits.geometry.page_size
    alone = []
    for prompt in PROMPTS:
        served.forget()
        tokens, cached = served.request(prompt)
        assert cached == 0
        alone.append((tokens, served.stored(len(prompt) - 1)))
    served.forget()
    served.request(PROMPTS[0])
    tokens, cached = served.request(PROMPTS[1])
    assert cached == len(SHARED) // page * page
    assert tokens == alone[1][0]
    warm = served.stored(len(PROMPTS[1]) - 1)
    assert set(alone[1][1]) <= set(warm)
    for digest, arrays in alone[1][1].items():
        for kind, array in arrays.items():
            both = [a.astype(np.int32 if a.dtype.kind == "u" else a.dtype) for a in (warm[digest][kind], array)]
            atol = {"i": 0, "u": 1}.get(array.dtype.kind, 1e-5)  # codes of 8-bit floats may round the other way
            np.testing.assert_allclose(*both, rtol=0 if atol >= 1 else 1e-4, atol=atol)
    assert served.request(PROMPTS[0])[0] == alone[0][0]


@pytest.mark.parametrize("name", ["dense", "quest", "fp8_kv"])
def test_blocks_come_back_from_the_host_as_they_were(name: str) -> None:
    served = Served(name)
    page = served.runner.limits.geometry.page_size
    first = [served.request(prompt) for prompt in (PROMPTS[0], PROMPTS[0])]
    radix, known = served.scheduler.radix, len(PROMPTS[0]) // page * page
    before = served.stored(known)
    while radix.reclaim():
        served.scheduler.check_integrity()
    assert not radix.index.num_blocks
    pools = served.runner.state.pools
    pools.update({kind: array + 1 for kind, array in pools.items()})  # nothing of them is left in the pool
    tokens, cached = served.request(PROMPTS[0])
    assert (tokens, cached) == (first[0][0], (len(PROMPTS[0]) - 1) // page * page)
    after = served.stored(known)
    assert radix.host.promoted == cached // page
    for digest, arrays in after.items():
        for kind, array in arrays.items():
            np.testing.assert_array_equal(array, before[digest][kind], err_msg=kind)


def test_pure_methods_keep_nothing_beside_their_pages() -> None:
    pure = {name for name in METHODS if registry.resolve(name, small(name))[0].pure_prefix}
    assert {"dense", "quest"} <= pure
    for name in pure:
        method, _ = registry.resolve(name, small(name))
        specs = method.aux_specs(TINY.geometry(method.page_size(method.params) or PAGE, WINDOW))
        assert all(spec.per in ("page", "token") for spec in specs.values()), name
        assert method.pure_tokens == (method.select is None)
