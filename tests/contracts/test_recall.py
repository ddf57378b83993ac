"""Named promises of recall on a mock runner: no row of a chain is lost or twice there, and a turn ends as it began."""

from __future__ import annotations

import dataclasses
import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from sparsejax import chain_reports
from sparsejax.cache.chain import Chain, ChainState, Tier
from sparsejax.cache.evicted import EvictedPages, EvictedStore, best_first, joined_votes
from sparsejax.errors import RequestError
from sparsejax.launches import RunnerError
from sparsejax.mock import METHODS, ContractError, MockMethod
from sparsejax.mock_stamps import next_stamp
from sparsejax.plans import FrontRow
from sparsejax.recall import SpillingFacts, whole_pages
from sparsejax.request import ChainOptions
from sparsejax.settings import EngineSettings
from tests.contracts.test_chains import ALL, Talk, engine_settings, machines, operations, run_program, words

NAMES = [method.name for method in ALL if method.evicts]
PAGE = 4


def talk_of(budget: object = "all", settings_: EngineSettings | None = None, **mock: object) -> Talk:
    settings_ = settings_ or EngineSettings(recall_host_bytes=1 << 30)
    talk = Talk(settings_, **mock)
    talk.options = {"recall": "host", "recall_budget": budget}
    return talk


def history_stamps(ids: list[int]) -> list[int]:
    """What the mock stores for each token."""
    stamps, last = [], 0
    for i, token in enumerate(ids):
        last = next_stamp(last, token, i)
        stamps.append(last)
    return stamps


def dropped_stamps(evicted: tuple[EvictedPages, ...], layer: int, head: int, heads: int) -> list[int]:
    cell = layer * heads + head
    blocks = [some.payload[layer, head, : some.counts[layer, head]].reshape(-1) - cell for some in evicted]
    return [int(stamp) for block in blocks for stamp in block]


def check_rows(talk: Talk, chain: Chain) -> None:
    """The chain's own rows and the dropped ones are those of every processed token, once each."""
    assert chain.tier is Tier.DEVICE
    row, geometry = chain.payload.parked.payload, talk.bench.runner.limits.geometry
    everything = history_stamps(chain.ledger.tolist()[: chain.processed])
    lengths = chain.payload.pages.lengths
    for layer, head in np.ndindex(geometry.num_layers, geometry.num_kv_heads):
        l, h = layer % lengths.shape[0], head % lengths.shape[1]
        own = row.stamps[l][h][: int(lengths[l, h])].tolist()
        dropped = dropped_stamps(chain.evicted, layer, head, geometry.num_kv_heads)
        assert sorted([*own, *dropped]) == sorted(everything)


def loans(talk: Talk) -> list:
    return [seq for seq in talk.bench.scheduler.running if seq.loan is not None]


# What is dropped and what comes back.


