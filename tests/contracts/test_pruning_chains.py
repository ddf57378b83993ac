"""Chains whose rows are pruned go on from their boundary without them: on the device, from the host, after restarts."""

from __future__ import annotations

import numpy as np
import pytest

from sparsejax.cache.chain_store import ChainStore
from sparsejax.chain_disk import Disk
from sparsejax.errors import ChainMismatchError, PruneError, RequestError
from sparsejax.prune_jobs import POLICIES, PrunePart
from sparsejax.request import ChainOptions, PrefixOptions
from tests.contracts.chain_disk_bench import ManualWorker, PlainArrays
from tests.contracts.masked import Masked
from tests.contracts.pruning_bench import Pruned, keeps, masked
from tests.contracts.test_radix_cache import PAGE, words


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_chain_goes_on_from_its_boundary_on_fewer_rows(where: str) -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    chain = bench.scheduler.chains.index.chains[report.chain_id]
    talk = [*words(60), *output]
    if where == "host":
        assert bench.scheduler.chains.tiers.demote(chain)
        bench.index.evict(1 << 30)
    info = bench.prune(talk, (8, 24), (40, 48), chain_id=report.chain_id)
    assert info.status == "completed"
    assert info.result["freed_device_slots"] == 24
    assert info.result["path"] == (where == "device")
    assert chain.processed == 69
    assert chain.ledger.tolist() == talk
    assert chain.quality.pruned_tokens == 24
    text = Masked(talk[:69]).drop([*range(8, 24), *range(40, 48)])
    for turn in range(3):
        if turn == 1:
            assert bench.scheduler.chains.tiers.demote(chain)
            if where == "host":
                bench.index.evict(1 << 30)
        new = words(7, turn)
        talk = [*talk, *new]
        expected = text.read(talk[len(text.tokens) :]).generate(5, bench.seed())
        before = bench.prefilled
        report, output = bench.turn(talk, 5, report.chain_id, on_miss="error")
        assert output == expected
        # What is new, and the last sampled token; where blocks stand for a chain on the host, less than a page more.
        tail = 0 if where == "host" or turn != 1 else PAGE - 1
        assert 7 + 1 <= bench.prefilled - before <= 7 + 1 + tail
        assert report.status == "resumed"
        assert report.quality["pruned_tokens"] == 24
        assert report.quality["degraded"]
        assert report.retained_tokens == report.reused_tokens - 24
        talk += output
    bench.check_all_free()


def test_a_chain_is_pruned_again_and_again() -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    text = Masked(talk[:69])
    for ranges in ([(8, 24)], [(40, 48)], [(4, 28), (48, 60)]):
        assert bench.prune(talk, *ranges, chain_id=report.chain_id).status == "completed"
        for start, stop in ranges:
            text.drop(range(start, stop))
        talk += words(3, len(talk))
        expected = text.read(talk[len(text.tokens) :]).generate(5, bench.seed())
        report, output = bench.turn(talk, 5, report.chain_id, on_miss="error")
        assert output == expected
        talk += output
    with pytest.raises(PruneError, match="partly"):
        bench.prune(talk, (8, 16), chain_id=report.chain_id)
    bench.check_all_free()


def test_a_chain_is_pruned_without_its_path() -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    bench.prune(talk, (8, 24))
    chain = bench.scheduler.chains.index.chains[report.chain_id]
    assert not chain.cuts, "who was not named keeps its rows"
    expected = bench.runner.generate([*talk, 1], 5, bench.seed())
    report, output = bench.turn([*talk, 1], 5, report.chain_id, on_miss="error")
    assert output == expected
    bench.check_all_free()


def test_88_a_job_waits_for_a_turn_of_its_chain() -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    turn = bench.submit([*talk, 1], 30, prefix=None, chain=ChainOptions(report.chain_id))
    bench.step(3)
    jobs = bench.scheduler.prunes
    late = bench.prune(talk, (8, 24), chain_id=report.chain_id, run=False)
    early = bench.prune(talk, (8, 24), chain_id=report.chain_id, run=False, block_timeout_s=0.05)
    bench.step(3)
    assert jobs.get(late.prune_id, "").status == "queued"
    bench.run()
    bench.check_done(turn)
    assert jobs.get(early.prune_id, "").status == "blocked"
    assert "turn under way" in jobs.get(early.prune_id, "").error["message"]
    assert jobs.get(late.prune_id, "").status == "completed"
    bench.check_all_free()


