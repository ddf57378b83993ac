"""Named promises of pruning on a mock runner. Numbers are those of the serving specification's list of contract tests.

The mock's tokens depend on every row that is there, so a request on a pruned prefix has the tokens of a text of which
the same rows were masked, or it fails.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from sparsejax.engine import Engine
from sparsejax.errors import PrefixNotFoundError, PruneConflictError, PruneError, PruneNotFoundError, RequestError
from sparsejax.mock import MockMethod, MockRunner
from sparsejax.prune_jobs import POLICIES, PrunePart, PruneRequest
from sparsejax.request import PrefixOptions, Request, SamplingParams
from sparsejax.settings import EngineSettings
from tests.contracts.masked import Masked
from tests.contracts.pruning_bench import METHODS, Pruned, keeps, masked
from tests.contracts.test_radix_cache import PAGE, words


@pytest.mark.parametrize("method", METHODS)
def test_87_a_pruned_prefix_is_found_as_before_with_fewer_rows(method: str) -> None:
    bench = Pruned()
    bench.serve(words(80), method=method)
    free = bench.scheduler.memory.pool.free_head_pages
    info = bench.prune(words(80), (8, 24), (40, 44), method=method)
    assert info.status == "completed"
    result = info.result
    assert result["ranges"] == [[8, 24], [40, 44]]
    assert (result["range"], result["logical_tokens"], result["retained_tokens"]) == ([8, 44], 20, 0)
    assert (result["freed_device_slots"], result["affected_blocks"], result["freed_pages"]) == (20, 5, 5)
    assert result["quality_degraded"]
    slabs = bench.scheduler.limits.geometry.head_pages_per_sequence_page
    assert bench.scheduler.memory.pool.free_head_pages - free == 5 * slabs
    assert bench.resident(words(80), method) == (80, 60)
    bench.check_all_free()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranges", [[(0, 8)], [(8, 24), (40, 44)], [(72, 80)], [(0, 80)]])
def test_87_tokens_on_a_pruned_prefix_equal_those_of_masked_rows(ranges, method: str) -> None:
    bench = Pruned()
    bench.serve(words(80), 1, method=method)
    bench.prune(words(80), *ranges, method=method)
    text = Masked(words(80))
    for start, stop in ranges:
        text.drop(range(start, stop))
    expected = text.read([1, 2, 3]).generate(8, bench.seed())
    before = bench.prefilled
    assert bench.tokens_on([*words(80), 1, 2, 3], method=method) == expected
    assert bench.prefilled - before == 3, "only what is new is computed"
    alone = bench.runner.generate([*words(80), 1, 2, 3], 8, bench.seed() - 1)
    assert expected != alone
    bench.check_all_free()


def test_91_what_follows_inherits_the_loss_unless_exact_rows_are_wanted() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    bench.prune(words(80), (8, 24))
    longer = [*words(80), *words(20, 3)]
    text = Masked(words(80)).drop(range(8, 24)).read(words(20, 3))
    assert bench.tokens_on(longer, 1) == text.copy().generate(1, bench.seed() - 1)
    match = bench.index.match(bench.scheduler.chains.scope("dense", "", ""), np.array(longer, np.uint32))
    assert [block.tainted for block in match.blocks] == [False] * 20 + [True] * 4
    assert bench.tokens_on([*longer, 5]) == text.read([5]).generate(8, bench.seed() - 1)
    exact = bench.submit([*longer, 5], 8, prefix=PrefixOptions(exact=True))
    bench.run()
    bench.check_done(exact)
    assert bench.last(exact).stats.cached_tokens == 8
    bench.check_all_free()


def test_88_readers_keep_their_rows() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    reader = bench.submit([*words(80), 9], 30)
    bench.step(3)
    info = bench.prune(words(80), (8, 24), run=False)
    bench.step(2)
    assert bench.scheduler.prunes.get(info.prune_id, "").status == "completed"
    assert bench.reason(reader) is None
    bench.run()
    bench.check_done(reader)
    assert bench.resident(words(80)) == (80, 64)
    bench.check_all_free()


def test_85_what_is_refused_changes_nothing() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    bench.prune(words(80), (16, 32))
    before = bench.resident(words(80)), bench.scheduler.memory.pool.free_head_pages
    for ranges, wrong in (
        ([(3, 8)], PruneError),
        ([(8, 8)], PruneError),
        ([(8, 20)], PruneError),
        ([(20, 24)], PruneError),
        ([(8, 84)], PruneError),
        ([(0, 8), (4, 12)], PruneError),
        ([], PruneError),
    ):
        with pytest.raises(wrong):
            bench.prune(words(80), *ranges)
    with pytest.raises(PruneError, match="keep_tokens"):
        bench.prune(words(80), (0, 8), keep=4)
    for keep in (-1, 8, True, 1.5):
        with pytest.raises(PruneError, match="keep_tokens"):
            bench.prune(words(80), (0, 8), keep=keep, policy="kvzip_global")
    for wrong in ({"observation_tokens": 0}, {"score_chunk_tokens": True}, {"prev_postfix_tokens": -1}):
        with pytest.raises(PruneError, match=next(iter(wrong))):
            bench.prune(words(80), (0, 8), keep=4, policy="kvzip_global", **wrong)
    with pytest.raises(PruneError, match="block_timeout_s"):
        bench.prune(words(80), (0, 8), block_timeout_s=-1.0)
    with pytest.raises(PruneError, match="policy"):
        bench.prune(words(80), (0, 8), policy="best")
    with pytest.raises(PruneError, match="window"):
        bench.prune(words(80), (0, 8), method="window")
    for other in ({"salt": "s"}, {"tenant": "t"}, {"method": "selects"}):
        with pytest.raises(PrefixNotFoundError):
            bench.prune(words(80), (0, 8), **other)
    with pytest.raises(PrefixNotFoundError):
        bench.prune([*words(76), 1, 2, 3, 4], (0, 80))
    assert not bench.scheduler.prunes.pending
    assert (bench.resident(words(80)), bench.scheduler.memory.pool.free_head_pages) == before
    bench.check_all_free()


def test_ranges_can_be_pruned_again() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    bench.prune(words(80), (16, 32))
    info = bench.prune(words(80), (8, 40))
    assert info.result["freed_device_slots"] == 16, "of 32 tokens 16 had rows"
    bench.prune(words(80), (40, 44))
    assert bench.resident(words(80)) == (80, 44)
    text = Masked(words(80)).drop(range(8, 44)).read([7])
    assert bench.tokens_on([*words(80), 7]) == text.generate(8, bench.seed() - 1)
    bench.check_all_free()


def test_a_prompt_that_ends_within_a_pruned_range_is_computed_from_its_start() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    bench.prune(words(80), (16, 32))
    other = [*words(24), 1, 2, 3, 4, 5]
    assert bench.serve(other, 1) == 16
    assert bench.serve(other, 1) == 28, "it has left rows of its own"
    assert bench.resident(words(80)) == (80, 64)
    bench.check_all_free()


def test_97_jobs_are_their_tenants() -> None:
    bench = Pruned()
    mine = PrefixOptions(tenant="t")
    bench.serve(words(40), 1, prefix=mine)
    info = bench.prune(words(40), (8, 16), tenant="t", run=False, idempotency_key="k")
    jobs = bench.scheduler.prunes
    assert info.status == "queued"
    assert bench.prune(words(40), (0, 8), tenant="t", run=False, idempotency_key="k").prune_id == info.prune_id
    for other in ("", "u"):
        with pytest.raises(PruneNotFoundError):
            jobs.get(info.prune_id, other)
        with pytest.raises(PruneNotFoundError):
            jobs.cancel(info.prune_id, other)
        with pytest.raises(PruneNotFoundError):
            jobs.watch(info.prune_id, other)
        assert jobs.listed(other, 10) == []
    answer = jobs.watch(info.prune_id, "t")
    bench.run()
    assert answer.result(0) == jobs.get(info.prune_id, "t") == jobs.listed("t", 10)[0]
    assert answer.result(0).status == "completed"
    with pytest.raises(PruneConflictError):
        jobs.cancel(info.prune_id, "t")
    with pytest.raises(PruneNotFoundError):
        jobs.get("prune_x", "t")
    bench.check_all_free()


def test_a_cancelled_job_changes_nothing() -> None:
    bench = Pruned()
    bench.serve(words(40), 1)
    info = bench.prune(words(40), (8, 16), run=False)
    assert bench.scheduler.prunes.cancel(info.prune_id, "").status == "cancelled"
    bench.run()
    assert bench.resident(words(40)) == (40, 40)
    bench.check_all_free()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("keep", [8, 14, 23])
def test_86_92_the_best_rows_of_all_ranges_stay(policy: str, method: str, keep: int) -> None:
    ranges = [(8, 24), (40, 56)]
    bench = Pruned()
    bench.serve(words(80), 1, method=method)
    slabs = bench.scheduler.limits.geometry.head_pages_per_sequence_page
    free = bench.scheduler.memory.pool.free_head_pages
    info = bench.prune(words(80), *ranges, keep=keep, policy=policy, method=method, observation_tokens=7)
    assert info.status == "completed", info
    kept = keeps(bench, ranges, keep, method, 48 if policy == POLICIES[1] else 1 << 30)
    result, retained = info.result, keep // PAGE * PAGE
    assert (result["retained_tokens"], result["freed_device_slots"]) == (retained, 32 - retained)
    assert bench.scheduler.memory.pool.free_head_pages - free == (32 - retained) // PAGE * slabs
    assert bench.resident(words(80), method) == (80, 48 + retained)
    text = Masked(words(80))
    for (start, stop), stay in zip(ranges, kept, strict=True):
        text.drop(set(range(start, stop)) - set(stay))
    expected = text.read([1, 2, 3]).generate(8, bench.seed())
    assert bench.tokens_on([*words(80), 1, 2, 3], method=method) == expected
    bench.check_all_free()


def test_parts_have_budgets_of_their_own() -> None:
    ranges = [(8, 24), (24, 32), (40, 56)]
    bench = Pruned()
    bench.serve(words(80), 1)
    parts = (PrunePart((ranges[0], ranges[2]), 12), PrunePart((ranges[1],), 0))
    info = bench.prune(words(80), parts=parts, policy="kvzip_global", score_chunk_tokens=6)
    assert [part["retained_tokens"] for part in info.result["parts"]] == [12, 0]
    text = Masked(words(80))
    first, last = keeps(bench, [ranges[0], ranges[2]], 12)
    text.drop(set(range(8, 32)) - set(first)).drop(set(range(40, 56)) - set(last))
    assert bench.tokens_on([*words(80), 1]) == text.read([1]).generate(8, bench.seed() - 1)
    assert bench.runner.calls["score_rows"] == 3 + 2 + 3, "pieces of 6 tokens of each range"
    bench.check_all_free()


def test_the_window_stays_and_must_fit() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    with pytest.raises(PruneError, match="8 observed tokens stay, more than the 4") as refused:
        bench.prune(words(80), (8, 40), keep=4, policy="snapkv_global", observation_tokens=7)
    assert refused.value.param == "keep_tokens"
    assert bench.resident(words(80)) == (80, 80)
    bench.prune(words(80), (8, 12), keep=0, policy="snapkv_global")
    assert bench.resident(words(80)) == (80, 76)
    bench.check_all_free()


@pytest.mark.parametrize(("keep", "stay"), [(0, 0), (4, 4), (11, 8), (20, 20)])
def test_a_window_that_nobody_asked_for_gives_way(keep: int, stay: int) -> None:
    """64 tokens are observed, more than the last range has: the newest stay, and the other range has its own budget."""
    bench = Pruned()
    bench.serve(words(80), 1)
    parts = (PrunePart(((40, 56), (56, 64)), keep), PrunePart(((8, 24),), 8))
    info = bench.prune(words(80), parts=parts, policy="snapkv_global")
    assert [part["retained_tokens"] for part in info.result["parts"]] == [stay, 8]
    (first,) = keeps(bench, [(8, 24)], 8)
    text = Masked(words(80))
    text.drop(set(range(8, 24)) - set(first)).drop(set(range(40, 64 - stay)))
    assert bench.tokens_on([*words(80), 1]) == text.read([1]).generate(8, bench.seed() - 1)
    bench.check_all_free()


@pytest.mark.parametrize("call", ["score_rows", "read_scores", "pack_rows"])
def test_89_a_refused_program_changes_nothing(call: str) -> None:
    bench = Pruned()
    report, output = bench.turn(words(60), 10)
    talk = [*words(60), *output]
    before = bench.resident(talk), bench.scheduler.memory.pool.free_head_pages
    bench.runner.fail(call, 1, RequestError("no"))
    info = bench.prune(talk, (8, 24), keep=8, policy="kvzip_global", chain_id=report.chain_id)
    assert info.status == "failed"
    assert info.error["message"] == "no"
    assert (bench.resident(talk), bench.scheduler.memory.pool.free_head_pages) == before
    expected = bench.runner.generate([*talk, 1], 5, bench.seed())
    assert bench.turn([*talk, 1], 5, report.chain_id, on_miss="error")[1] == expected
    bench.check_all_free()


def test_89_scores_of_other_rows_are_not_used() -> None:
    """Between the scores and the exchange the path changes: the job starts again, at most three times."""
    for times in (1, 5):
        bench = Pruned()
        bench.serve(words(80), 1)
        read, seen = bench.runner.read_scores, []

        def changed(scores, bench=bench, read=read, seen=seen, times=times):
            if len(seen) < times:
                at = 64 - 8 * len(seen)
                plan = bench.index.plan_cut(
                    bench.scheduler.chains.scope("dense", "", ""), np.array(words(80), np.uint32), [(at, at + 8)]
                )
                bench.index.cut(plan, [((), np.zeros(0, np.int32))])
            seen.append(1)
            return read(scores)

        bench.runner.read_scores = changed
        info = bench.prune(words(80), (8, 80), keep=12, policy="kvzip_global")
        assert info.status == ("completed" if times == 1 else "failed"), info
        assert len(seen) == min(3, times + 1)
        rows = 8 + 12 if times == 1 else 80 - 24
        assert bench.resident(words(80)) == (80, rows)
        bench.check_all_free()


def test_56_decoding_goes_on_beside_scores() -> None:
    bench = Pruned({"max_inflight_steps": 3})
    bench.serve(words(80), 1)
    reader = bench.submit(words(9, 5), 60)
    bench.step(3)
    before = bench.runner.calls["decode"]
    info = bench.prune(words(80), (0, 80), keep=20, policy="kvzip_global", score_chunk_tokens=4, run=False)
    steps = 0
    while not bench.scheduler.prunes.get(info.prune_id, "").ended:
        probes = bench.runner.calls.get("score_rows", 0)
        bench.step()
        steps += 1
        assert bench.runner.calls.get("score_rows", 0) - probes <= 1, "one slice in each step"
    assert bench.runner.calls["decode"] - before >= steps - 1
    assert bench.scheduler.prunes.get(info.prune_id, "").status == "completed"
    assert bench.runner.calls["score_rows"] == 20
    bench.run()
    bench.check_done(reader)
    bench.check_all_free()


def test_prompts_come_before_scores() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    bench.submit(words(200, 9), 1, prefix=None)
    info = bench.prune(words(80), (0, 80), keep=20, policy="kvzip_global", run=False)
    while bench.scheduler.groups:
        bench.step()
        busy = any(seq.state.value == "prefill" for seq in bench.scheduler.running)
        assert not busy or not bench.runner.calls.get("score_rows")
    bench.run()
    assert bench.scheduler.prunes.get(info.prune_id, "").status == "completed"
    bench.check_all_free()


def test_89_a_job_that_is_cancelled_between_its_slices_leaves_nothing() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    for steps in range(1, 12):
        info = bench.prune(words(80), (0, 80), keep=20, policy="kvzip_global", score_chunk_tokens=16, run=False)
        bench.step(steps)
        if bench.scheduler.prunes.get(info.prune_id, "").ended:
            break
        bench.scheduler.prunes.cancel(info.prune_id, "")
        assert not bench.index.leases
        assert not bench.scheduler.radix.borrowed
        assert bench.resident(words(80)) == (80, 80)
        bench.check()
    assert steps > 4
    bench.run()
    bench.check_all_free()


def serve_on(engine: Engine, prompt: list[int]) -> None:
    """Waits until an engine's thread has answered a request."""
    over = threading.Event()
    request = Request("r", tuple(prompt), SamplingParams(max_tokens=1), prefix=PrefixOptions())
    engine.submit(request, lambda event: over.set())
    assert over.wait(10)


