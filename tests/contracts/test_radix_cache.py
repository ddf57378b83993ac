"""Named promises of the radix prefix cache on a mock runner: what a request begins with, and what it leaves.

The numbers are those of the serving specification's list of contract tests. The mock reads back every stored row, and
knows what the rows of a text must be, whoever computed them.
"""

from __future__ import annotations

import dataclasses
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from sparsejax import radix_control
from sparsejax.cache.radix_tree import up
from sparsejax.cost import prefill_cost
from sparsejax.errors import CacheTooSmallError, PinRefusedError, RequestError
from sparsejax.mock import MockMethod
from sparsejax.prune_records import PrunePart, PruneRequest
from sparsejax.request import ChainOptions, PrefixOptions
from sparsejax.settings import EngineSettings
from tests.host.bench import Bench

PAGE = 4
PURE = MockMethod("dense")
SELECTS = MockMethod("selects", selects=True)
METHODS = (PURE, SELECTS, MockMethod("window", window=24, interval=8))
ALL = PrefixOptions()
POISON = 252


class Shared(Bench):
    """A bench whose requests share what they begin with, and that counts what is prefilled."""

    def __init__(self, settings_: dict | None = None, **mock: object) -> None:
        mock = {"methods": METHODS, "prefill_buckets": ((1, 16), (2, 16), (1, 64)), **mock}
        super().__init__(EngineSettings(**{"prefix_cache": True, **(settings_ or {})}), **mock)
        self.prefilled = 0
        prefill = self.runner.prefill

        def counted(method, rows):
            self.prefilled += sum(len(row.tokens) for row in rows)
            return prefill(method, rows)

        self.runner.prefill = counted  # type: ignore[method-assign]
        self.index = self.scheduler.radix.index

    def submit(self, prompt, max_tokens=8, method=None, prefix=ALL, **params):  # type: ignore[override]
        prepare = self.scheduler.prepare

        def with_prefix(request, on_event):
            return prepare(dataclasses.replace(request, prefix=prefix), on_event)

        self.scheduler.prepare = with_prefix  # type: ignore[method-assign]
        try:
            return super().submit(prompt, max_tokens, method, **params)
        finally:
            self.scheduler.prepare = prepare  # type: ignore[method-assign]

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(self.where())

    def serve(self, prompt, max_tokens=8, method=None, **params) -> int:
        """A whole request, checked. Returns the tokens that it did not compute."""
        before = self.prefilled
        request_id = self.submit(list(prompt), max_tokens, method, **params)
        self.run()
        self.check_done(request_id)
        cached = self.last(request_id).stats.cached_tokens
        assert self.prefilled - before == len(prompt) - cached, "executed prefill is what was reported"
        return cached


def words(n: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7) % 250 for i in range(n)]


@pytest.mark.parametrize("method", ["dense", "selects"])
@pytest.mark.parametrize("n", [1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 75])
def test_20_identical_prompts_reuse_whole_pages_before_the_last_token(n: int, method: str) -> None:
    bench = Shared()
    assert bench.serve(words(n), method=method) == 0
    assert bench.serve(words(n), method=method) == (n - 1) // PAGE * PAGE
    bench.check_all_free()


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_21_reuse_ends_where_prompts_part_ways(at: int) -> None:
    bench = Shared()
    bench.serve(words(40))
    other = words(40)
    other[at] += 1
    assert bench.serve([*other, 1]) == at // PAGE * PAGE
    assert bench.serve([*words(40)[: at + 1], 251, 251]) == (at + 1) // PAGE * PAGE
    bench.check_all_free()


@pytest.mark.parametrize("other", [PrefixOptions(salt="s"), PrefixOptions(tenant="t"), None])
def test_22_others_find_nothing(other: PrefixOptions | None) -> None:
    bench = Shared()
    bench.serve(words(40))
    assert bench.serve(words(40), prefix=other) == 0
    assert bench.serve(words(40), method="selects") == 0
    assert bench.serve(words(40), method="window") == 0
    assert bench.serve(words(40), method="window") == 0, "rows that may be evicted are no function of the text"
    assert bench.serve(words(40)) == 36
    bench.check_all_free()


def test_22_without_the_setting_nothing_is_kept() -> None:
    bench = Shared({"prefix_cache": False})
    bench.serve(words(40))
    assert bench.serve(words(40)) == 0
    assert not bench.index.num_blocks
    bench.check_all_free()


def test_decoded_tokens_are_published_where_prompt_chunks_would_make_the_same() -> None:
    for method, whole in (("dense", True), ("selects", False)):
        bench = Shared()
        request_id = bench.submit(words(10), 23, method)
        bench.run()
        longer = [*words(10), *bench.tokens(request_id), 1, 2, 3]
        cached = bench.serve(longer, method=method)
        assert cached == (28 if whole else 8), "up to the rows that were seen when the row was left"
        bench.check_all_free()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_prompt_is_published_even_if_one_token_is_all_that_was_wanted(max_tokens: int) -> None:
    bench = Shared()
    assert bench.serve(words(40), max_tokens=max_tokens) == 0
    assert bench.serve(words(40), max_tokens=max_tokens) == 36
    bench.check_all_free()