def test_other_texts_are_no_part_of_a_chain() -> None:
    bench = Pruned()
    report, _ = bench.turn(words(60), 10)
    with pytest.raises(ChainMismatchError) as refused:
        bench.prune([*words(30), 1, *words(29)], (8, 24), chain_id=report.chain_id)
    assert refused.value.token == 30
    bench.check_all_free()


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_chain_keeps_its_best_rows(policy: str) -> None:
    bench = Pruned()
    report, output = bench.turn(words(90), 10)
    talk = [*words(90), *output]
    text = Masked(talk[:99])
    for turn, (ranges, keep) in enumerate((([(8, 24)], 8), ([(40, 64)], 12), ([(4, 68)], 12))):
        info = bench.prune(talk, *ranges, keep=keep, policy=policy, chain_id=report.chain_id, observation_tokens=8)
        assert info.status == "completed", info
        ((start, stop),) = ranges
        there = [p for p in text.rows if start <= p < stop]
        protected = stop - 8 if policy == POLICIES[1] else 1 << 30
        score = bench.runner.prune.score
        best = sorted(there, key=lambda p: (p < protected, -np.float32(score(talk[p], p)), p))[:keep]
        text.drop(set(there) - set(best))
        assert info.result["freed_device_slots"] == len(there) - keep
        talk += words(3, turn)
        expected = text.read(talk[len(text.tokens) :]).generate(5, bench.seed())
        report, output = bench.turn(talk, 5, report.chain_id, on_miss="error")
        assert output == expected
        talk += output
    bench.check_all_free()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_pruned_chain_outlives_its_engine(tmp_path, recompute: bool) -> None:
    workers, stores = [], []

    def open_disk(runner) -> Disk:
        workers.append(ManualWorker())
        stores.append(ChainStore(tmp_path, PlainArrays()))
        return Disk(stores[-1], runner, 1 << 30, workers[-1])

    def settle(bench: Pruned) -> None:
        while workers[-1].jobs or workers[-1].finished:
            workers[-1].run()
            bench.scheduler.chains.poll()

    bench = Pruned(open_disk=open_disk)
    report, output = bench.turn(words(60), 10)
    settle(bench)
    talk, gone = [*words(60), *output], set(range(8, 24))
    bench.prune(talk, (8, 24), chain_id=report.chain_id, recompute=recompute)
    settle(bench)
    text = masked(talk[:69], gone) if recompute else Masked(talk[:69]).drop(gone)
    for turn in range(2):
        talk += words(3, turn)
        text.read(talk[len(text.tokens) :])
        stores[-1].close()
        bench = Pruned(open_disk=open_disk)
        chain = bench.scheduler.chains.index.chains[report.chain_id]
        assert chain.quality.pruned_tokens == 16
        expected = text.generate(5, bench.seed())
        report, output = bench.turn(talk, 5, report.chain_id, on_miss="error")
        assert output == expected
        assert report.restored_from == "disk"
        talk += output
        settle(bench)
    stores[-1].close()
    bench = Pruned(open_disk=open_disk)
    info = bench.prune(talk, (4, 28), chain_id=report.chain_id, run=False)
    while not bench.scheduler.prunes.get(info.prune_id, "").ended:
        bench.step()
        workers[-1].run()
    assert bench.scheduler.prunes.get(info.prune_id, "").status == "completed", "it came from disk for it"
    text.drop(range(4, 28)).read([*talk[len(text.tokens) :], 7])
    expected = text.generate(5, bench.seed())
    assert bench.turn([*talk, 7], 5, report.chain_id, on_miss="error")[1] == expected
    bench.check_all_free()
    settle(bench)
    stores[-1].close()


@pytest.mark.parametrize("keep", [0, 8])
def test_90_a_pruned_chain_goes_to_the_host_and_back(keep: int) -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    chain = bench.scheduler.chains.index.chains[report.chain_id]
    policy = "kvzip_global" if keep else "drop"
    bench.prune(talk, (8, 24), keep=keep, policy=policy, chain_id=report.chain_id)
    gone = set(range(8, 24)) - set(keeps(bench, [(8, 24)], keep)[0])
    text = Masked(talk[:69]).drop(gone)
    for turn in range(2):
        assert bench.scheduler.chains.tiers.demote(chain)
        bench.index.evict(1 << 30)
        talk += words(3, turn)
        expected = text.read(talk[len(text.tokens) :]).generate(5, bench.seed())
        report, output = bench.turn(talk, 5, report.chain_id, on_miss="error")
        assert (output, report.restored_from) == (expected, "host")
        talk += output
    bench.check_all_free()


def test_a_chain_gives_back_the_pages_of_its_ranges() -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    pool = bench.scheduler.memory.pool
    free = pool.free_head_pages
    info = bench.prune([*words(60), *output], (8, 24), chain_id=report.chain_id)
    assert info.result["freed_pages"] == 4
    assert pool.free_head_pages - free == 4 * bench.scheduler.limits.geometry.head_pages_per_sequence_page
    bench.check_all_free()


