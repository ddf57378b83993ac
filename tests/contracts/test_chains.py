"""Named promises of the Chain Cache on a mock runner: what a turn reuses, what it leaves, and who owns what meanwhile.

The numbers are those of the serving specification's list of contract tests. The mock's script depends on the whole
history, and it reads back every stored row, so tokens that are equal mean that the state was.
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from sparsejax.cache.chain import ChainState, Tier
from sparsejax.errors import ChainBusyError, ChainError, ChainGoneError, ChainMismatchError, RequestError
from sparsejax.mock import METHODS, MockMethod
from sparsejax.request import ChainOptions
from sparsejax.settings import EngineSettings
from tests.host.bench import Bench

STATEFUL = MockMethod("stateful", window=24, interval=8, rollback=False, private_rows=True)
ALL = (*METHODS, STATEFUL)
NAMES = [method.name for method in ALL]
SMALL_WINDOWS = EngineSettings(decode_window_tokens=4, min_decode_window_tokens=4, max_decode_window_tokens=4)
STRICT = {"on_miss": "error", "on_busy": "error"}


class Talk:
    """A bench that counts what is prefilled and knows the chains of its requests."""

    def __init__(self, settings_: EngineSettings | None = None, **mock: object) -> None:
        self.bench = Bench(settings_, methods=mock.pop("methods", ALL), **mock)
        self.prefilled = 0
        prefill = self.bench.runner.prefill

        def counted(method, rows):
            self.prefilled += sum(len(row.tokens) for row in rows)
            return prefill(method, rows)

        self.bench.runner.prefill = counted  # type: ignore[method-assign]
        self.chains = self.bench.scheduler.chains
        self.index = self.chains.index
        self.index.ids._random = iter_bytes()
        self.options: dict = {}  # of every chain

    def send(self, ids, max_tokens: int | None = 8, method: str | None = None, chain_id=None, **options) -> str:
        params = {name: options.pop(name) for name in ("seed", "stop_token_ids") if name in options}
        chain = ChainOptions(chain_id, **self.options | options)
        return self.bench.submit(list(ids), max_tokens, method, chain=chain, **params)

    def report(self, request_id: str):
        reports = [event.chain for event in self.bench.events[request_id] if event.chain is not None]
        return reports[-1]

    def chain(self, request_id: str):
        return self.index.chains[self.report(request_id).chain_id]

    def turn(self, ids, max_tokens: int | None = 8, method: str | None = None, chain_id=None, **options):
        """A whole turn, checked: (report, chain)."""
        before = self.prefilled
        request_id = self.send(ids, max_tokens, method, chain_id, **options)
        self.bench.run()
        self.check(request_id)
        report, chain = self.report(request_id), self.chain(request_id)
        assert self.prefilled - before == report.prefilled_tokens, "executed prefill is what was reported"
        assert self.bench.last(request_id).stats.cached_tokens == report.reused_tokens
        assert chain.ledger.tolist() == self.history(request_id)
        return report, chain

    def history(self, request_id: str) -> list[int]:
        return [*self.bench.requests[request_id].prompt_ids, *self.bench.tokens(request_id)]

    def check(self, *request_ids: str) -> None:
        self.bench.check_done(*request_ids)

    def end(self) -> None:
        self.bench.run()
        self.bench.check()
        self.index.check_integrity(deep=True)
        self.bench.check_all_free()


def iter_bytes():
    state = [0]

    def draw(size: int) -> bytes:
        state[0] += 1
        return state[0].to_bytes(size, "big")

    return draw


def words(n: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7) % 250 for i in range(n)]


# Boundaries and reuse.


@pytest.mark.parametrize("inflight", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_13_14_turns_reuse_what_was_processed(name: str, inflight: int) -> None:
    talk = Talk(EngineSettings(max_inflight_steps=inflight), prefill_buckets=((1, 16), (1, 64)))
    report, chain = talk.turn(words(41), 9, name)
    assert (report.status, report.reused_tokens, report.prefilled_tokens) == ("created", 0, 41)
    for n in range(1, 5):
        assert chain.state is ChainState.IDLE
        assert chain.processed == len(chain.ledger) - 1
        context = [*chain.ledger.tolist(), *words(n * 9, n)]
        report, same = talk.turn(context, 1 if n == 2 else 20, name, chain.chain_id, **STRICT)
        assert same is chain
        assert (report.status, report.prefilled_tokens) == ("resumed", n * 9 + 1)
        assert report.processed_tokens == chain.processed
    talk.end()


@pytest.mark.parametrize("name", NAMES)
def test_15_g_the_last_token_alone_goes_on(name: str) -> None:
    talk = Talk()
    _, chain = talk.turn(words(30), 5, name)
    report, _ = talk.turn(chain.ledger.tolist(), 5, name, chain.chain_id, **STRICT)
    assert report.prefilled_tokens == 1
    talk.end()


def test_c_appended_turns_need_no_context() -> None:
    talk = Talk()
    _, chain = talk.turn(words(30), 5)
    context = [*chain.ledger.tolist(), *words(6, 3)]
    request_id = talk.send(words(6, 3), 5, chain_id=chain.chain_id, append=True)
    talk.bench.run()
    assert talk.bench.tokens(request_id) == talk.bench.runner.generate(context, 5, 1)
    assert talk.report(request_id).prefilled_tokens == 7
    assert chain.ledger.tolist() == [*context, *talk.bench.tokens(request_id)]
    talk.end()


@pytest.mark.parametrize("inflight", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_50_end_of_sequence_leaves_nothing_behind_it(name: str, inflight: int) -> None:
    """Steps beyond the last token are under way when it is seen; they are not part of the chain."""
    talk = Talk(EngineSettings(max_inflight_steps=inflight), eos_after=6)
    _, chain = talk.turn(words(41), 30, name)
    for n in range(1, 4):
        exact = name != "stateful"
        left = len(chain.ledger) - chain.processed
        assert left in ((1,) if exact and not chain.quality.evicted_tokens else (0, 1))
        assert bool(chain.quality.inexact_rollback_tokens) == (not exact and inflight == 4)
        context = [*chain.ledger.tolist(), *words(9, n)]
        report, _ = talk.turn(context, 30, name, chain.chain_id, **STRICT)
        assert report.prefilled_tokens == 9 + left
    talk.end()


@pytest.mark.parametrize("name", ["dense", "prompt", "heads"])
@pytest.mark.parametrize("visible", range(7))
def test_60_m_a_stop_string_leaves_the_tokens_before_it(name: str, visible: int) -> None:
    talk = Talk()
    request_id = talk.send(words(30), 40, name)
    while len(talk.bench.tokens(request_id)) < 7:
        talk.bench.step()
    talk.bench.scheduler.stop(request_id, 0, visible)
    talk.bench.run()
    chain = talk.chain(request_id)
    assert chain.ledger.tolist() == [*words(30), *talk.bench.tokens(request_id)[:visible]]
    assert chain.processed == 30 + visible
    report, _ = talk.turn([*chain.ledger.tolist(), 5, 6], 9, name, chain.chain_id, **STRICT)
    assert report.prefilled_tokens == 2
    talk.end()


@pytest.mark.parametrize("how", ["cancel", "stop"])
@pytest.mark.parametrize("name", NAMES)
def test_61_62_ended_at_every_step_and_continued(name: str, how: str) -> None:
    for steps in range(1, 40):
        talk = Talk(prefill_buckets=((1, 16),))
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
        shown = [*before, *words(40, 2), *talk.bench.tokens(request_id)]
        assert chain.state is ChainState.IDLE
        assert shown[: chain.processed] == chain.ledger.tolist()[: chain.processed]
        if talk.bench.tokens(request_id):
            assert chain.ledger.tolist() == shown
            assert chain.processed >= len(shown) - 1 - 2, "at the last token that was seen"
        report, _ = talk.turn([*shown, 5], 9, name, chain.chain_id, **STRICT)
        assert report.status == "resumed"
        talk.end()
    assert steps > 5


def test_61_a_new_chain_that_is_cut_off_in_its_first_prompt_is_gone() -> None:
    talk = Talk(prefill_buckets=((1, 16),))
    request_id = talk.send(words(80), 5)
    talk.bench.step(2)
    talk.bench.scheduler.cancel(request_id)
    report = talk.report(request_id)
    assert (report.state, report.gone_reason) == ("gone", "interrupted")
    assert not talk.index.chains
    talk.bench.run()
    talk.bench.check_all_free()


def test_16_a_wrong_token_costs_the_context_and_not_the_chain() -> None:
    talk = Talk()
    _, chain = talk.turn(words(30), 5)
    good = [*chain.ledger.tolist(), 5]
    wrong = [good[0] + 1, *good[1:]]
    refused = talk.send(wrong, 5, chain_id=chain.chain_id, **STRICT)
    talk.bench.run()
    assert isinstance(talk.bench.last(refused).error, ChainMismatchError)
    report, other = talk.turn(wrong, 5, chain_id=chain.chain_id)
    assert (report.status, report.reused_tokens) == ("recreated", 0)
    assert "diverged at token 0" in report.reason
    report, _ = talk.turn(good, 5, chain_id=chain.chain_id, **STRICT)
    assert report.status == "resumed"
    assert other.state is ChainState.IDLE
    talk.end()


def test_58_59_a_chain_has_one_turn_at_a_time() -> None:
    talk = Talk()
    _, chain = talk.turn(words(30), 5)
    context = [*chain.ledger.tolist(), 5]
    first = talk.send(context, 20, chain_id=chain.chain_id)
    talk.bench.step(2)
    refused = talk.send(context, 20, chain_id=chain.chain_id, **STRICT)
    assert isinstance(talk.bench.last(refused).error, ChainBusyError)
    forked = talk.send(context, 20, chain_id=chain.chain_id)
    talk.bench.run()
    talk.check(first, forked)
    assert talk.report(forked).status == "forked", "from the end of the turn before"
    assert talk.report(forked).prefilled_tokens == 2
    second = talk.send([*chain.ledger.tolist(), 5], 20, chain_id=chain.chain_id)
    talk.bench.step()
    talk.bench.scheduler.cancel(first)
    assert talk.bench.reason(second) is None, "an old cancel does nothing to the next turn"
    talk.bench.run()
    talk.check(second)
    talk.end()


def test_66_an_edited_message_goes_on_from_the_turn_before() -> None:
    for branch in ("fork", "rewind"):
        talk = Talk()
        _, chain = talk.turn(words(30), 5)
        first = chain.ledger.tolist()
        talk.turn([*first, *words(9, 1)], 5, chain_id=chain.chain_id)
        report, other = talk.turn([*first, *words(9, 2)], 5, chain_id=chain.chain_id, branch=branch)
        assert report.status == ("forked" if branch == "fork" else "rewound")
        assert report.prefilled_tokens == 10
        assert (other is chain) == (branch == "rewind")
        talk.end()


@pytest.mark.parametrize("name", NAMES)
def test_e_70_a_rewritten_answer_goes_on_from_the_end_of_its_prompt(name: str) -> None:
    talk = Talk()
    _, chain = talk.turn(words(45), 12, name)
    report, _ = talk.turn([*words(45), 200, 201, 202], 12, name, chain.chain_id)
    if name == "stateful":
        assert report.status == "recreated", "a checkpoint would copy every page"
    else:
        assert (report.status, report.reused_tokens, report.prefilled_tokens) == ("forked", 45, 3)
    talk.end()


@pytest.mark.parametrize("name", NAMES)
def test_22_first_turns_start_from_a_shared_system_prompt(name: str) -> None:
    talk = Talk(num_rows=4, num_sequence_pages=400)
    system = words(83)
    _, first = talk.turn([*system, *words(9, 1)], 12, name, shared_tokens=83)
    talk.turn([*first.ledger.tolist(), *words(9, 3)], 12, name, first.chain_id)
    ids = [talk.send([*system, *words(5 + n, 9 + n)], 12, name) for n in range(6)]
    talk.bench.run()
    talk.check(*ids)
    reused = 0 if talk.bench.runner.limits.methods[name].replays_prompts else 83
    assert [talk.report(i).reused_tokens for i in ids] == [reused] * 6
    talk.end()


def test_22_a_shared_system_prompt_outlives_the_chains_that_leave_the_device() -> None:
    talk = Talk(num_rows=4, num_sequence_pages=400)
    system = words(83)
    both = [talk.send([*system, *words(9, n)], 5, shared_tokens=83) for n in (1, 2)]
    talk.bench.run()
    talk.check(*both)
    chains = list(talk.chains.index.chains.values())

    def kept() -> list[str]:
        return [c.kind for chain in chains for c in chain.checkpoints]

    assert kept().count("prefix") == 2, "both came before the other one was there"
    while any(chain.tier is Tier.DEVICE for chain in chains):
        assert talk.chains.reclaim()
    assert kept() == ["prefix"], "one is enough"
    report, _ = talk.turn([*system, *words(9, 3)], 5)
    assert report.reused_tokens == 83
    while talk.chains.reclaim():
        pass
    assert kept() == []
    talk.end()


def test_61_forks_of_a_prompt_that_is_cut_off_keep_what_they_share() -> None:
    talk = Talk(EngineSettings(prefix_cache=False), prefill_buckets=((1, 16),))
    _, chain = talk.turn(words(30), 5)
    context = [*chain.ledger.tolist(), *words(100, 2)]
    first = talk.send(context, 9, chain_id=chain.chain_id, shared_tokens=60)
    while chain.busy and not any(c.kind == "prefix" for c in chain.checkpoints):
        talk.bench.step()
    fork = talk.send([*context[:60], *words(30, 8)], 20)
    assert talk.report(fork).reused_tokens == 60
    talk.bench.scheduler.cancel(first)
    talk.bench.check()
    assert chain.processed > 34, "its pages are another's too, so they can't be written again"
    again = talk.send([*context, 1], 9, chain_id=chain.chain_id)
    talk.bench.run()
    talk.check(fork, again)
    talk.end()


def test_68_without_an_id_the_longest_prefix_goes_on() -> None:
    talk = Talk()
    _, chain = talk.turn(words(300), 5)
    report, same = talk.turn([*chain.ledger.tolist(), 5], 5)
    assert (report.status, same) == ("adopted", chain)
    talk.turn([*chain.ledger.tolist(), 5], 5, chain_id=chain.chain_id)
    report, other = talk.turn([*chain.ledger.tolist(), 5], 5)
    assert (report.status, other is chain) == ("forked", False)
    assert other.parent_id == chain.chain_id
    for options in ({"salt": "x"}, {"tenant": "x"}):
        report, _ = talk.turn([*chain.ledger.tolist(), 5], 5, **options)
        assert (report.status, report.reused_tokens) == ("created", 0)
    report, _ = talk.turn([*chain.ledger.tolist(), 5], 5, lookup=False)
    whole_pages = len(chain.ledger) // 4 * 4
    assert (report.status, report.reused_tokens) == ("created", whole_pages), "another chain, of the same rows"
    report, _ = talk.turn([*chain.ledger.tolist(), 5], 5, "window")
    assert report.status == "created", "another method"
    talk.end()


# Forks.


@pytest.mark.parametrize("name", NAMES)
def test_67_a_storm_of_forks_says_what_eight_chains_would(name: str) -> None:
    talk = Talk(num_rows=4)
    _, chain = talk.turn(words(45), 6, name)
    talk.turn([*chain.ledger.tolist(), 1], 6, name, chain.chain_id)
    context = chain.ledger.tolist()
    ids = [talk.send([*context, *words(5 + n, n)], 25, name) for n in range(8)]
    talk.bench.run()
    talk.check(*ids)
    assert {talk.report(i).status for i in ids} == {"forked"}
    assert all(talk.report(i).prefilled_tokens == 6 + n for n, i in enumerate(ids))
    talk.turn([*context, 9], 6, name, chain.chain_id, **STRICT)
    talk.end()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_11_forks_are_dropped_in_any_order(order: tuple[int, ...]) -> None:
    talk = Talk()
    _, chain = talk.turn(words(45), 6)
    talk.turn([*chain.ledger.tolist(), 1], 6, chain_id=chain.chain_id)
    chains = [chain, *(talk.turn([*chain.ledger.tolist(), n], 6)[1] for n in range(2))]
    for i in order:
        talk.index.drop(chains[i], "deleted")
        talk.bench.check()
    talk.end()


# Pressure.


@pytest.mark.parametrize("host", [0, 1 << 30])
@pytest.mark.parametrize("name", NAMES)
def test_36_39_more_chains_than_the_cache_holds(name: str, host: int) -> None:
    """Twelve conversations of three turns, at once, where a few fit: no error, and with a host none is lost."""
    settings_ = EngineSettings(
        decode_window_tokens=8, min_decode_window_tokens=4, max_decode_window_tokens=16, chain_host_bytes=host
    )
    talk = Talk(settings_, num_sequence_pages=60, num_rows=4)
    contexts = {n: words(40, n) for n in range(12)}
    names: dict[int, str | None] = dict.fromkeys(contexts)
    reused = 0
    for _ in range(3):
        ids = {n: talk.send(context, 12, name, names[n]) for n, context in contexts.items()}
        talk.bench.run()
        for n, request_id in ids.items():
            talk.check(request_id)
            report = talk.report(request_id)
            reused += report.reused_tokens
            if host and names[n]:
                assert report.status == "resumed", report
            names[n] = report.chain_id
            contexts[n] = [*talk.history(request_id), *words(5, n)]
    assert reused > 0
    assert talk.bench.scheduler.metrics.prefix_cache_hits.value() == reused
    stats = talk.index.stats()
    assert stats.get("demoted", 0) > 0 if host else stats["gone_evicted"] > 0
    talk.end()


def test_36_no_more_chains_than_needed_give_way() -> None:
    talk = Talk(EngineSettings(chain_checkpoints=0), num_sequence_pages=61)  # 60 pages, 240 tokens
    chains = [talk.turn(words(35, n), 6)[1] for n in range(5)]  # 10 pages each
    talk.turn(words(60, 9), 5)  # 16 pages; 10 are free
    tiers = [chain.tier for chain in chains]
    assert tiers == [Tier.HOST, *[Tier.DEVICE] * 4], "the one used longest ago"
    talk.end()


def test_36_chains_are_not_given_up_for_a_request_that_must_wait_anyway() -> None:
    talk = Talk(EngineSettings(chain_checkpoints=0), num_sequence_pages=61)
    _, chain = talk.turn(words(35), 6)
    running = talk.send(words(100, 3), 80)
    talk.bench.step(2)
    waiting = talk.send(words(100, 4), 80)
    talk.bench.step(20)
    assert chain.tier is Tier.DEVICE
    talk.bench.run()
    talk.check(running, waiting)
    talk.end()


@pytest.mark.parametrize("host", [0, 1 << 30])
def test_39_turns_that_wait_for_each_other_all_run(host: int) -> None:
    """All chains are claimed at once and hold the whole cache: those at the end of the queue step back."""
    settings_ = EngineSettings(chain_host_bytes=host, chain_checkpoints=0, decode_window_tokens=8)
    talk = Talk(settings_, num_sequence_pages=51, num_rows=8)  # 200 tokens
    chains = [talk.turn(words(40, n), 9)[1] for n in range(4)]  # 12 pages each
    ids = [talk.send([*c.ledger.tolist(), *words(60, 9)], 30, chain_id=c.chain_id) for c in chains]
    talk.bench.run()
    talk.check(*ids)
    reports = [talk.report(i) for i in ids]
    assert [r.chain_id for r in reports] == [c.chain_id for c in chains]
    assert reports[0].status == "resumed"
    assert {r.status for r in reports} == ({"resumed"} if host else {"resumed", "recreated"})
    assert [chain.quality.rebuilt for chain in chains] == [r.status == "recreated" for r in reports]
    talk.end()


@pytest.mark.parametrize("name", NAMES)
def test_69_preempted_turns_come_back_as_they_were(name: str) -> None:
    talk = Talk(num_sequence_pages=200)
    _, a = talk.turn(words(40), 6, name)
    _, b = talk.turn(words(40, 2), 6, name)
    ids = [talk.send([*c.ledger.tolist(), *words(9)], 30, name, c.chain_id) for c in (a, b)]
    for n in range(200):
        running = talk.bench.scheduler.running
        if n % 5 == 2 and running:
            talk.bench.scheduler._preempt(running[n % len(running)])
            talk.bench.check()
        if not talk.bench.step():
            break
    talk.bench.run()
    talk.check(*ids)
    assert all(talk.bench.last(i).stats.preemptions for i in ids)
    assert not any(talk.bench.last(i).stats.rebuilt for i in ids), "swapped, never rebuilt"
    for chain in (a, b):
        talk.turn([*chain.ledger.tolist(), 3], 6, name, chain.chain_id, **STRICT)
    talk.end()


@pytest.mark.parametrize("name", NAMES)
def test_cancelled_while_swapped_out_a_chain_goes_on_from_the_host(name: str) -> None:
    talk = Talk()
    _, chain = talk.turn(words(40), 6, name)
    request_id = talk.send([*chain.ledger.tolist(), *words(9)], 30, name, chain.chain_id)
    talk.bench.step(8)
    (seq,) = talk.bench.scheduler.running
    talk.bench.scheduler._preempt(seq)
    talk.bench.scheduler.cancel(request_id)
    talk.bench.check()
    assert (chain.state, chain.tier) == (ChainState.IDLE, Tier.HOST)
    talk.turn([*chain.ledger.tolist(), 3], 6, name, chain.chain_id, **STRICT)
    assert chain.tier is Tier.DEVICE
    talk.end()


def test_ttl_takes_a_chain_to_the_host_and_then_away() -> None:
    talk = Talk()
    _, chain = talk.turn(words(40), 6, ttl_s=50.0)
    for seconds, tier in ((40.0, Tier.DEVICE), (20.0, Tier.HOST), (40.0, Tier.HOST)):
        talk.bench.clock.sleep(seconds)
        talk.turn(words(3, 5), 2)
        assert (chain.state, chain.tier) == (ChainState.IDLE, tier)
    talk.bench.clock.sleep(20.0)
    talk.turn(words(3, 6), 2)
    assert chain.state is ChainState.GONE
    refused = talk.send([*chain.ledger.tolist(), 3], 6, chain_id=chain.chain_id, **STRICT)
    assert isinstance(talk.bench.last(refused).error, ChainGoneError)
    talk.end()


# Failures.


@pytest.mark.parametrize(
    "call",
    ["setup_row", "prefill", "decode", "maintain", "park", "unpark", "export_parked", "import_parked", "copy_pages"],
)
def test_63_a_refusal_at_any_call_costs_at_most_one_turn(call: str) -> None:
    talk = Talk(SMALL_WINDOWS, num_sequence_pages=40)
    chains = [talk.turn(words(30, n), 6, "window")[1] for n in range(3)]
    talk.bench.runner.fail(call, 1, RequestError("refused on purpose"))
    ids = [talk.send([*c.ledger.tolist(), *words(20)], 20, "window", c.chain_id) for c in chains]
    ids.append(talk.send([*chains[0].ledger.tolist(), 3, 4], 20, "window"))
    talk.bench.run()
    talk.bench.check()
    failed = [i for i in ids if talk.bench.reason(i) == "error"]
    assert len(failed) <= 1
    talk.check(*(i for i in ids if i not in failed))
    talk.end()


@pytest.mark.parametrize("checkpoints", [0, 2])
def test_non_finite_logits_cost_the_turn_or_the_chain(checkpoints: int) -> None:
    talk = Talk(EngineSettings(chain_checkpoints=checkpoints))
    talk.bench.runner.poison(251)
    _, chain = talk.turn(words(30), 6)
    before = chain.ledger.tolist(), chain.processed
    request_id = talk.send([*before[0], 251], 6, chain_id=chain.chain_id)
    talk.bench.run()
    assert talk.bench.reason(request_id) == "error"
    if checkpoints:
        assert (chain.ledger.tolist(), chain.processed) == before, "as it was before the turn"
        talk.turn([*before[0], 5], 6, chain_id=chain.chain_id, **STRICT)
    else:
        assert (chain.state, chain.reason) == (ChainState.GONE, "failure")
    talk.end()


def test_a_dead_engine_leaves_no_chain_owned() -> None:
    talk = Talk()
    _, chain = talk.turn(words(30), 6)
    talk.send([*chain.ledger.tolist(), 1], 60, chain_id=chain.chain_id)
    talk.bench.step(4)
    talk.bench.scheduler.fail_all(RuntimeError("dead"))
    assert not chain.busy


# Random programs.

turns = st.tuples(
    st.just("turn"),
    st.integers(0, 9),  # which chain
    st.sampled_from(["", "", "", "edit", "short", "new", "append", "unnamed"]),
    st.integers(1, 40),  # new tokens
    st.integers(1, 30),  # max_tokens
    st.sampled_from(NAMES),
)
advances = st.tuples(st.just("advance"), st.sampled_from([1, 2, 3, 5, 60]))
operations = st.one_of(
    turns,
    turns,
    turns,
    advances,
    advances,
    advances,
    advances,
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("stop"), st.integers(0, 9), st.sampled_from([None, 0, 3])),
    st.tuples(st.just("preempt"), st.integers(0, 5)),
    st.tuples(st.just("reclaim")),
    st.tuples(st.just("drop"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 3.0, 100.0])),
)
machines = st.fixed_dictionaries(
    {
        "num_rows": st.integers(1, 5),
        "num_sequence_pages": st.integers(50, 90),
        "prefill_buckets": st.sampled_from([((1, 16),), ((2, 8), (1, 32)), ((1, 16), (4, 16), (1, 64))]),
        "eos_after": st.sampled_from([None, None, 5]),
        "step_s": st.sampled_from([0.0, 0.01]),
    }
)
engine_settings = st.builds(
    EngineSettings,
    max_inflight_steps=st.integers(1, 4),
    decode_window_tokens=st.sampled_from([1, 4, 64]),
    min_decode_window_tokens=st.just(1),
    max_decode_window_tokens=st.sampled_from([1, 4, 64]),
    swap_bytes=st.sampled_from([4000, 1 << 30]),
    chain_host_bytes=st.sampled_from([0, 6000, 1 << 30]),
    chain_ttl_s=st.sampled_from([50.0, 1e6]),
    chain_checkpoints=st.sampled_from([0, 1, 2]),
)


@settings(
    max_examples=int(os.environ.get("SPARSEJAX_PROGRAMS", "150")),
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(engine_settings, machines, st.lists(operations, min_size=12, max_size=40))
def test_random_programs(settings_: EngineSettings, machine: dict, program: list[tuple]) -> None:
    run_program(Talk(settings_, **machine), settings_, program)


def continuation(chains: list, which: int, twist: str) -> tuple[list[int], str | None, str, dict]:
    """How a program goes on with one of `chains`: (context, chain id, method, options)."""
    idle = [chain for chain in chains if not chain.busy]
    choices = idle if idle and which < 8 else chains
    chain = choices[which % len(choices)]
    history, chain_id = chain.ledger.tolist(), chain.chain_id
    if twist == "edit" and history:
        history = [*history[: len(history) // 2], 251]
    elif twist == "short":
        history = history[: len(history) - 2]
    return (
        history,
        None if twist == "unnamed" else chain_id,
        chain.method,
        {"append": True} if twist == "append" else {},
    )


def run_program(talk: Talk, settings_: EngineSettings, program: list[tuple]) -> None:
    """Carries a program out, checks the books after every operation and all answers at the end."""
    bench = talk.bench
    sent: dict[str, tuple[list[int], int]] = {}
    for operation, *args in program:
        live = list(talk.index.chains.values())
        if operation == "turn":
            which, twist, new, max_tokens, name = args
            history, chain_id, options = [], None, {}
            if live and twist != "new":
                history, chain_id, name, options = continuation(live, which, twist)
            if twist == "new":
                history, options = words(30), {"shared_tokens": 30}
            fresh = words(new, len(sent))
            ids = fresh if twist == "append" and history else [*history, *fresh]
            if len(history) + new > 160:
                continue
            try:
                request_id = talk.send(ids, max_tokens, name, chain_id, **options)
            except RequestError:
                continue
            sent[request_id] = [*history, *fresh], max_tokens
        elif operation == "advance":
            bench.step(args[0])
        elif operation == "wait":
            bench.clock.sleep(args[0])
        elif operation == "preempt":
            running = bench.scheduler.running
            if running:
                bench.scheduler._preempt(running[args[0] % len(running)])
        elif operation == "reclaim":
            talk.chains.reclaim()
        elif operation == "drop":
            idle = [chain for chain in live if not chain.busy]
            if idle:
                talk.index.drop(idle[args[0] % len(idle)], "deleted")
        elif sent:
            request_id = list(sent)[args[0] % len(sent)]
            if operation == "cancel":
                bench.scheduler.cancel(request_id)
            else:
                bench.scheduler.stop(request_id, 0, args[1])
        bench.check()
    bench.run()
    bench.check()
    for request_id, (context, max_tokens) in sent.items():
        reason, tokens, last = bench.reason(request_id), bench.tokens(request_id), bench.last(request_id)
        assert reason is not None, "no last event"
        expected = bench.runner.generate(context, max_tokens, bench.requests[request_id].params.seed)
        assert tokens == expected[: len(tokens)], "other tokens than alone"
        if reason == "length":
            assert tokens == expected
        if reason == "error":
            assert isinstance(last.error, RequestError), last.error
            # Without swap space a conversation that lost its place can't be repeated as it was.
            assert isinstance(last.error, ChainError) or settings_.swap_bytes < 1 << 30, last.error
    for chain in talk.index.chains.values():
        assert chain.state is ChainState.IDLE
    bench.check_all_free()


@pytest.mark.parametrize("pages", range(12, 24))
@pytest.mark.parametrize("prompt", [5, 9, 18, 26])
def test_a_copy_of_an_idle_chain_takes_no_page_that_is_promised(pages, prompt):
    """A row that decodes within its reservation never finds the pool empty, whatever becomes of chains meanwhile."""
    window = EngineSettings(decode_window_tokens=64, min_decode_window_tokens=64, max_decode_window_tokens=64)
    talk = Talk(window, num_sequence_pages=pages, num_rows=2)
    _, chain = talk.turn(range(prompt), 4, "dense")
    other = talk.bench.submit([7] * 4, 40, "dense")
    talk.bench.step(3)
    fork = talk.send([*chain.ledger.tolist(), 3], 2, "dense")
    talk.bench.run()
    talk.bench.check_done(other, fork)
    assert talk.bench.last(other).finish_reason == talk.bench.last(fork).finish_reason == "length"