def test_40_running_requests_share_pages() -> None:
    bench = Shared(num_rows=4)
    bench.serve(words(40))
    before = bench.scheduler.memory.pool.free_head_pages
    slabs = bench.scheduler.limits.geometry.head_pages_per_sequence_page
    both = [bench.submit([*words(36), 9, seed], 30, seed=seed) for seed in (1, 2)]
    bench.step(3)
    assert sorted(block.refs for block in bench.index.blocks()) == [0, 0, *[2] * 9], (
        "the first request went on otherwise"
    )
    held = before - bench.scheduler.memory.pool.free_head_pages
    assert held <= 2 * 2 * slabs, "two pages each, not eleven"
    bench.run()
    bench.check_done(*both)
    assert [bench.last(r).stats.cached_tokens for r in both] == [36, 36]
    bench.check_all_free()


def test_36_37_blocks_make_room_and_admission_counts_what_is_attached() -> None:
    bench = Shared(num_sequence_pages=1 + 24)  # 96 tokens
    for seed in range(8):
        bench.serve(words(40, seed))
    assert bench.index.counts["evicted_blocks"] > 0
    bench.serve(words(80))
    assert bench.serve([*words(80), 5], 11) >= 76, "with what is attached it just fits"
    bench.check_all_free()


def test_48_a_row_that_lost_its_place_gets_the_same_tokens() -> None:
    for swap_bytes in (0, 1 << 30):
        bench = Shared({"swap_bytes": swap_bytes}, num_sequence_pages=1 + 40, num_rows=4)
        bench.serve(words(40))
        ids = [bench.submit([*words(40), seed], 60, seed=seed) for seed in range(3)]
        for step in range(400):
            if not bench.step():
                break
            if step % 7 == 3 and len(bench.scheduler.running) > 1:
                bench.scheduler._preempt(bench.scheduler.running[-1])
        bench.run()
        bench.check_done(*ids)
        bench.check_all_free()


def test_choices_of_one_request_begin_with_the_same() -> None:
    bench = Shared()
    bench.serve(words(40))
    request_id = bench.submit(words(40), 9, n=3)
    before = bench.prefilled
    bench.run()
    bench.check_done(request_id)
    assert bench.prefilled - before == 3 + 3, "up to the last token together, and that each for itself"
    bench.check_all_free()


@pytest.mark.parametrize("when", range(9))
def test_51_cancelled_requests_leave_nothing_but_blocks(when: int) -> None:
    bench = Shared({"max_inflight_steps": 3})
    bench.serve(words(20))
    request_id = bench.submit(words(75), 20)
    bench.step(when)
    bench.scheduler.cancel(request_id)
    bench.run()
    assert not bench.index.leases
    bench.serve(words(75))
    bench.check_all_free()


def test_rows_that_are_not_finite_are_not_published() -> None:
    bench = Shared({"max_inflight_steps": 3})
    bench.runner.poison(POISON)
    request_id = bench.submit([*words(20), POISON, *words(50, 2)], 9)
    bench.run()
    assert bench.reason(request_id) == "error"
    blocks = list(bench.index.blocks())
    assert all(POISON not in memoryview(block.key).cast("I").tolist() for block in blocks)
    assert bench.serve([*words(20), 3]) <= 20
    bench.check_all_free()


# Together.


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("inflight", [1, 3])
def test_64_requests_compute_what_they_share_once(rows: int, inflight: int) -> None:
    bench = Shared({"max_inflight_steps": inflight}, num_rows=rows, prefill_buckets=((1, 16), (4, 16), (1, 64)))
    suffixes = [words(5 + seed % 7, seed + 1) for seed in range(64)]
    ids = [bench.submit([*words(300), *suffix], 6, seed=i) for i, suffix in enumerate(suffixes)]
    bench.run()
    bench.check_done(*ids)
    # The first tokens of some suffixes are the same, so a little less than all of them may be left to compute.
    assert 300 < bench.prefilled <= 300 + sum(map(len, suffixes))
    assert bench.prefilled == sum(len(bench.requests[i].prompt_ids) - bench.last(i).stats.cached_tokens for i in ids)
    bench.check_all_free()


@pytest.mark.parametrize("when", [2, 5, 9])
def test_who_waits_for_another_does_not_depend_on_it(when: int) -> None:
    bench = Shared(prefill_buckets=((1, 16),))
    leader, *others = [bench.submit([*words(200), seed], 6, seed=seed) for seed in range(4)]
    bench.step(when)
    assert len(bench.scheduler.running) == 1, "the others wait"
    stranger = bench.submit(words(20, 7), 6)
    bench.step(3)
    bench.scheduler.cancel(leader)
    bench.run()
    bench.check_done(*others, stranger)
    assert bench.prefilled <= 200 + 20 + 3 + 4 * 16, "what the first one had computed was not lost"
    bench.check_all_free()