@pytest.mark.parametrize("first", [True, False])
def test_a_chain_that_goes_back_has_the_rows_of_then(first: bool) -> None:
    bench = Pruned({"chain_checkpoints": 4})
    report, output = bench.turn(words(40), 10)
    talk, gone = [*words(40), *output], set(range(8, 24)) if first else set()
    if first:
        bench.prune(talk, (8, 24), chain_id=report.chain_id)
    text = Masked(talk[:49]).drop(gone)
    more = [*talk, *words(20, 3)]
    report, output = bench.turn(more, 6, report.chain_id, on_miss="error")
    more += output
    bench.prune(more, (52, 60), chain_id=report.chain_id)
    other = [*talk, *words(5, 7)]
    expected = text.read(other[49:]).generate(5, bench.seed())
    report, output = bench.turn(other, 5, report.chain_id, on_miss="error", branch="rewind")
    assert (report.status, output) == ("rewound", expected)
    assert report.quality["pruned_tokens"] == len(gone)
    bench.check_all_free()


def test_chains_publish_no_decoded_tokens_of_methods_that_select() -> None:
    bench = Pruned()
    options = {"method": "selects", "prefix": None}
    first = bench.submit(words(20), 10, chain=ChainOptions(), **options)
    bench.run()
    talk = [*words(20), *bench.tokens(first), *words(9, 3)]
    chain_id = bench.last(first).chain.chain_id
    second = bench.submit(talk, 10, chain=ChainOptions(chain_id, on_miss="error"), **options)
    bench.run()
    bench.check_done(first, second)
    assert bench.serve([*talk, *bench.tokens(second), 1], method="selects") == 20
    bench.check_all_free()


def test_what_a_chain_computes_on_fewer_rows_is_not_exact_for_others() -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    bench.prune(talk, (8, 24), chain_id=report.chain_id)
    chain = bench.scheduler.chains.index.chains[report.chain_id]
    assert bench.scheduler.chains.tiers.demote(chain)
    bench.index.evict(1 << 30)
    bench.serve(words(40), 1)
    text = Masked(talk[:69]).drop(range(8, 24)).read([*talk[69:], 1])
    report, output = bench.turn([*talk, 1], 5, report.chain_id, on_miss="error")
    assert (report.restored_from, output) == ("host", text.generate(5, bench.seed() - 1))
    longer = [*talk, 1, *output, 2]
    exact = bench.submit(longer, 8, prefix=PrefixOptions(exact=True))
    bench.run()
    bench.check_done(exact)
    assert bench.last(exact).stats.cached_tokens == 40
    bench.check_all_free()


def test_a_path_is_pruned_under_a_chain_that_was_pruned_before() -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    bench.prune(talk, (8, 24), chain_id=report.chain_id)
    bench.prune(talk, (4, 68))
    text = Masked(talk[:69]).drop(range(8, 24)).read([*talk[69:], *words(9, 3)])
    expected = text.generate(5, bench.seed())
    report, output = bench.turn([*talk, *words(9, 3)], 5, report.chain_id, on_miss="error")
    assert output == expected
    path = Masked(talk[:68]).drop(range(4, 68)).read([*talk[68:], 7])
    assert bench.tokens_on([*talk, 7]) == path.generate(8, bench.seed() - 1)
    bench.check_all_free()


@pytest.mark.parametrize("recompute", [False, True])
def test_rows_that_all_stay_are_left_alone(recompute: bool) -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    chain = bench.scheduler.chains.index.chains[report.chain_id]
    bench.prune(talk, (8, 24), keep=8, policy="kvzip_global", chain_id=report.chain_id)
    pages, before = chain.payload.pages.held().tolist(), bench.prefilled
    options = {"policy": "kvzip_global", "chain_id": report.chain_id, "recompute": recompute}
    info = bench.prune(talk, (8, 24), keep=12, **options)
    assert info.status == "completed"
    assert (info.result["retained_tokens"], info.result["freed_device_slots"], info.result["freed_pages"]) == (8, 0, 0)
    assert bench.prefilled == before
    assert chain.payload.pages.held().tolist() == pages
    bench.prune(talk, parts=(PrunePart(((8, 24),), 12), PrunePart(((32, 40),), 0)), **options)
    stay = set(keeps(bench, [(8, 24)], 8)[0])
    gone = {*range(8, 24), *range(32, 40)} - stay
    text = Masked(talk[:69]).drop(gone)
    if recompute:
        text = Masked(talk[:32]).drop(gone - set(range(32, 40)))
        for position, token in enumerate(talk[32:69], 32):
            text.read([token]).drop([position] if position < 40 else [])
    expected = text.read([*talk[69:], 1]).generate(5, bench.seed())
    assert bench.turn([*talk, 1], 5, report.chain_id, on_miss="error")[1] == expected
    bench.check_all_free()