def test_an_idle_engine_carries_out_jobs_and_ends_them_with_itself() -> None:
    runner = MockRunner(methods=(MockMethod("dense"),))
    with Engine(runner, EngineSettings(prefix_cache=True)) as engine:
        serve_on(engine, words(80))
        wanted = PruneRequest(
            "dense", np.array(words(80), np.uint32), (PrunePart(((8, 40),), 8),), "kvzip_global", score_chunk_tokens=4
        )

        def start(caches):
            info = caches.prunes.submit(wanted)
            return caches.prunes.watch(info.prune_id, "")

        info = engine.consult(start).result(10).result(10)
        assert info.status == "completed"
        assert info.result["freed_device_slots"] == 24
        assert runner.calls["score_rows"] == 8
        runner.hold()
        waiting = engine.consult(start).result(10)
        engine.close()
        assert waiting.result(10).status == "cancelled"


def test_a_dead_engine_ends_its_jobs() -> None:
    runner = MockRunner(methods=(MockMethod("dense"),))
    with Engine(runner, EngineSettings(prefix_cache=True)) as engine:
        serve_on(engine, words(80))
        wanted = PruneRequest("dense", np.array(words(80), np.uint32), (PrunePart(((8, 40),), 8),), "kvzip_global")
        runner.fail("score_rows", 1, OSError("the device is gone"))

        def start(caches):
            info = caches.prunes.submit(wanted)
            return caches.prunes.watch(info.prune_id, "")

        info = engine.consult(start).result(10).result(10)
        assert (info.status, info.error["code"]) == ("failed", "engine_dead")
        assert engine.health == "failed"