@pytest.mark.parametrize("waiting", [4, 32])
def test_24_who_waits_is_looked_up_again_only_if_something_has_changed(waiting: int) -> None:
    bench = Shared(num_rows=3, prefill_buckets=((1, 16), (3, 16)))
    count, match = 0, bench.index.match

    def counted(*args, **options):
        nonlocal count
        count += 1
        return match(*args, **options)

    bench.index.match = counted  # type: ignore[method-assign]
    ids = [bench.submit([*words(400), seed, 1, 2, 3, 4, 5], 30, seed=seed) for seed in range(waiting)]
    bench.run()
    bench.check_done(*ids)
    assert count <= 2 * waiting, "not in each of the steps in which they waited"
    assert bench.prefilled <= 400 + 6 * waiting
    # What was found for one that waits for a row is void if it goes meanwhile, and is not if only others change.
    bench.run()
    busy = [bench.submit(words(9, seed + 9), 60, seed=seed) for seed in range(3)]
    bench.step(3)
    late = bench.submit([*words(400), 7, 8], 5)
    bench.step(2)
    bench.index.evict(40)
    bench.run()
    bench.check_done(*busy, late)
    bench.check_all_free()


def test_38_pins_can_not_keep_everybody_out() -> None:
    bench = Shared(num_sequence_pages=1 + 60)
    for seed in range(12):
        bench.serve(words(60, seed))
    scope, pinned = next(iter(bench.index.roots.values())).scope, 0
    for seed in range(12):
        ids = np.asarray(words(60, seed)[:60], np.uint32)
        if len(bench.index.match(scope, ids, whole=True).blocks) == 15:
            try:
                bench.index.pin(scope, ids, 1e6)
                pinned += 15
            except PinRefusedError:
                break
    assert 0 < pinned <= 15, "a quarter of sixty pages for one key"
    assert bench.serve(words(150, 20), 9) < 150
    bench.scheduler.clock.sleep(2e6)
    bench.serve(words(220, 21), 9)
    bench.check_all_free()


# With chains.


def test_2_22_a_new_conversation_begins_with_what_others_computed() -> None:
    bench = Shared()
    system = words(24)
    first = bench.submit([*system, 1, 2, 3], 9, prefix=None, chain=ChainOptions())
    bench.run()
    second = bench.submit([*system, 4, 5, 6], 9, prefix=None, chain=ChainOptions())
    bench.run()
    bench.check_done(first, second)
    reports = [bench.last(r).chain for r in (first, second)]
    assert [r.status for r in reports] == ["created", "created"]
    assert [r.reused_tokens for r in reports] == [0, 24]
    assert reports[1].prefilled_tokens == 3
    told = [event.chain.reused_tokens for event in bench.events[second] if event.chain is not None]
    assert told[-1] == 24
    talk = [*system, 4, 5, 6, *bench.tokens(second), 7]
    third = bench.submit(talk, 9, prefix=None, chain=ChainOptions(reports[1].chain_id))
    bench.run()
    report = bench.last(third).chain
    assert (report.status, report.prefilled_tokens) == ("resumed", 2)
    bench.scheduler.chains.index.drop(bench.scheduler.chains.index.chains[report.chain_id], "deleted")
    again = bench.submit([*talk, *bench.tokens(third), 8], 9, prefix=None, chain=ChainOptions(report.chain_id))
    bench.run()
    report = bench.last(again).chain
    assert report.status == "recreated"
    assert report.reused_tokens == (len(talk) + 8) // PAGE * PAGE, "its blocks outlive a chain"
    bench.check_all_free()


def test_idle_chains_keep_their_blocks() -> None:
    bench = Shared(num_sequence_pages=1 + 40)
    talk = bench.submit(words(60), 9, prefix=None, chain=ChainOptions())
    bench.run()
    bench.check_done(talk)
    for seed in range(1, 6):
        bench.serve(words(50, seed))
    report = bench.last(talk).chain
    chain = bench.scheduler.chains.index.chains[report.chain_id]
    assert chain.tier.name == "DEVICE", "blocks that nobody has go before a conversation"
    assert bench.serve(words(60)) == 56
    bench.check_all_free()


@pytest.mark.parametrize("visible", range(12))
def test_60_a_turn_that_is_taken_back_in_part_writes_to_pages_of_its_own(visible: int) -> None:
    bench = Shared()
    talk = bench.submit(words(9), 30, prefix=None, chain=ChainOptions())
    while len(bench.tokens(talk)) < 12:
        bench.step()
    bench.scheduler.stop(talk, 0, visible)
    shown = bench.tokens(talk)[:visible]
    report = bench.last(talk).chain
    kept = bench.scheduler.chains.index.chains[report.chain_id].ledger.tolist()
    assert kept == [*words(9), *shown]
    reader = bench.submit([*words(9), *bench.tokens(talk), 7, 8], 20)
    bench.step(2)
    turn = bench.submit([*kept, 1, 2, 3], 9, prefix=None, chain=ChainOptions(report.chain_id, on_miss="error"))
    bench.run()
    bench.check_done(reader, turn)
    assert bench.serve([*kept, 1, 2, 3]) == (len(kept) + 2) // PAGE * PAGE, "what the second turn has is found too"
    bench.check_all_free()


# More is known than the chain has.


def turn(bench: Shared, prompt, max_tokens=9, prefix=None, **options):
    """A whole turn, checked: its last report, and the tokens that were computed for its prompt."""
    before = bench.prefilled
    request_id = bench.submit(list(prompt), max_tokens, prefix=prefix, chain=ChainOptions(**options))
    bench.run()
    bench.check_done(request_id)
    report = bench.last(request_id).chain
    assert bench.prefilled - before == report.prefilled_tokens
    return report, [*prompt, *bench.tokens(request_id)]