@pytest.mark.parametrize("inflight", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_there_once(name: str, inflight: int) -> None:
    settings_ = EngineSettings(recall_host_bytes=1 << 30, max_inflight_steps=inflight)
    talk = talk_of("all", settings_, prefill_buckets=((1, 16), (1, 64)))
    _, chain = talk.turn(words(41), 9, name)
    check_rows(talk, chain)
    for n in range(1, 5):
        dropped = sum(int(some.counts.sum()) for some in chain.evicted)
        report, _ = talk.turn([*chain.ledger.tolist(), *words(n * 9, n)], 20, name, chain.chain_id)
        check_rows(talk, chain)
        assert report.recall.evicted_pages >= report.recall.lent_pages >= dropped > 0
        assert report.recall.scored_pages == 0
        assert report.quality["recalled_tokens"] > 0
    talk.end()
    assert talk.chains.recall.store.used_bytes == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_context_is_read_from_the_first_new_token_on(name: str) -> None:
    talk = talk_of()
    _, chain = talk.turn(words(61), 9, name)
    processed = chain.processed
    talk.send([*chain.ledger.tolist(), *words(9, 3)], 30, name, chain.chain_id)
    talk.bench.step()
    (seq,) = loans(talk)
    row = talk.bench.runner._rows[seq.row]
    heads, everything = row.lent.shape[1], history_stamps(chain.ledger.tolist())
    for (l, h), lent in row.loan.items():
        parts = np.arange(lent.shape[0]) + (l * heads + h) * lent.shape[0]
        for part, rows in zip(parts, lent, strict=True):
            seen = [*(rows - part).tolist(), *row.stamps[l][h].tolist()]
            assert len(set(seen)) == len(seen), "once each"
            assert set(everything[:processed]) <= set(seen)
    talk.bench.run()
    talk.end()


@pytest.mark.parametrize("name", NAMES)
def test_the_best_pages_of_each_head_are_lent(name: str) -> None:
    talk = talk_of(2 * PAGE)
    _, chain = talk.turn(words(61), 9, name)
    geometry = talk.bench.runner.limits.geometry
    everything = history_stamps(chain.ledger.tolist())
    # A page is worth the most the older its oldest row is, in odd heads the younger.
    index = {stamp: i for i, stamp in enumerate(everything)}

    def score(layer: int, head: int, stamps: np.ndarray, tokens: np.ndarray) -> float:
        place = index.get(int(stamps[0]) - layer * geometry.num_kv_heads - head, 0)
        return place if head % 2 else -place

    talk.bench.runner.recall.score = score
    evicted = chain.evicted
    request_id = talk.send([*chain.ledger.tolist(), *words(9, 3)], 4, name, chain.chain_id)
    while not loans(talk):
        talk.bench.step()
    row = talk.bench.runner._rows[loans(talk)[0].row]
    for layer, head in np.ndindex(geometry.num_layers, geometry.num_kv_heads):
        l, h = layer % row.lent.shape[0], head % row.lent.shape[1]
        parts = geometry.head_pages_per_page(row.granularity)
        lent = row.loan[l, h][(layer * geometry.num_kv_heads + head) % parts] - layer * geometry.num_kv_heads - head
        pages = np.reshape(dropped_stamps(evicted, layer, head, geometry.num_kv_heads), (-1, PAGE)).tolist()
        pages.sort(key=lambda page: index[page[0]], reverse=head % 2 == 1)
        assert sorted(lent.reshape(-1, PAGE).tolist()) == sorted(pages[:2])
    talk.bench.run()
    report = talk.report(request_id).recall
    assert report.lent_rows == 2 * PAGE
    assert report.scored_pages == sum(int(some.counts.sum()) for some in evicted)
    assert report.bytes_moved == 64 * report.lent_pages
    assert report.seconds > 0
    talk.end()


def test_others_go_on_while_pages_are_scored() -> None:
    talk = talk_of(PAGE)
    _, chain = talk.turn(words(61), 9, "window")
    other = talk.send(words(30, 5), 40, "window")
    talk.bench.step(3)
    before = len(talk.bench.tokens(other))
    talk.send([*chain.ledger.tolist(), 3], 4, "window", chain.chain_id)
    prefilled = talk.prefilled
    talk.bench.step()
    assert any(seq.awaits_scores for seq in talk.bench.scheduler.running)
    assert talk.prefilled == prefilled, "its prompt waits for what it is lent"
    talk.bench.step(2)
    assert len(talk.bench.tokens(other)) > before
    talk.bench.run()
    talk.end()


def test_a_turn_without_recall_keeps_what_was_dropped_for_later_ones() -> None:
    talk = talk_of()
    _, chain = talk.turn(words(61), 9, "window")
    evicted = chain.evicted
    report, _ = talk.turn([*chain.ledger.tolist(), 3], 4, "window", chain.chain_id, recall="off")
    assert report.recall is None
    assert chain.evicted == evicted
    report, _ = talk.turn([*chain.ledger.tolist(), 3], 4, "window", chain.chain_id)
    assert report.recall.lent_pages >= sum(int(some.counts.sum()) for some in evicted)
    talk.end()


def test_small_and_empty_budgets_lend_nothing() -> None:
    for budget in (0, PAGE - 1):
        talk = talk_of(budget)
        _, chain = talk.turn(words(61), 9, "window")
        report, _ = talk.turn([*chain.ledger.tolist(), 3], 4, "window", chain.chain_id)
        assert (report.recall.lent_pages, report.recall.reason) == (0, None)
        check_rows(talk, chain)
        talk.end()


def test_what_can_not_be_served_is_refused() -> None:
    talk = Talk(EngineSettings())
    with pytest.raises(RequestError, match="recall_host_bytes"):
        talk.send(words(30), 4, "window", recall="host")
    turned = MockMethod("turned", window=24, interval=8, recalls=False)
    talk = talk_of(methods=(turned,))
    with pytest.raises(RequestError, match="turned"):
        talk.send(words(30), 4, "turned")
    for wrong in ({"recall": "disk"}, {"recall_budget": -1}, {"recall_budget": "some"}, {"recall_budget": True}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            ChainOptions(**wrong).validate()


# Forks, checkpoints, tiers.


@pytest.mark.parametrize("name", [name for name in NAMES if name != "stateful"])
def test_forks_share_what_was_dropped(name: str) -> None:
    talk = talk_of()
    _, chain = talk.turn(words(61), 9, name)
    store, first = talk.chains.recall.store, talk.chains.recall.store.used_bytes
    ids = [talk.send([*chain.ledger.tolist(), *words(5 + n, n)], 6, name) for n in range(3)]
    talk.bench.run()
    talk.check(*ids)
    chains = [talk.chain(i) for i in ids]
    for other in chains:
        check_rows(talk, other)
    assert len({some for other in chains for some in other.evicted}) < sum(len(other.evicted) for other in chains)
    assert store.used_bytes == sum(some.nbytes for some in {s for other in [chain, *chains] for s in other.evicted})
    assert store.used_bytes >= first
    for other in chains:
        if other is not chain:
            talk.index.drop(other, "deleted")
    check_rows(talk, chain)
    talk.end()
    assert store.used_bytes == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "stateful"])