def test_jobs_are_counted() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    bench.prune(words(80), (8, 24))
    bench.prune(words(80), (32, 40), recompute=True)
    info = bench.prune(words(80), (48, 56), run=False)
    bench.scheduler.prunes.cancel(info.prune_id, "")
    metrics = bench.scheduler.metrics
    assert metrics.prune_jobs.value(status="completed") == 2
    assert metrics.prune_jobs.value(status="cancelled") == 1
    assert metrics.prune_freed_slots.value() == 24
    assert metrics.prune_recomputed_tokens.value() == 40


def test_jobs_are_bounded() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    jobs = bench.scheduler.prunes
    queued = [bench.prune(words(80), (8, 24), run=False).prune_id for _ in range(64)]
    with pytest.raises(RequestError, match="unfinished") as refused:
        bench.prune(words(80), (8, 24), run=False)
    assert (refused.value.status, refused.value.code) == (503, "too_many_prunes")
    for prune_id in queued:
        jobs.cancel(prune_id, "")
    for _ in range(1000):
        jobs.cancel(bench.prune(words(80), (8, 24), run=False).prune_id, "")
    assert len(jobs.listed("", 5000)) == 1000
    with pytest.raises(PruneNotFoundError):
        jobs.get(queued[0], "")
    bench.check_all_free()


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_in_host_memory_belong_to_the_rows_before_them(recompute: bool) -> None:
    bench = Pruned()
    other = [*words(24), *words(40, 5)]
    for _ in range(2):
        bench.serve(words(80), 1)
        bench.serve(other, 1)
    bench.index.pin(bench.scheduler.chains.scope("dense", "", ""), np.array(words(24), np.uint32), 60.0)
    while bench.index.num_blocks > 6:
        assert bench.scheduler.radix.reclaim()
    assert len(bench.scheduler.radix.host.blocks) > 20
    info = bench.prune(words(24), (8, 24), recompute=recompute)
    assert info.status == "completed"
    gone = set(range(8, 24))
    for text in (words(80), other):
        found = masked(text, gone)
        if not recompute:  # nobody has found the last block before
            found = Masked(text[:-PAGE]).drop(gone).read(text[-PAGE:])
        expected = found.read([1]).generate(8, bench.seed())
        assert bench.tokens_on([*text, 1]) == expected
        cached = bench.last(f"r{bench.seed() - 1:03}").stats.cached_tokens
        assert cached == (24 if recompute else len(text) - PAGE)
    bench.clock.sleep(100.0)
    bench.check_all_free()