@pytest.mark.parametrize("branch", ["fork", "rewind"])
def test_66_an_edited_message_is_computed_from_where_it_was_edited(branch: str) -> None:
    bench = Shared()
    first, talk = turn(bench, words(40))
    _, longer = turn(bench, [*talk, *words(30, 1)], chain_id=first.chain_id)
    edited = [*longer[:70], 251, *words(9, 3)]
    report, _ = turn(bench, edited, chain_id=first.chain_id, branch=branch)
    assert report.status == {"fork": "forked", "rewind": "rewound"}[branch]
    assert (report.reused_tokens, report.miss, report.diverged_at) == (68, "diverged", 70), "the checkpoint has 48"
    assert (report.restored_from, report.retained_tokens) == ("device", 68)
    again, _ = turn(bench, [*longer, 7], chain_id=first.chain_id, on_miss="error" if branch == "fork" else "serve")
    assert again.reused_tokens >= len(longer) - PAGE
    bench.check_all_free()


def test_a_turn_that_others_have_computed_begins_with_their_rows() -> None:
    bench = Shared()
    first, talk = turn(bench, words(40))
    bench.serve([*talk, *words(50, 1)])
    report, _ = turn(bench, [*talk, *words(50, 1), 3], chain_id=first.chain_id, on_miss="error")
    assert (report.status, report.chain_id) == ("resumed", first.chain_id)
    assert report.reused_tokens == (len(talk) + 50) // PAGE * PAGE
    bench.check_all_free()


@pytest.mark.parametrize("checkpoints", [0, 2])
@pytest.mark.parametrize("when", range(1, 14))
def test_61_a_turn_on_others_rows_that_is_cut_off_leaves_the_chain_as_it_was(when: int, checkpoints: int) -> None:
    bench = Shared({"chain_checkpoints": checkpoints}, prefill_buckets=((1, 16),))
    first, talk = turn(bench, words(40))
    chain = bench.scheduler.chains.index.chains[first.chain_id]
    bench.serve([*talk, *words(50, 1)])
    goes_on = [*talk, *words(50, 1), *words(60, 2)]
    request_id = bench.submit(goes_on, 9, prefix=None, chain=ChainOptions(first.chain_id))
    bench.step(when)
    bench.scheduler.cancel(request_id)
    bench.run()
    if checkpoints:
        assert chain.state.name == "IDLE"
    options = {"chain_id": first.chain_id, "on_miss": "error" if checkpoints else "serve"}
    report, _ = turn(bench, [*goes_on, *bench.tokens(request_id), 5], **options)
    assert report.reused_tokens >= 96, "whole pages of what the other request computed"
    bench.check_all_free()


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("when", [1, 2, 3])
def test_61_it_is_as_it_was_without_a_checkpoint_too(where: str, when: int) -> None:
    bench = Shared(prefill_buckets=((1, 16),))
    first, talk = turn(bench, words(40))
    index = bench.scheduler.chains.index
    chain = index.chains[first.chain_id]
    bench.serve([*talk, *words(50, 1)])
    index.drop_checkpoints(chain)
    if where == "host":
        assert bench.scheduler.chains.tiers.demote(chain)
    goes_on = ChainOptions(first.chain_id, on_miss="error")
    request_id = bench.submit([*talk, *words(50, 1), *words(90, 2)], 9, prefix=None, chain=goes_on)
    bench.step(when)
    assert bench.scheduler.groups[request_id].choices[0].attached == 96
    bench.scheduler.cancel(request_id)
    bench.run()
    assert (chain.state.name, chain.processed, chain.tier.name) == ("IDLE", 48, where.upper())
    bench.index.evict(99)
    report, _ = turn(bench, [*talk, 7], chain_id=first.chain_id, on_miss="error")
    assert report.reused_tokens >= 48
    bench.check_all_free()


def test_rows_on_the_host_stay_there_while_blocks_serve_as_well() -> None:
    bench = Shared()
    first, talk = turn(bench, words(40))
    chain = bench.scheduler.chains.index.chains[first.chain_id]
    assert bench.scheduler.chains.tiers.demote(chain)
    report, talk = turn(bench, [*talk, 3], chain_id=first.chain_id, on_miss="error")
    assert "import_parked" not in bench.runner.calls
    assert (report.status, report.restored_from, report.reused_tokens) == ("resumed", "device", 48)
    assert bench.scheduler.chains.tiers.demote(chain)
    bench.index.evict(99)
    report, _ = turn(bench, [*talk, 3], chain_id=first.chain_id, on_miss="error")
    assert (report.status, report.restored_from, report.reused_tokens) == ("resumed", "host", len(talk) - 1)
    bench.check_all_free()