@pytest.mark.parametrize("branch", ["fork", "rewind"])
def test_an_edited_message_knows_only_what_was_dropped_before_it(name: str, branch: str) -> None:
    talk = talk_of()
    _, chain = talk.turn(words(61), 9, name)
    before, first = chain.evicted, chain.ledger.tolist()
    talk.turn([*first, *words(30, 1)], 9, name, chain.chain_id)
    report, other = talk.turn([*first, *words(9, 2)], 5, name, chain.chain_id, branch=branch)
    assert report.status == ("forked" if branch == "fork" else "rewound")
    assert other.evicted[: len(before)] == before
    check_rows(talk, other)
    check_rows(talk, chain)
    talk.end()


@pytest.mark.parametrize("name", NAMES)
def test_a_rewritten_answer_goes_on_from_its_prompt(name: str) -> None:
    talk = talk_of()
    _, chain = talk.turn(words(61), 12, name)
    _, other = talk.turn([*words(61), 200, 201, 202], 12, name, chain.chain_id)
    check_rows(talk, other)
    check_rows(talk, chain)
    talk.turn([*other.ledger.tolist(), 200, 201, 202], 12, name, other.chain_id)
    check_rows(talk, other)
    talk.end()


@pytest.mark.parametrize("name", NAMES)
def test_chains_on_the_host_keep_what_was_dropped(name: str) -> None:
    talk = talk_of(2 * PAGE)
    _, chain = talk.turn(words(61), 9, name)
    while chain.tier is Tier.DEVICE:
        assert talk.chains.reclaim()
    report, _ = talk.turn([*chain.ledger.tolist(), 3], 4, name, chain.chain_id)
    assert report.recall.lent_pages > 0
    check_rows(talk, chain)
    talk.end()


# Endings and losses.


ENDINGS = [("cancel", "all"), ("stop", 2 * PAGE)]


@pytest.mark.parametrize(("name", "ending"), [(name, ENDINGS[i % 2]) for i, name in enumerate(NAMES)])
def test_ended_at_every_step_and_continued(name: str, ending: tuple) -> None:
    how, budget = ending
    for steps in [*range(1, 12), *range(12, 40, 3)]:
        talk = talk_of(budget, prefill_buckets=((1, 16),), num_sequence_pages=200)
        _, chain = talk.turn(words(41), 6, name)
        before = chain.ledger.tolist()
        request_id = talk.send([*before, *words(40, 2)], 30, name, chain.chain_id)
        for _ in range(steps):
            talk.bench.step()
        if talk.bench.reason(request_id):
            break
        (talk.bench.scheduler.cancel if how == "cancel" else talk.bench.scheduler.stop)(
            request_id, *([0] * (how == "stop"))
        )
        talk.bench.check()
        assert chain.state is ChainState.IDLE
        check_rows(talk, chain)
        shown = [*before, *words(40, 2), *talk.bench.tokens(request_id)]
        report, _ = talk.turn([*shown, 5], 9, name, chain.chain_id)
        assert report.status == "resumed"
        check_rows(talk, chain)
        talk.end()
        assert talk.chains.recall.store.used_bytes == 0
    assert steps > 5


