"""Exact mode of pruning: what follows a range is computed again, as if what is gone had never been seen."""

from __future__ import annotations

import numpy as np
import pytest

from sparsejax.errors import RequestError
from sparsejax.prune_jobs import PrunePart
from tests.contracts.masked import Masked
from tests.contracts.pruning_bench import METHODS, Pruned, keeps, masked
from tests.contracts.test_radix_cache import words


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranges", [[(0, 8)], [(8, 24), (40, 44)], [(72, 80)], [(4, 8), (8, 20), (60, 80)]])
def test_exact_mode_equals_a_text_masked_from_its_start(ranges, method: str) -> None:
    bench = Pruned()
    bench.serve(words(80), 1, method=method)
    parts = tuple(PrunePart((pair,), 0) for pair in ranges)
    before = bench.prefilled
    info = bench.prune(words(80), parts=parts, method=method, recompute=True)
    assert info.status == "completed", info
    gone = {p for start, stop in ranges for p in range(start, stop)}
    left = sum(p not in gone for p in range(ranges[0][0], 80))
    assert info.result["recomputed_tokens"] == bench.prefilled - before == left
    assert bench.resident(words(80), method) == (80, 80 - len(gone))
    expected = masked(words(80), gone).read([1, 2, 3]).generate(8, bench.seed())
    assert bench.tokens_on([*words(80), 1, 2, 3], method=method) == expected
    assert bench.tokens_on([*words(80), 1, 2, 3], method=method) != expected, "another seed"
    bench.check_all_free()


@pytest.mark.parametrize("keep", [4, 12])
def test_exact_mode_with_rows_that_stay(keep: int) -> None:
    ranges = [(8, 24), (40, 56)]
    bench = Pruned()
    bench.serve(words(80), 1)
    info = bench.prune(words(80), *ranges, keep=keep, policy="kvzip_global", recompute=True)
    assert info.status == "completed", info
    stay = {p for each in keeps(bench, ranges, keep) for p in each}
    gone = {p for start, stop in ranges for p in range(start, stop)} - stay
    assert bench.resident(words(80)) == (80, 80 - len(gone))
    expected = masked(words(80), gone).read([1]).generate(8, bench.seed())
    assert bench.tokens_on([*words(80), 1]) == expected
    bench.prune(words(80), (4, 60), recompute=True)
    expected = masked(words(80), set(range(4, 60))).read([1]).generate(8, bench.seed())
    assert bench.tokens_on([*words(80), 1]) == expected
    bench.check_all_free()


def test_exact_mode_keeps_what_was_pruned_before_pruned() -> None:
    bench = Pruned()
    bench.serve(words(100), 1)
    bench.prune(words(100), (60, 76), keep=8, policy="kvzip_global")
    stay = set(keeps(bench, [(60, 76)], 8)[0])
    bench.prune(words(100), (8, 24), recompute=True)
    gone = {*range(8, 24), *range(60, 76)} - stay
    assert bench.resident(words(100)) == (100, 100 - len(gone))
    assert bench.tokens_on([*words(100), 1]) == masked(words(100), gone).read([1]).generate(8, bench.seed() - 1)
    bench.check_all_free()


@pytest.mark.parametrize("swap", [False, True])
def test_exact_mode_of_a_chain(swap: bool) -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    chain = bench.scheduler.chains.index.chains[report.chain_id]
    gone: set[int] = set()
    for turn, ranges in enumerate(([(8, 24)], [(40, 48)], [(4, 28), (64, 68)])):
        processed = chain.processed
        if swap:
            assert bench.scheduler.chains.tiers.demote(chain)
        info = bench.prune(talk, *ranges, chain_id=report.chain_id, recompute=True)
        assert info.status == "completed", info
        gone |= {p for start, stop in ranges for p in range(start, stop)}
        assert chain.processed == processed
        text = masked(talk[:processed], gone)
        talk += words(3, turn)
        expected = text.read(talk[len(text.tokens) :]).generate(5, bench.seed())
        before = bench.prefilled
        report, output = bench.turn(talk, 5, report.chain_id, on_miss="error")
        assert output == expected
        assert bench.prefilled - before == len(talk) - processed
        assert chain.quality.pruned_tokens == len(gone)
        talk += output
    bench.check_all_free()


def test_88_exact_mode_leaves_their_rows_to_those_who_read_behind() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    report, output = bench.turn([*words(80), 9], 10)
    talk = [*words(80), 9, *output]
    reader = bench.submit([*words(80), 8], 40)
    other = bench.submit([*words(60), 8], 40)
    bench.step(5)
    expected = masked(words(80), set(range(8, 24))).read([1])
    info = bench.prune(words(80), (8, 24), recompute=True)
    assert info.status == "completed"
    assert bench.reason(reader) is None
    bench.run()
    bench.check_done(reader, other)
    alone = bench.runner.generate([*talk, 1], 5, bench.seed())
    assert bench.turn([*talk, 1], 5, report.chain_id, on_miss="error")[1] == alone, "it was not named"
    for more in ([], bench.tokens(reader), [7]):
        text = masked([*words(80), 8, *more], set(range(8, 24))).read([1])
        assert bench.tokens_on([*words(80), 8, *more, 1]) == text.generate(8, bench.seed() - 1)
    assert bench.tokens_on([*words(80), 1]) == expected.generate(8, bench.seed() - 1)
    bench.check_all_free()