@pytest.mark.parametrize("pages", range(58, 72, 2))
def test_a_turn_needs_no_room_for_blocks_beside_its_chain(pages: int) -> None:
    """Decoded rows of this method are its chain's alone, so blocks of the same text take pages of their own."""
    bench = Shared({"chain_host_bytes": 0}, num_sequence_pages=1 + pages)
    request_id = bench.submit(words(10), 90, "selects", prefix=None, chain=ChainOptions())
    bench.run()
    chain_id, talk = bench.last(request_id).chain.chain_id, [*words(10), *bench.tokens(request_id)]
    bench.serve([*talk, *words(20, 1)], method="selects")
    goes_on = ChainOptions(chain_id, on_miss="error")
    again = bench.submit([*talk, *words(20, 1), *words(50, 2)], 40, "selects", prefix=None, chain=goes_on)
    bench.run()
    bench.check_done(again)
    assert bench.last(again).chain.reused_tokens in (99, 120)
    bench.check_all_free()


def test_what_is_told_first_is_what_happens() -> None:
    bench = Shared(prefill_buckets=((1, 16),))
    ids = [bench.submit([*words(40), seed], 9, prefix=None, chain=ChainOptions()) for seed in range(4)]
    bench.run()
    for request_id in ids:
        told = [event.chain for event in bench.events[request_id] if event.chain is not None]
        assert len(told) == 2, "once when it got its row, and at the end"
        assert told[0].reused_tokens == told[1].reused_tokens == bench.last(request_id).stats.cached_tokens
        first_token = next(i for i, event in enumerate(bench.events[request_id]) if event.token_ids)
        assert bench.events[request_id].index(next(e for e in bench.events[request_id] if e.chain)) < first_token
    assert [bench.last(r).chain.reused_tokens for r in ids] == [0, 40, 40, 40]
    bench.check_all_free()


def test_misses_are_told_and_counted() -> None:
    bench = Shared()
    metrics = bench.scheduler.metrics
    report, _ = turn(bench, words(40))
    assert (report.miss, report.reason) == ("cold", "cold")
    other = [*words(22), 251, *words(30, 5)]
    report, _ = turn(bench, other, salt="s")
    assert report.miss == "salt"
    report, _ = turn(bench, other)
    assert (report.miss, report.diverged_at, report.reused_tokens) == ("diverged", 22, 20)
    report, _ = turn(bench, [*words(40), 5])
    assert (report.miss, report.reused_tokens) == (None, 40), "all that can be found was"
    before = metrics.prefix_cache_queries.value(), metrics.prefix_cache_hits.value()
    bench.serve([*words(30), 250, 3, 4, 5, 6, 7])
    assert metrics.prefix_cache_queries.value() - before[0] == 36
    assert metrics.prefix_cache_hits.value() - before[1] == 28
    assert metrics.prefix_cache_misses.value(reason="diverged") == 2
    bench.check_all_free()


def test_91_exact_turns_leave_pruned_chains_alone() -> None:
    bench = Shared()
    first, talk = turn(bench, words(60))
    ids = np.asarray(talk[:60], np.uint32)
    parts = (PrunePart(((20, 40),), 0),)
    job = bench.scheduler.prunes.submit(PruneRequest("dense", ids, parts, chain_id=first.chain_id))
    bench.run()
    assert bench.scheduler.prunes.get(job.prune_id, "").status == "completed"
    chain = bench.scheduler.chains.index.chains[first.chain_id]
    assert chain.quality.pruned_tokens == 20

    def exact(chain_id: str | None, **options):
        request = [*talk, 3, 4, 5]
        chain_options = ChainOptions(chain_id, **options)
        return bench.submit(request, 9, prefix=PrefixOptions(exact=True), chain=chain_options)

    refused = exact(first.chain_id, on_miss="error")
    assert bench.last(refused).error.reason == "pruned"
    named, unnamed = exact(first.chain_id), exact(None)
    bench.run()
    bench.check_done(named, unnamed)
    reports = [bench.last(request_id).chain for request_id in (named, unnamed)]
    assert [(r.status, r.miss) for r in reports] == [("recreated", "pruned"), ("created", "pruned")]
    assert all(r.reused_tokens == 20 and not r.quality["pruned_tokens"] for r in reports), "up to the range"
    assert first.chain_id not in {r.chain_id for r in reports}
    anyhow = bench.submit([*talk, 3], 9, prefix=None, chain=ChainOptions(first.chain_id, on_miss="error"))
    bench.run()
    assert bench.last(anyhow).chain.reused_tokens >= len(talk) - 1
    assert bench.last(anyhow).stats.degraded_tokens > 0
    bench.check_all_free()


# What goes first.


def test_blocks_of_a_conversation_are_as_old_as_its_last_turn() -> None:
    bench = Shared()
    report, talk = turn(bench, words(40), ttl_s=1e9)
    for days in (0, 1):
        bench.scheduler.clock.sleep(days * 86_400.0)
        bench.serve(words(40, 1 + days))
        if not days:
            turn(bench, [*talk, 3], chain_id=report.chain_id, ttl_s=1e9)
    chains = bench.scheduler.chains.index
    chains.drop(chains.chains[report.chain_id], "deleted")
    order = []
    while (victim := bench.index.next_victim()) is not None:
        path = list(up(victim))
        order.append(path[-1].key)
        bench.index.evict(1)
    beginnings = [np.asarray(words(PAGE, seed), "<u4").tobytes() for seed in (1, 0, 2)]
    assert list(dict.fromkeys(order)) == beginnings, "not as of the end of the conversation"
    bench.check_all_free()