@pytest.mark.parametrize("budget", ["all", 2 * PAGE])
@pytest.mark.parametrize("name", NAMES)
def test_preempted_turns_get_the_same_pages_again(name: str, budget: object) -> None:
    talk = talk_of(budget, num_sequence_pages=400)
    _, a = talk.turn(words(40), 6, name)
    _, b = talk.turn(words(40, 2), 6, name)
    ids = [talk.send([*c.ledger.tolist(), *words(9)], 30, name, c.chain_id) for c in (a, b)]
    lent: dict[int, np.ndarray] = {}
    for n in range(200):
        running = talk.bench.scheduler.running
        if n % 5 == 2 and running:
            victim = running[n % len(running)]
            if victim.loan is not None:
                lent[id(victim)] = victim.recall.columns.copy()
            talk.bench.scheduler._preempt(victim)
            talk.bench.check()
            assert victim.loan is None
        if not talk.bench.step():
            break
        for seq in talk.bench.scheduler.running:
            if id(seq) in lent and seq.loan is not None:
                assert (seq.recall.columns >= lent[id(seq)]).all()
    assert lent
    talk.bench.run()
    talk.check(*ids)
    assert all(talk.bench.last(i).stats.preemptions for i in ids)
    assert not any(talk.bench.last(i).stats.rebuilt for i in ids)
    for chain in (a, b):
        check_rows(talk, chain)
    talk.end()


def test_a_rebuilt_first_turn_drops_its_rows_once() -> None:
    settings_ = EngineSettings(recall_host_bytes=1 << 30, swap_bytes=0)
    talk = talk_of("all", settings_)
    request_id = talk.send(words(61), 30, "window")
    talk.bench.step(12)
    (seq,) = talk.bench.scheduler.running
    assert seq.evicted
    talk.bench.scheduler._preempt(seq)
    assert seq.evicted == ()
    talk.bench.run()
    talk.check(request_id)
    check_rows(talk, talk.chain(request_id))
    talk.end()


def test_without_room_less_is_lent_and_no_turn_fails() -> None:
    reasons = set()
    for pages in range(31, 60, 3):
        talk = talk_of("all", num_sequence_pages=pages, num_rows=2)
        _, chain = talk.turn(words(80), 6, "window")
        report, _ = talk.turn([*chain.ledger.tolist(), *words(5)], 20, "window", chain.chain_id)
        reasons.add(report.recall.reason)
        if report.recall.reason is None:
            assert report.recall.lent_pages == report.recall.evicted_pages
        check_rows(talk, chain)
        talk.end()
    assert reasons == {None, "no room"}


def test_a_loan_ends_before_a_turn_does() -> None:
    """A row alone that can't get its next page gives what it was lent back, and goes on."""
    talk = talk_of("all", num_sequence_pages=40, num_rows=2)
    _, chain = talk.turn(words(61), 6, "window")
    request_id = talk.send([*chain.ledger.tolist(), 3], 20, "window", chain.chain_id)
    while not loans(talk):
        talk.bench.step()
    scheduler = talk.bench.scheduler
    (seq,) = scheduler.running
    scheduler._relieve(seq, "a test")
    talk.bench.check()
    while seq.loan is not None:
        scheduler._relieve(seq, "a test")
    talk.bench.run()
    talk.check(request_id)
    assert talk.report(request_id).recall.reason == "no room"
    check_rows(talk, chain)
    talk.end()


def test_host_memory_is_a_budget() -> None:
    settings_ = EngineSettings(recall_host_bytes=64 * 4 * 8)
    talk = talk_of("all", settings_)
    store, chains = talk.chains.recall.store, []
    for n in range(4):
        chains.append(talk.turn(words(61, n), 9, "window")[1])
        assert store.used_bytes <= store.capacity_bytes
    assert store.lost_pages > 0
    assert any(some.lost for some in chains[0].evicted), "the oldest go first"
    report, _ = talk.turn([*chains[0].ledger.tolist(), 3], 9, "window", chains[0].chain_id)
    assert report.recall.reason == "lost"
    assert store.used_bytes <= store.capacity_bytes
    talk.end()
    assert store.used_bytes == 0


