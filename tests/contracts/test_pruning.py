"""Named promises of pruning on a mock runner. Numbers are those of the serving specification's list of contract tests.

The mock's tokens depend on every row that is there, so a request on a pruned prefix has the tokens of a text of which
the same rows were masked, or it fails.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from sparsejax.cache.chain_store import ChainStore
from sparsejax.chain_disk import Disk
from sparsejax.engine import Engine
from sparsejax.errors import (
    ChainMismatchError,
    PrefixNotFoundError,
    PruneConflictError,
    PruneError,
    PruneNotFoundError,
    RequestError,
)
from sparsejax.mock import MockMethod, MockRunner
from sparsejax.prune_jobs import POLICIES, PruneInfo, PrunePart, PruneRequest
from sparsejax.request import ChainOptions, PrefixOptions, Request, SamplingParams
from sparsejax.settings import EngineSettings
from tests.contracts.chain_disk_bench import ManualWorker, PlainArrays
from tests.contracts.masked import Masked
from tests.contracts.test_radix_cache import PAGE, Shared, words


class Pruned(Shared):
    """A bench that prunes."""

    def prune(self, ids, *ranges, keep: int = 0, method: str = "dense", run: bool = True, **options) -> PruneInfo:
        parts = options.pop("parts", None) or (PrunePart(ranges, keep),)
        request = PruneRequest(method, np.array(ids, np.uint32), parts, **options)
        jobs = self.scheduler.prunes
        info = jobs.submit(request)
        while run and not jobs.get(info.prune_id, request.tenant).ended:
            self.step()
        return jobs.get(info.prune_id, request.tenant)

    def resident(self, ids, method: str = "dense") -> tuple[int, int]:
        """Tokens of a text that are found, and rows that a request on them gets."""
        match = self.index.match(self.scheduler.chains.scope(method, "", ""), np.array(ids, np.uint32), whole=True)
        return len(match.blocks) * PAGE, len(match.pages) * PAGE

    def turn(self, ids, count: int = 8, chain_id: str | None = None, **options):
        """A turn of a chain: its report and its tokens."""
        request_id = self.submit(list(ids), count, prefix=None, chain=ChainOptions(chain_id, **options))
        self.run()
        event = self.last(request_id)
        assert event.finish_reason == "length", event
        return event.chain, self.tokens(request_id)

    def tokens_on(self, prompt, count: int = 8, **options) -> list[int]:
        """The tokens of a request, which may not be what it would get alone."""
        request_id = self.submit(list(prompt), count, **options)
        self.run()
        assert self.reason(request_id) == "length"
        return self.tokens(request_id)

    def seed(self) -> int:
        """Of the next request."""
        return len(self.requests)


METHODS = ["dense", "selects"]


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


# Jobs.


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


# Chains.


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


# Scores.


def keeps(bench: Pruned, ranges, keep: int, method: str = "dense", protected: int = 1 << 30) -> list[list[int]]:
    """The tokens of each range that stay: an independent choice, one budget for all, whole pages of each range."""
    score = bench.runner.prune.score
    tokens = words(200)
    best: list[tuple[float, int, list[int]]] = []
    for i, (start, stop) in enumerate(ranges):
        rows = [(float("inf") if p >= protected else score(tokens[p], p), p) for p in range(start, stop)]
        if method == "selects":
            pages = [rows[at : at + PAGE] for at in range(0, len(rows), PAGE)]
        else:
            rows.sort(key=lambda row: (-row[0], row[1]))
            pages = [rows[at : at + PAGE] for at in range(0, len(rows), PAGE)]
        best += [(-sum(np.float64(value) for value, _ in page), i, [p for _, p in page]) for page in pages]
    best.sort(key=lambda page: page[0])
    kept: list[list[int]] = [[] for _ in ranges]
    for _, i, positions in best[: keep // PAGE]:
        kept[i] = sorted([*kept[i], *positions])
    return kept


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


def test_the_window_stays_and_must_fit() -> None:
    bench = Pruned()
    bench.serve(words(80), 1)
    info = bench.prune(words(80), (8, 40), keep=4, policy="snapkv_global", observation_tokens=7)
    assert info.status == "failed"
    assert info.error["code"] == "invalid_prune"
    assert "observed" in info.error["message"]
    assert bench.resident(words(80)) == (80, 80)
    bench.prune(words(80), (8, 12), keep=0, policy="snapkv_global")
    assert bench.resident(words(80)) == (80, 76)
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


# Computed again.


def masked(tokens: list[int], gone: set[int]) -> Masked:
    """A text of which some tokens were never seen by others."""
    text = Masked()
    for position, token in enumerate(tokens):
        text.read([token])
        if position in gone:
            text.drop([position])
    return text


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
    bench.prune(talk, (4, 28), chain_id=report.chain_id)
    text.drop(range(4, 28)).read([*talk[len(text.tokens) :], 7])
    expected = text.generate(5, bench.seed())
    assert bench.turn([*talk, 7], 5, report.chain_id, on_miss="error")[1] == expected
    bench.check_all_free()
    settle(bench)
    stores[-1].close()


# With the engine's thread.


def test_an_idle_engine_carries_out_jobs_and_ends_them_with_itself() -> None:
    runner = MockRunner(methods=(MockMethod("dense"),))
    with Engine(runner, EngineSettings(prefix_cache=True)) as engine:
        over = threading.Event()
        request = Request("r", tuple(words(80)), SamplingParams(max_tokens=1), prefix=PrefixOptions())
        engine.submit(request, lambda event: over.set())
        assert over.wait(10)
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
        over = threading.Event()
        request = Request("r", tuple(words(80)), SamplingParams(max_tokens=1), prefix=PrefixOptions())
        engine.submit(request, lambda event: over.set())
        assert over.wait(10)
        wanted = PruneRequest("dense", np.array(words(80), np.uint32), (PrunePart(((8, 40),), 8),), "kvzip_global")
        runner.fail("score_rows", 1, OSError("the device is gone"))

        def start(caches):
            info = caches.prunes.submit(wanted)
            return caches.prunes.watch(info.prune_id, "")

        info = engine.consult(start).result(10).result(10)
        assert (info.status, info.error["code"]) == ("failed", "engine_dead")
        assert engine.health == "failed"


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


# What other states of a chain, and other rows of its text, have to do with it.


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