def test_a_block_that_many_have_found_outlives_a_conversation() -> None:
    bench = Shared(num_sequence_pages=1 + 40)
    for seed in range(8):
        bench.serve([*words(40), seed], 2)
    old, _ = turn(bench, words(50, 1), 2)
    bench.scheduler.clock.sleep(600.0)  # ten times what it is expected to be idle
    bench.serve([*words(40), 99], 2)
    for seed in range(2, 5):
        bench.serve(words(60, seed), 2)
    assert old.chain_id not in bench.scheduler.chains.index.chains or (
        bench.scheduler.chains.index.chains[old.chain_id].tier.name == "HOST"
    )
    assert bench.serve([*words(40), 77], 2) == 40
    bench.check_all_free()


# Host memory.


def leave(bench: Shared) -> None:
    """All that nobody has leaves the pool."""
    while bench.scheduler.radix.reclaim():
        bench.check()


def moved(bench: Shared, call: str) -> int:
    return bench.runner.calls.get(call, 0)


@pytest.mark.parametrize("method", ["dense", "selects"])
def test_80_blocks_that_were_found_come_back_from_host_memory(method: str) -> None:
    bench = Shared()
    bench.serve(words(150), method=method)
    bench.serve([*words(150), 3], method=method)
    leave(bench)
    host = bench.scheduler.radix.host
    assert (bench.index.num_blocks, len(host.blocks)) == (0, 37), "but for what nobody has found"
    assert host.used_bytes == bench.scheduler.chains.host.used_bytes == 37 * 64
    assert moved(bench, "export_pages") == 3, "sixteen in one copy"
    scope, ids = PrefixOptions(), np.asarray(words(150), np.uint32)
    found = radix_control.match(bench.scheduler.caches, method, scope, ids)
    assert (found.matched_tokens, found.host_tokens, found.miss["reason"]) == (0, 148, "evicted")
    assert bench.serve([*words(150), 4], method=method) == 148
    assert moved(bench, "import_pages") == 3
    assert len(host.blocks) == 37, "copies stay"
    leave(bench)
    assert moved(bench, "export_pages") == 3, "and need not be made again"
    assert bench.serve([*words(70), 250, 4], method=method) == 68
    assert bench.index.num_blocks < 25, "no more comes back than is asked for"
    for other in (PrefixOptions(salt="s"), PrefixOptions(tenant="t")):
        assert bench.serve(words(150), method=method, prefix=other) == 0
    bench.check_all_free()


def test_80_host_memory_has_a_bound_and_what_follows_goes_with_it() -> None:
    bench = Shared({"chain_host_bytes": 30 * 64})
    for seed in range(3):
        for _ in range(2 + seed):
            bench.serve([*words(80, seed), *words(3, seed + 7)])
        bench.scheduler.clock.sleep(1.0)
    leave(bench)
    host = bench.scheduler.radix.host
    assert 0 < host.used_bytes <= 30 * 64
    assert [bench.serve([*words(80, seed), 251]) for seed in range(3)][2] == 80, "the one that was found most"
    bench.check_all_free()


def test_chains_come_first_in_host_memory() -> None:
    bench = Shared({"chain_host_bytes": 16 * 64})
    report, talk = turn(bench, words(50), prefix=None)
    for _ in range(2):
        bench.serve(words(40, 1))
    leave(bench)
    host, tiers = bench.scheduler.radix.host, bench.scheduler.chains.tiers
    assert host.blocks
    chain = bench.scheduler.chains.index.chains[report.chain_id]
    assert tiers.demote(chain)
    assert not host.blocks, "they gave way"
    report, _ = turn(bench, [*talk, 3], chain_id=report.chain_id, on_miss="error")
    assert report.status == "resumed"
    bench.check_all_free()


def test_a_deleted_subtree_is_gone_from_host_memory_too() -> None:
    bench = Shared()
    for tail in (3, 4):
        bench.serve([*words(80), tail])
    scope = next(iter(bench.index.roots.values())).scope
    host = bench.scheduler.radix.host
    while bench.index.num_blocks > 12:
        bench.scheduler.radix.reclaim()
    assert host.blocks
    bench.index.delete(scope, np.asarray(words(80)[:4], np.uint32))
    assert not bench.index.num_blocks
    assert not host.blocks
    assert bench.serve([*words(80), 5]) == 0
    bench.check_all_free()


def test_what_is_pruned_is_gone_from_host_memory_too() -> None:
    bench = Shared()
    for tail in (3, 4):
        bench.serve([*words(80), tail])
    leave(bench)
    host = bench.scheduler.radix.host
    assert len(host.blocks) == 20
    ids = np.asarray(words(80), np.uint32)
    job = bench.scheduler.prunes.submit(PruneRequest("dense", ids, (PrunePart(((20, 60),), 0),)))
    assert bench.index.num_blocks == 15, "up to the end of the range it was brought back"
    while bench.scheduler.prunes.get(job.prune_id, "").status in ("queued", "running"):
        bench.step()
    assert bench.scheduler.prunes.get(job.prune_id, "").status == "completed"
    assert len(host.blocks) == 10, "the ten blocks of the range are not here either"
    request_id = bench.submit([*words(80), 5], 9)
    bench.run()
    stats = bench.last(request_id).stats
    assert (stats.cached_tokens, stats.resident_prefix_tokens, stats.degraded_tokens) == (80, 40, 60)
    assert bench.serve([*words(80), 6], prefix=PrefixOptions(exact=True)) == 20
    bench.check_all_free()