def test_what_turns_get_back_is_counted() -> None:
    talk = talk_of("all", EngineSettings(recall_host_bytes=64 * 4 * 20))
    metrics = talk.bench.scheduler.metrics
    chains = [talk.turn(words(61, n), 9, "window")[1] for n in range(4)]
    assert metrics.recall_turns.samples() == [("none", 4)]
    assert metrics.recall_seconds.count() == 0
    returning = (chains[-1], chains[0])
    turns = [talk.turn([*chain.ledger.tolist(), 3], 9, "window", chain.chain_id) for chain in returning]
    reports = [report.recall for report, _ in turns]
    assert dict(metrics.recall_turns.samples()) == {"none": 4, "lent": 1, "lost": 1}
    for counter, field in ((metrics.recall_lent_pages, "lent_pages"), (metrics.recall_bytes, "bytes_moved")):
        assert counter.value() == sum(getattr(report, field) for report in reports) > 0
    assert metrics.recall_seconds.count() == sum(report.lent_pages > 0 for report in reports)
    chain_reports.recall_gauges(talk.chains.recall.store, metrics)
    assert 0 < metrics.recall_stored_bytes.value() <= 64 * 4 * 20
    assert metrics.recall_lost_pages.value() > 0
    talk.turn(words(9), 3, "dense")
    assert sum(count for _, count in metrics.recall_turns.samples()) == 7, "every turn that asked for it"


def test_pages_that_are_lost_while_they_are_lent_stay_with_their_turn() -> None:
    talk = talk_of()
    _, chain = talk.turn(words(61), 9, "window")
    request_id = talk.send([*chain.ledger.tolist(), 3], 20, "window", chain.chain_id)
    while not loans(talk):
        talk.bench.step()
    (seq,) = talk.bench.scheduler.running
    for some in seq.evicted:
        some.payload, some.nbytes = None, 0
    talk.bench.scheduler._preempt(seq)
    talk.bench.run()
    talk.check(request_id)
    assert talk.report(request_id).recall.lent_pages > 0
    talk.end()


@pytest.mark.parametrize("call", ["probe", "lend", "front", "maintain", "park", "unpark", "export_row", "import_row"])
@pytest.mark.parametrize("budget", ["all", 2 * PAGE])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_refusal_at_any_call_costs_at_most_one_turn(call: str, budget: object, nth: int) -> None:
    talk = talk_of(budget)
    chains = [talk.turn(words(45, n), 6, "window")[1] for n in range(2)]
    talk.bench.runner.fail(call, nth, RequestError("refused on purpose"))
    ids = [talk.send([*c.ledger.tolist(), *words(20)], 20, "window", c.chain_id) for c in chains]
    for n in range(60):
        running = talk.bench.scheduler.running
        if n == 4 and running:
            talk.bench.scheduler._guard(running[-1], talk.bench.scheduler._preempt)
        if not talk.bench.step():
            break
    talk.bench.run()
    failed = [i for i in ids if talk.bench.reason(i) == "error"]
    assert len(failed) <= (call not in ("probe", "lend"))
    talk.check(*(i for i in ids if i not in failed))
    talk.end()
    assert talk.chains.recall.store.used_bytes == 0


def test_a_dead_engine_holds_nothing() -> None:
    talk = talk_of()
    _, chain = talk.turn(words(61), 9, "window")
    talk.send([*chain.ledger.tolist(), 3], 20, "window", chain.chain_id)
    talk.bench.step(3)
    assert loans(talk)
    talk.bench.scheduler.fail_all(RuntimeError("dead"))
    assert not loans(talk)
    assert not chain.busy


# The parts.


@given(st.lists(st.integers(0, 40), min_size=4, max_size=4), st.integers(1, 7), st.sampled_from(METHODS))
@settings(deadline=None)
def test_whole_pages_are_dropped_and_at_most_a_page_more_stays(lengths: list[int], page: int, method) -> None:
    facts, length = SpillingFacts(method, page), np.array(lengths, np.int32).reshape(2, 2)
    for phase in ("chunk", "prompt", "token", "pressure"):
        asked, kept = facts.asked(phase, length), facts.kept_after(phase, length)
        if method.most_counted(phase, length):
            continue
        assert ((length - kept) % page == 0).all()
        assert ((kept - asked >= 0) & (kept - asked < page)).all()
        assert (kept <= length).all()
    assert (whole_pages(length, length, page) == length).all()