def test_89_a_chain_that_can_not_be_parked_stays_as_it_is() -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    before = bench.resident(talk), bench.scheduler.memory.pool.free_head_pages
    bench.runner.fail("bare", 1, RequestError("no"))
    info = bench.prune(talk, (8, 24), keep=4, policy="kvzip_global", chain_id=report.chain_id)
    assert (info.status, info.error["message"]) == ("failed", "no")
    assert (bench.resident(talk), bench.scheduler.memory.pool.free_head_pages) == before
    expected = bench.runner.generate([*talk, 1], 5, bench.seed())
    assert bench.turn([*talk, 1], 5, report.chain_id, on_miss="error")[1] == expected
    bench.check_all_free()


def test_a_chain_that_a_turn_takes_while_it_is_scored_is_scored_again() -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    info = bench.prune(
        talk, (8, 40), keep=8, policy="kvzip_global", score_chunk_tokens=4, chain_id=report.chain_id, run=False
    )
    bench.step(4)
    assert bench.runner.calls["score_rows"] > 1
    turn = bench.submit([*talk, 1], 20, prefix=None, chain=ChainOptions(report.chain_id, on_miss="error"))
    bench.run()
    bench.check_done(turn)
    assert bench.scheduler.prunes.get(info.prune_id, "").status == "completed"
    chain = bench.scheduler.chains.index.chains[report.chain_id]
    assert chain.quality.pruned_tokens == 24
    stay = set(keeps(bench, [(8, 40)], 8)[0])
    talk = [*talk, 1, *bench.tokens(turn)]
    text = Masked(talk[:-1]).drop(set(range(8, 40)) - stay)
    expected = text.read([talk[-1], 2]).generate(5, bench.seed())
    assert bench.turn([*talk, 2], 5, report.chain_id, on_miss="error")[1] == expected
    bench.check_all_free()


def test_a_chain_on_the_host_comes_for_its_pruning_if_there_is_room() -> None:
    windows = dict.fromkeys(("decode_window_tokens", "max_decode_window_tokens"), 4)
    settings = {**windows, "min_decode_window_tokens": 1, "chain_checkpoints": 0}
    bench = Pruned(settings, num_sequence_pages=1 + 40)
    report, output = bench.turn(words(60), 10)
    chain = bench.scheduler.chains.index.chains[report.chain_id]
    assert bench.scheduler.chains.tiers.demote(chain)
    bench.index.evict(1 << 30)
    other, _ = bench.turn(words(40, 1), 4)
    reader = bench.submit(words(90, 3), 20, prefix=None)
    bench.step(3)
    talk, chains = [*words(60), *output], bench.scheduler.chains.index.chains
    info = bench.prune(talk, (8, 24), chain_id=report.chain_id, block_timeout_s=0.03)
    assert info.status == "blocked"
    assert bench.reason(reader) is None
    assert chains[other.chain_id].tier.name == "DEVICE", "nothing is given up for what has no room anyway"
    bench.run()
    bench.check_done(reader)
    for seed in range(5, 9):
        bench.serve(words(60, seed), 1)  # blocks all over the pool
    info = bench.prune(talk, (8, 24), chain_id=report.chain_id, block_timeout_s=0.0)
    assert info.status == "completed", "room is made at once"
    bench.check_all_free()


def test_a_chain_that_goes_while_room_is_made_for_it_is_gone() -> None:
    bench = Pruned({"chain_checkpoints": 0}, num_sequence_pages=1 + 40)
    report, output = bench.turn(words(60), 10)
    chains = bench.scheduler.chains
    chain = chains.index.chains[report.chain_id]
    assert chains.tiers.demote(chain)
    bench.index.evict(1 << 30)
    for seed in range(5, 9):
        bench.serve(words(60, seed), 1)  # blocks all over the pool
    reclaim = chains.reclaim

    def short_of_host_memory(keep):
        chains.index.drop(keep, "evicted")
        return reclaim()

    chains.reclaim = short_of_host_memory  # type: ignore[method-assign]
    info = bench.prune([*words(60), *output], (8, 24), chain_id=report.chain_id)
    assert info.status == "failed"
    assert report.chain_id in info.error["message"], info
    chains.reclaim = reclaim  # type: ignore[method-assign]
    bench.check_all_free()