@pytest.mark.parametrize("call", ["export_pages", "import_pages"])
def test_copies_that_are_refused_cost_only_work(call: str) -> None:
    bench = Shared()
    for tail in (3, 4):
        bench.serve([*words(80), tail])
    real = getattr(bench.runner, call)

    def refuse(*args):
        raise RequestError("no memory for the copy")

    if call == "export_pages":
        bench.runner.export_pages = refuse  # type: ignore[method-assign]
        leave(bench)
        assert not bench.scheduler.radix.host.blocks
    else:
        leave(bench)
        bench.runner.import_pages = refuse  # type: ignore[method-assign]
    assert bench.serve([*words(80), 5]) == 0
    setattr(bench.runner, call, real)
    assert bench.serve([*words(80), 6]) == 80
    bench.check_all_free()


def test_preempted_and_waiting_rows_bring_blocks_back_once() -> None:
    bench = Shared(num_sequence_pages=1 + 26, num_rows=4)
    for tail in (3, 4):
        bench.serve([*words(60), tail])
    leave(bench)
    ids = [bench.submit([*words(60), *words(9, seed)], 20, seed=seed) for seed in range(1, 5)]
    bench.run()
    bench.check_done(*ids)
    assert moved(bench, "import_pages") <= 2 * len(ids)
    bench.check_all_free()


# Everything at once.

operations = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 60), st.integers(1, 30), st.integers(0, 3)),
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 60), st.integers(1, 30), st.integers(0, 3)),
    st.tuples(st.just("turn"), st.integers(0, 3), st.integers(1, 60), st.integers(1, 30), st.integers(0, 9)),
    st.tuples(st.just("named"), st.integers(0, 9), st.integers(0, 80), st.integers(1, 20), st.integers(0, 3)),
    st.tuples(st.just("demote"), st.integers(0, 9)),
    st.tuples(st.just("advance"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("preempt"), st.integers(0, 5)),
    st.tuples(st.just("evict"), st.integers(1, 9)),
    st.tuples(st.just("reclaim"), st.integers(1, 9)),
    st.tuples(st.just("reclaim"), st.integers(1, 99)),
    st.tuples(st.just("give way"), st.integers(1, 2)),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(operations, min_size=20, max_size=40),
    st.integers(30, 80),
    st.integers(1, 4),
    st.sampled_from([0, 4000, 1 << 30]),
)
def test_random_programs(program, pages: int, inflight: int, swap_bytes: int) -> None:
    """Prompts with few beginnings, in any order: everybody gets the tokens that he would have got alone."""
    settings_ = {"max_inflight_steps": inflight, "swap_bytes": swap_bytes, "chain_host_bytes": swap_bytes}
    windows = dict.fromkeys(("decode_window_tokens", "max_decode_window_tokens"), 4)
    bench = Shared({**settings_, **windows, "min_decode_window_tokens": 1}, num_sequence_pages=pages, num_rows=4)
    ids: list[str] = []
    for operation, *args in program:
        if operation in ("submit", "turn"):
            beginning, cut, max_tokens, twist = args
            prompt = [*words(60, beginning % 2)[:cut], *words(5, beginning)]
            if operation == "submit":
                method = ["dense", "dense", "selects", "window"][twist]
                ids.append(bench.submit(prompt, max_tokens, method))
            else:
                done = [r for r in ids if bench.events[r] and bench.reason(r) in ("stop", "length")]
                if done:
                    last = done[twist % len(done)]
                    prompt = [*bench.requests[last].prompt_ids, *bench.tokens(last), *words(3, beginning)][:200]
                ids.append(bench.submit(prompt, max_tokens, prefix=None, chain=ChainOptions()))
        elif operation == "named":
            number, cut, max_tokens, twist = args
            chains = list(bench.scheduler.chains.index.chains.values())
            if chains:
                chain = chains[number % len(chains)]
                known = chain.ledger.tolist()[: cut or None]  # 0: as it is, else from there on another text
                branch = ("fork", "rewind")[twist % 2]
                options = ChainOptions(chain.chain_id, branch=branch)
                exact = PrefixOptions(exact=True) if twist == 3 else None
                prompt = [*known, *words(4, twist)][:200]
                ids.append(bench.submit(prompt, max_tokens, chain.method, prefix=exact, chain=options))
        elif operation == "demote":
            tiers = bench.scheduler.chains.tiers
            idle = [c for c in tiers.index.victims() if c.payload is not None]
            if idle:
                tiers.demote(idle[args[0] % len(idle)])
                bench.check()
        elif operation == "advance":
            bench.step(args[0])
        elif operation == "cancel" and ids:
            bench.scheduler.cancel(ids[args[0] % len(ids)])
        elif operation == "preempt" and bench.scheduler.running:
            seq = bench.scheduler.running[args[0] % len(bench.scheduler.running)]
            if not seq.phase_due:
                bench.scheduler._preempt(seq)
        elif operation == "reclaim":
            for _ in range(args[0]):
                bench.scheduler.radix.reclaim()
            bench.check()
        elif operation == "give way":
            for _ in range(args[0]):
                bench.scheduler.radix.host.give_way()
            bench.check()
        elif operation == "evict":
            bench.index.evict(args[0])
            bench.check()
    bench.run()
    for request_id in ids:
        reason = bench.reason(request_id)
        alone, got = bench.alone(request_id), bench.tokens(request_id)
        assert got == alone if reason in ("stop", "length") else got == alone[: len(got)]
        if reason == "error":
            error = bench.last(request_id).error
            assert isinstance(error, CacheTooSmallError), error
    assert not bench.index.leases or bench.scheduler.chains.index.chains
    bench.check_all_free()