def test_the_oldest_pages_lose_their_rows_and_those_that_nobody_holds_cost_nothing() -> None:
    store = EvictedStore(100)

    def pages(nbytes: int) -> EvictedPages:
        return EvictedPages(object(), np.ones((1, 1), np.int32), nbytes)

    first, second = pages(40), pages(40)
    store.add((first,))
    store.add((second,))
    store.touch((first,))
    third = pages(40)
    store.add((third,))
    assert [some.lost for some in (first, second, third)] == [False, True, False]
    assert (store.used_bytes, store.lost_pages) == (80, 1)
    del first
    assert store.used_bytes == 40
    huge = pages(101)
    store.add((huge,))
    assert huge.lost
    assert store.used_bytes == 0


def test_the_best_come_first_and_nothing_that_is_not_there() -> None:
    blocks = [EvictedPages(object(), np.array([[count]], np.int32), 1) for count in (2, 1)]
    scores = np.array([[[1.0, np.nan, 3.0]]], np.float32)
    assert best_first(tuple(blocks), scores, 3).tolist() == [[[2, 0, 1]]]
    assert best_first(tuple(blocks), scores, 2).tolist() == [[[2, 0]]]
    assert best_first(tuple(blocks), None, 3).tolist() == [[[2, 1, 0]]]
    assert best_first(tuple(blocks), None, 1).tolist() == [[[2]]]
    uneven = (EvictedPages(object(), np.array([[2, 1]], np.int32), 1),)
    wrong = np.array([[[np.inf, 0.0], [-np.inf, np.inf]]], np.float32)
    assert best_first(uneven, wrong, 2).tolist() == [[[0, 1], [0, -1]]]
    assert best_first(uneven, None, 2).tolist() == [[[1, 0], [0, -1]]]


def test_heads_say_together_what_is_needed() -> None:
    positions = np.array([[[0, 4, 8, 20], [2, 7, 12, 30]]])[..., None] + np.arange(4)
    positions[0, 1, 3] = (0, 5, 60, 92)
    votes, rows = np.zeros((1, 2, 4)), np.zeros((1, 2, 4), int)
    votes[0, 0, 1], rows[0, 0, 1] = 0.8, 2  # about position 6: the votes are for 4 to 7
    scores = joined_votes(votes, rows, positions)
    assert scores[0, 0].tolist() == pytest.approx([0.0, 0.4 + 0.08, 0.0, 0.0])
    assert scores[0, 1].tolist() == pytest.approx([0.4, 0.4, 0.0, 0.4]), "pages that share one of these positions"
    votes[0, 1, 2] = np.nan
    assert np.isfinite(joined_votes(votes, rows, positions)).all()


def test_the_mock_notices_a_loan_that_is_in_the_way() -> None:
    talk = talk_of()
    _, chain = talk.turn(words(61), 9, "window")
    talk.send([*chain.ledger.tolist(), 3], 20, "window", chain.chain_id)
    talk.bench.step(2)
    (seq,) = loans(talk)
    runner = talk.bench.runner
    with pytest.raises(ContractError, match="lent rows"):
        runner.park("window", seq.row)
    with pytest.raises(ContractError, match="lent rows"):
        runner.export_row("window", seq.row, seq.pages.padded(-1))
    none = np.zeros_like(seq.pages.lengths)
    with pytest.raises(ContractError, match="shift"):
        runner.front("window", FrontRow(seq.row, seq.pages.padded(-1), seq.pages.lengths, none, none))
    runner._pool[seq.loan.held() * 4] += 1
    with pytest.raises(RunnerError, match="lent"):
        talk.bench.step(9)


@settings(
    max_examples=int(os.environ.get("SPARSEJAX_PROGRAMS", "60")),
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(
    engine_settings,
    machines,
    st.lists(operations, min_size=12, max_size=40),
    st.sampled_from(["all", PAGE, 3 * PAGE]),
    st.sampled_from([6400, 1 << 30]),
)
def test_random_programs_with_recall(
    settings_: EngineSettings, machine: dict, program: list[tuple], budget: object, host: int
) -> None:
    settings_ = dataclasses.replace(settings_, recall_host_bytes=host)
    talk = talk_of(budget, settings_, **machine)
    run_program(talk, settings_, program)
    assert talk.chains.recall.store.used_bytes == 0
