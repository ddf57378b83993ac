"""What the engine says of chains, and when: first events, misses, queue deadlines, chains that nobody asked for."""

from __future__ import annotations

import pytest

from sparsejax.cache.chain import Tier
from sparsejax.errors import ChainCapacityError, QueueTimeoutError
from sparsejax.lifecycle import TELL_S
from sparsejax.settings import EngineSettings
from tests.contracts.test_chains import Talk, words


def chain_events(talk: Talk, request_id: str) -> list:
    return [event for event in talk.bench.events[request_id] if event.chain is not None]


def test_the_first_event_comes_before_the_turn_has_a_row() -> None:
    talk = Talk(num_rows=1)
    busy = talk.send(words(20), 50)
    talk.bench.step(3)
    waiting = talk.send(words(20, 1), 4)
    talk.bench.step()
    assert not talk.bench.events[waiting], "more may be known when it gets a row"
    talk.bench.clock.sleep(TELL_S)
    talk.bench.step()
    (first,) = talk.bench.events[waiting]
    assert (first.token_ids, first.finish_reason) == ((), None)
    assert first.chain is not None
    assert (first.chain.status, first.chain.state, first.chain.prefilled_tokens) == ("created", "active", 20)
    assert (first.chain.miss, first.chain.total_tokens) == ("cold", 0)
    talk.end()
    assert [event.finish_reason for event in chain_events(talk, waiting)] == [None, "length"]
    last = chain_events(talk, busy)[-1].chain
    assert (last.state, last.total_tokens, last.processed_tokens) == ("idle", 70, 69)


def test_a_turn_that_gave_its_rows_up_says_so_before_its_first_token() -> None:
    # With the prefix cache it is said once, when the turn gets its row.
    settings = EngineSettings(chain_host_bytes=0, chain_checkpoints=0, decode_window_tokens=8, prefix_cache=False)
    talk = Talk(settings, num_sequence_pages=51, num_rows=8)
    chains = [talk.turn(words(40, n), 9)[1] for n in range(4)]
    ids = [talk.send([*c.ledger.tolist(), *words(60, 9)], 30, chain_id=c.chain_id) for c in chains]
    talk.bench.run()
    reports = [talk.report(request_id) for request_id in ids]
    assert {report.status for report in reports} == {"resumed", "recreated"}
    for request_id, report in zip(ids, reports, strict=True):
        told = chain_events(talk, request_id)
        before = [event for event in told if event.finish_reason is None]
        assert before[-1].chain.status == report.status
        assert len(before) == (2 if report.status == "recreated" else 1)
        tokens = [i for i, event in enumerate(talk.bench.events[request_id]) if event.token_ids]
        assert talk.bench.events[request_id].index(before[-1]) < tokens[0]
        if report.status == "recreated":
            assert (report.reused_tokens, report.miss, report.restored_from) == (0, "evicted", None)


@pytest.mark.parametrize("named", [True, False])
def test_only_turns_that_name_their_chain_have_the_chains_deadline(named: bool) -> None:
    talk = Talk(EngineSettings(queue_timeout_s=30.0, chain_queue_timeout_s=2.0), num_rows=1)
    _, chain = talk.turn(words(20), 4)
    busy = talk.send(words(20, 5), 2000)
    talk.bench.step(3)
    context = [*chain.ledger.tolist(), *words(5, 1)]
    waiting = talk.send(context, 4, chain_id=chain.chain_id if named else None)
    other = talk.bench.submit(10, 4)
    for _ in range(1000):
        talk.bench.step()
        if talk.bench.reason(waiting):
            break
    error = talk.bench.last(waiting).error if talk.bench.reason(waiting) == "error" else None
    waited = talk.bench.clock() - talk.bench.requests[waiting].arrival_s
    if named:
        assert isinstance(error, ChainCapacityError)
        assert 2.0 < waited < 2.2
        assert (error.status, error.chain_id, error.retryable) == (503, chain.chain_id, True)
        assert error.retry_after_s
        assert talk.report(waiting).state == "idle", "the chain is as it was"
    else:
        assert error is None or isinstance(error, QueueTimeoutError)
        assert waited > 2.2
    assert talk.bench.reason(other) is None or waited > 2.2
    talk.bench.scheduler.cancel(busy)
    talk.end()


def test_the_chains_deadline_may_be_the_longer_one() -> None:
    talk = Talk(EngineSettings(queue_timeout_s=1.0, chain_queue_timeout_s=1000.0), num_rows=1)
    _, chain = talk.turn(words(20), 4)
    talk.send(words(20, 5), 200)
    talk.bench.step(3)
    plain = talk.bench.submit(10, 4)
    named = talk.send([*chain.ledger.tolist(), *words(5, 1)], 4, chain_id=chain.chain_id)
    talk.bench.run()
    assert isinstance(talk.bench.last(plain).error, QueueTimeoutError)
    assert talk.bench.reason(named) == "length"


def test_chains_that_nobody_asked_for_are_dropped_rather_than_moved() -> None:
    talk = Talk(EngineSettings(chain_checkpoints=0), num_sequence_pages=40)
    _, passing = talk.turn(words(40), 4, implicit=True)
    _, asked = talk.turn(words(40, 1), 4)
    _, conversation = talk.turn(words(40, 2), 4, implicit=True)
    talk.turn([*conversation.ledger.tolist(), *words(5)], 4, implicit=True)
    assert conversation.turns == 2
    while talk.chains.reclaim():
        pass
    assert passing.reason == "evicted"
    assert asked.tier is Tier.HOST
    assert conversation.tier is Tier.HOST
    talk.end()


def test_a_chain_that_is_named_once_is_asked_for() -> None:
    talk = Talk(EngineSettings(chain_checkpoints=0), num_sequence_pages=40)
    _, chain = talk.turn(words(40), 4, implicit=True)
    assert chain.implicit
    talk.turn([*chain.ledger.tolist(), *words(5)], 4, chain_id=chain.chain_id)
    assert not chain.implicit
    talk.turn([*chain.ledger.tolist(), *words(5)], 4, implicit=True)
    talk.end()


def test_counters_say_what_was_saved_and_why_not() -> None:
    talk = Talk()
    metrics = talk.bench.scheduler.metrics
    _, chain = talk.turn(words(40), 4)
    talk.turn([*chain.ledger.tolist(), *words(5)], 4, chain_id=chain.chain_id)
    saved = metrics.chain_tokens_saved.value()
    assert saved == metrics.prefix_cache_hits.value() == 43
    talk.index.drop(chain, "deleted")
    report, _ = talk.turn([*words(40), *words(5)], 4, chain_id=chain.chain_id)
    assert (report.status, report.miss) == ("recreated", "deleted")
    assert metrics.chain_tokens_recomputed.value(reason="deleted") == 45 - report.reused_tokens == 5
    assert metrics.prefix_cache_misses.value(reason="deleted") == 1
    assert metrics.prefix_cache_misses.value(reason="cold") == 1
    assert metrics.chain_turns.value(status="created") == 1
    assert metrics.chain_restore_seconds.count(tier="device") == 1
    talk.end()


def test_an_appended_turn_may_ask_for_more_than_the_window_has() -> None:
    talk = Talk(eos_after=5)
    _, chain = talk.turn(words(40), 4)
    window = talk.bench.runner.limits.geometry.max_model_len
    request_id = talk.send(words(5), window, chain_id=chain.chain_id, append=True)
    talk.bench.run()
    assert talk.bench.reason(request_id) == "stop"
    assert talk.report(request_id).reused_tokens == 43
    talk.end()