@pytest.mark.parametrize("seed", range(6))
def test_long_programs_under_pressure(seed: int) -> None:
    """A pool for a few texts, host memory for some more: what comes back is what was computed."""
    rng = random.Random(seed)
    budget = rng.choice([20, 60, 400]) * 64
    bench = Shared({"chain_host_bytes": budget}, num_sequence_pages=1 + 45, num_rows=3)
    host, ids = bench.scheduler.radix.host, list[str]()
    for _ in range(250):
        text = words(100, rng.randrange(6))[: rng.choice([30, 60, 100])]
        what = rng.random()
        if what < 0.5:
            prompt, limit = [*text, *words(rng.randrange(1, 6), rng.randrange(3))], rng.randrange(1, 12)
            ids.append(bench.submit(prompt, limit, rng.choice(["dense", "dense", "selects"])))
        elif what < 0.6:
            ids.append(bench.submit([*text, 1], rng.randrange(1, 12), prefix=None, chain=ChainOptions()))
        elif what < 0.8:
            bench.step(rng.randrange(1, 20))
        elif what < 0.85 and bench.index.roots:
            scope = rng.choice(list(bench.index.roots.values())).scope
            match = bench.index.match(scope, np.asarray(text, np.uint32))
            if match.blocks:
                bench.index.delete(scope, np.asarray(text, np.uint32)[: PAGE * rng.randint(1, len(match.blocks))])
        elif what < 0.88:
            host.give_way()
        else:
            bench.scheduler.radix.reclaim()
        bench.check()
        assert bench.scheduler.chains.host.used_bytes <= budget
    bench.run()
    for request_id in ids:
        if bench.reason(request_id) != "error":
            bench.check_done(request_id)
    assert host.stored > 50
    assert host.promoted > 0
    bench.check_all_free()


def test_who_waits_for_room_does_not_take_what_is_known_in_each_step() -> None:
    windows = dict.fromkeys(("decode_window_tokens", "max_decode_window_tokens"), 4)
    bench = Shared({**windows, "min_decode_window_tokens": 1}, num_sequence_pages=1 + 56)
    bench.serve(words(120), 1)
    reader = bench.submit(words(40, 9), 60, prefix=None)
    bench.step(3)
    leases, lease = [], bench.index.lease
    bench.index.lease = lambda match: leases.append(len(match.blocks)) or lease(match)  # type: ignore[method-assign]
    late = bench.submit([*words(120), *words(60, 3)], 8)
    steps = 0
    while bench.reason(reader) is None:
        bench.step()
        bench.check()
        steps += 1
    assert steps > 20
    assert len(leases) < 3
    bench.run()
    bench.check_done(reader, late)
    assert bench.last(late).stats.cached_tokens
    bench.check_all_free()


def test_no_copies_are_made_that_have_no_room_in_host_memory() -> None:
    bench = Shared({"chain_host_bytes": 1 << 20})
    bench.serve(words(120), 1)
    bench.serve(words(120), 1)
    host, exported, export = bench.scheduler.radix.host, [], bench.runner.export_pages
    bench.runner.export_pages = lambda *args: exported.append(1) or export(*args)  # type: ignore[method-assign]
    while not host.stored:
        assert bench.scheduler.radix.reclaim()
    assert exported
    while host.give_way():
        pass
    space = host._space
    assert not space.used_bytes
    space.used_bytes = space.capacity_bytes  # chains have all of it
    exported.clear()
    assert bench.index.num_blocks > 4
    while bench.scheduler.radix.reclaim():
        pass
    assert not bench.index.num_blocks
    assert not exported
    space.used_bytes = 0
    bench.check_all_free()


def test_81_blocks_and_chains_are_worth_what_a_model_needs_to_compute_them() -> None:
    bench = Shared()
    bench.scheduler.memory.geometry = dataclasses.replace(bench.scheduler.memory.geometry, hidden_size=4)
    geometry = bench.scheduler.memory.geometry
    long, short = bench.submit(words(120), 1), bench.submit(words(9, 7), 1)
    bench.run()
    bench.check_done(long, short)
    assert bench.index.next_victim().depth == 2, "that of the short text, though both are as old"
    for block in bench.index.blocks():
        block.used_s = block.hits = 0
        start = (block.depth - 1) * PAGE
        assert 2.0 ** bench.index.score(block) == pytest.approx(prefill_cost(geometry, start, start + PAGE))
    assert prefill_cost(geometry, 0, 120) > 120
    assert bench.scheduler.chains.index._cost(120) == prefill_cost(geometry, 0, 120)