def test_exact_mode_waits_for_pins() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    bench.serve([*words(60), *words(20, 5)], 1)
    scope = bench.scheduler.chains.scope("dense", "", "")
    pin = bench.index.pin(scope, np.array([*words(60), *words(20, 5)], np.uint32), 1e6)
    info = bench.prune(words(80), (8, 24), recompute=True, block_timeout_s=0.1)
    assert info.status == "blocked"
    assert "pinned" in info.error["message"]
    bench.index.unpin(pin)
    assert bench.prune(words(80), (8, 24), recompute=True).status == "completed"
    bench.check_all_free()


def test_exact_mode_forgets_what_was_built_on_the_old_rows() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    for at in (16, 40, 60):
        bench.serve([*words(at), *words(20, 5)], 1)
    bench.prune(words(80), (8, 24), recompute=True)
    assert bench.serve([*words(16), *words(20, 5), 1]) == 36, "it had left before the range ended"
    gone = set(range(8, 24))
    for at in (40, 60):
        expected = masked([*words(at), *words(20, 5), 1], gone).generate(8, bench.seed())
        assert bench.tokens_on([*words(at), *words(20, 5), 1]) == expected
        assert bench.last(f"r{bench.seed() - 1:03}").stats.cached_tokens == at
    bench.check_all_free()


def test_exact_mode_without_room_changes_nothing() -> None:
    bench = Pruned(num_sequence_pages=1 + 24)
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    info = bench.prune(talk, (0, 4), chain_id=report.chain_id, recompute=True, block_timeout_s=0.0)
    assert info.status == "blocked"
    assert "free pages" in info.error["message"]
    assert not bench.scheduler.memory.lent_rows
    expected = bench.runner.generate([*talk, 1], 5, bench.seed())
    assert bench.turn([*talk, 1], 5, report.chain_id, on_miss="error")[1] == expected
    bench.check_all_free()


def test_exact_mode_of_rows_that_are_not_finite_changes_nothing() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    bench.runner.poison(words(80)[50])
    info = bench.prune(words(80), (0, 4), recompute=True)
    assert info.status == "failed"
    assert "finite" in info.error["message"]
    assert bench.resident(words(80)) == (80, 80)
    bench.check_all_free()


def test_exact_mode_notices_what_is_pruned_while_it_waits() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    bench.serve([*words(60), *words(20, 5)], 1)
    scope = bench.scheduler.chains.scope("dense", "", "")
    pin = bench.index.pin(scope, np.array([*words(60), *words(20, 5)], np.uint32), 1e6)
    jobs = bench.scheduler.prunes
    late = bench.prune(words(80), (8, 24), recompute=True, run=False, block_timeout_s=1e3)
    bench.step(10)
    assert not jobs.get(late.prune_id, "").ended
    for start in (0, 64):
        assert bench.prune(words(80), (start, start + 4)).status == "completed"
    bench.index.unpin(pin)
    bench.run()
    assert jobs.get(late.prune_id, "").status == "completed"
    text = Masked(words(8)).drop(range(4))
    for position, token in enumerate(words(80)[8:], 8):
        text.read([token])
        if 8 <= position < 24 or 64 <= position < 68:
            text.drop([position])
    assert bench.tokens_on([*words(80), 1]) == text.read([1]).generate(8, bench.seed() - 1)
    bench.check_all_free()


@pytest.mark.parametrize("call", ["setup_row", "unpark", "prefill", "bare"])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("named", [False, True])
def test_89_a_program_of_exact_mode_that_is_refused_changes_nothing(call: str, nth: int, named: bool) -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    before = bench.resident(talk), bench.scheduler.memory.pool.free_head_pages
    bench.runner.fail(call, nth, RequestError("no"))
    chain_id = report.chain_id if named else None
    info = bench.prune(talk, (8, 24), (32, 40), chain_id=chain_id, recompute=True)
    if call == "bare" and (nth > 1 or not named):
        assert info.status == "completed", "it is called once, for a chain"
        return
    assert (info.status, info.error["message"]) == ("failed", "no")
    assert (bench.resident(talk), bench.scheduler.memory.pool.free_head_pages) == before
    assert not bench.scheduler.memory.lent_rows
    expected = bench.runner.generate([*talk, 1], 5, bench.seed())
    assert bench.turn([*talk, 1], 5, report.chain_id, on_miss="error")[1] == expected
    bench.check_all_free()


def test_89_a_job_of_exact_mode_that_is_cancelled_leaves_nothing() -> None:
    bench = Pruned(prefill_buckets=((1, 16),))
    bench.serve(words(80), 1)
    free = bench.scheduler.memory.pool.free_head_pages
    for steps in range(1, 30):
        info = bench.prune(words(80), (8, 12), (40, 44), recompute=True, run=False)
        bench.step(steps)
        if bench.scheduler.prunes.get(info.prune_id, "").ended:
            break
        bench.scheduler.prunes.cancel(info.prune_id, "")
        assert not bench.index.leases
        assert not bench.scheduler.radix.borrowed
        assert not bench.scheduler.memory.lent_rows
        assert (bench.resident(words(80)), bench.scheduler.memory.pool.free_head_pages) == ((80, 80), free)
        bench.check()
    assert steps > 5
    bench.run()
    bench.check_all_free()


def test_exact_mode_gives_nothing_up_for_what_has_no_room_anyway() -> None:
    bench = Pruned({"chain_checkpoints": 0}, num_sequence_pages=1 + 33)
    report, output = bench.turn(words(60), 10)
    other, _ = bench.turn(words(40, 1), 4)
    chains = bench.scheduler.chains.index.chains
    options = {"chain_id": report.chain_id, "recompute": True, "block_timeout_s": 0.5}
    assert bench.prune([*words(60), *output], (0, 4), **options).status == "blocked"
    assert [chains[each.chain_id].tier.name for each in (report, other)] == ["DEVICE", "DEVICE"]
    assert bench.prune([*words(60), *output], (40, 44), **options).status == "completed"
    assert chains[other.chain_id].tier.name == "HOST"
    bench.check_all_free()


def test_exact_mode_notices_what_is_pruned_while_rows_are_scored() -> None:
    bench = Pruned()
    bench.serve(words(120), 1)
    jobs, ranges = bench.scheduler.prunes, [(60, 100)]
    make_room = jobs._worker.make_room
    jobs._worker.make_room = lambda target, pages: False
    late = bench.prune(words(120), *ranges, keep=8, policy="kvzip_global", recompute=True, run=False)
    bench.step(5)
    assert bench.prune(words(120), (8, 24)).status == "completed"
    bench.check()
    jobs._worker.make_room = make_room
    bench.run()
    assert jobs.get(late.prune_id, "").status == "completed"
    stay = keeps(bench, ranges, 8)[0]
    text = Masked(words(60)).drop(range(8, 24))
    for position in range(60, 120):
        text.read([words(120)[position]])
        if position < 100 and position not in stay:
            text.drop([position])
    assert bench.tokens_on([*words(120), 1]) == text.read([1]).generate(8, bench.seed() - 1)
    bench.check_all_free()


@pytest.mark.parametrize("runs", [False, True])
def test_jobs_give_way_to_requests_that_can_not_go_on_beside_them(runs: bool) -> None:
    windows = dict.fromkeys(("decode_window_tokens", "max_decode_window_tokens"), 4)
    bench = Pruned({**windows, "min_decode_window_tokens": 1}, num_sequence_pages=1 + 67)
    bench.serve(words(80), 1)
    bench.serve([*words(60), *words(5, 9)], 1)
    scope = bench.scheduler.chains.scope("dense", "", "")
    bench.index.pin(scope, np.array([*words(60), *words(5, 9)], np.uint32), 50.0)
    request = bench.submit(words(9, 3), 150) if runs else ""
    bench.step(3)
    info = bench.prune(words(80), (8, 24), recompute=True, run=False, block_timeout_s=1e3)
    bench.step(20)
    assert bench.scheduler.radix.borrowed, "it has computed its rows and waits for the pin"
    request = request or bench.submit(words(150, 3), 8)
    while not bench.reason(request):
        bench.step()
        bench.check()
    bench.check_done(request)
    jobs = bench.scheduler.prunes
    assert not jobs.get(info.prune_id, "").ended
    bench.clock.sleep(100.0)
    bench.run()
    # Of the text only what is pinned is left: the rest was given up for the request.
    assert jobs.get(info.prune_id, "").status in ("completed", "failed")
    bench.check_all_free()


def test_a_job_that_gives_way_again_and_again_ends() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    jobs = bench.scheduler.prunes
    assert not jobs.give_way()
    info = bench.prune(words(80), (8, 24), recompute=True, run=False)
    for times in range(1, 4):
        while not bench.scheduler.memory.lent_rows:
            bench.clock.sleep(0.1)
            bench.step()
        assert jobs.give_way()
        assert not jobs.give_way()
        assert not bench.scheduler.memory.lent_rows
        assert jobs.get(info.prune_id, "").ended == (times == 3)
    assert jobs.get(info.prune_id, "").status == "blocked"
    assert bench.resident(words(80)) == (80, 80)
    bench.check_all_free()
