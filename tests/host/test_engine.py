"""The engine thread: hand-over, cancellation, health, and death."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time

import pytest

from sparsejax.cache.chain import ChainIds
from sparsejax.cache.pages import IntegrityError
from sparsejax.engine import Engine, EngineSettings
from sparsejax.errors import (
    ChainNotFoundError,
    ContextLengthError,
    EngineDeadError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
)
from sparsejax.mock import EOS, MockRunner
from sparsejax.request import ChainOptions, Request, SamplingParams, TokenEvent


class Client:
    """Collects the events of one request."""

    def __init__(self, engine: Engine, request_id: str, prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> None:
        self.engine, self.request_id = engine, request_id
        params.setdefault("seed", 1)
        self.params = SamplingParams(**params)  # type: ignore[arg-type]
        self.prompt = prompt
        self.queue: queue.Queue[TokenEvent] = queue.Queue()
        engine.submit(Request(request_id, prompt, self.params), self.queue.put)

    def events(self, timeout_s: float = 10.0) -> list[TokenEvent]:
        """All events until every choice has ended."""
        out: list[TokenEvent] = []
        while sum(event.finish_reason is not None for event in out) < self.params.n:
            out.append(self.queue.get(timeout=timeout_s))
        return out

    def first(self) -> TokenEvent:
        return self.queue.get(timeout=10.0)

    def tokens(self) -> list[int]:
        return [token for event in self.events() for token in event.token_ids]


def wait_for(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.001)


def test_chains_are_asked_on_the_engine_thread() -> None:
    with Engine(MockRunner()) as engine:
        events: queue.Queue[TokenEvent] = queue.Queue()
        request = Request("a", (1, 2, 3), SamplingParams(max_tokens=3, seed=1), chain=ChainOptions())
        engine.submit(request, events.put)
        first = events.get(timeout=10.0)
        assert (first.token_ids, first.chain.status) == ((), "created"), "known before the first token"
        while (event := events.get(timeout=10.0)).finish_reason is None:
            pass
        chain_id = event.chain.chain_id
        threads = engine.ask(lambda chains: (threading.current_thread().name, list(chains.index.chains)))
        assert threads.result(10.0) == ("sparsejax-engine", [chain_id])
        kept = engine.consult(lambda caches: (threading.current_thread().name, len(caches.chains.index.chains), caches))
        name, count, caches = kept.result(10.0)
        assert (name, count, caches.radix.index.num_blocks) == ("sparsejax-engine", 1, 1)
        with pytest.raises(ChainNotFoundError):
            engine.ask(lambda chains: chains.index.find(ChainIds(b"").mint())).result(10.0)
        assert engine.ask(lambda chains: chains.index.drop(chains.index.find(chain_id), "deleted")).result(10.0) is None
        assert engine.consult(lambda caches: caches.radix.index.evict(2)).result(10.0) == 1
        wait_for(lambda: idle(engine))
    with pytest.raises(EngineDeadError):
        engine.ask(lambda chains: None).result(10.0)


def idle(engine: Engine) -> bool:
    s = engine.snapshot
    return not s.busy and not (s.running or s.waiting or s.swapped) and s.free_pages == s.total_pages


def test_fifty_clients_get_what_they_would_alone() -> None:
    runner = MockRunner(num_rows=8)
    with Engine(runner, EngineSettings(max_waiting=100)) as engine:
        results: dict[int, list[int]] = {}

        def client(i: int) -> None:
            results[i] = Client(engine, f"c{i}", tuple(range(i, i + 20)), max_tokens=15, seed=i).tokens()

        threads = [threading.Thread(target=client, args=(i,)) for i in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for i in range(50):
            assert results[i] == runner.generate(range(i, i + 20), 15, i)
        wait_for(lambda: idle(engine))
        assert engine.snapshot.free_rows == 8
        assert engine.health == "ok"


def test_asyncio_hand_over() -> None:
    async def main(engine: Engine) -> list[int]:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()

        def on_event(event: TokenEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        engine.submit(Request("a", (1, 2), SamplingParams(max_tokens=5, seed=3)), on_event)
        out: list[int] = []
        while True:
            event = await events.get()
            out += event.token_ids
            if event.finish_reason:
                return out

    runner = MockRunner()
    with Engine(runner) as engine:
        assert asyncio.run(main(engine)) == runner.generate((1, 2), 5, 3)


def test_cancel_from_any_thread_is_final_and_idempotent() -> None:
    with Engine(MockRunner(step_s=0.002)) as engine:
        client = Client(engine, "a", max_tokens=2000, n=2)
        other = Client(engine, "b", max_tokens=20)
        client.first()
        for _ in range(3):
            engine.cancel("a")
        events = client.events()
        assert [e.finish_reason for e in events if e.finish_reason] == ["cancelled"] * 2
        assert {e.index for e in events if e.finish_reason} == {0, 1}
        assert other.events()[-1].finish_reason == "length"
        engine.cancel("b")  # finished: no-op
        engine.cancel("unknown")
        wait_for(lambda: idle(engine))
        assert client.queue.empty()
        assert other.queue.empty()
        Client(engine, "a", max_tokens=2).tokens()  # the id may be used again


def test_stop_ends_one_choice_without_an_error() -> None:
    with Engine(MockRunner(step_s=0.002)) as engine:
        client = Client(engine, "a", max_tokens=60, n=2)
        client.first()
        engine.stop("a", 1)
        ends = {e.index: e for e in client.events() if e.finish_reason}
        assert ends[1].finish_reason == "stop"
        assert ends[1].error is None
        assert ends[0].finish_reason == "length"
        assert ends[0].stats is not None
        assert ends[0].stats.completion_tokens == 60


def test_errors_at_the_door_name_the_field_and_leave_nothing() -> None:
    with Engine(MockRunner(max_model_len=64)) as engine:
        for params, prompt, field in [
            ({"temperature": float("nan")}, (1,), "temperature"),
            ({"max_tokens": 0}, (1,), "max_tokens"),
            ({}, (), "prompt"),
            ({}, (1, 9999), "prompt"),
            ({"stop_token_ids": (-1,)}, (1,), "stop_token_ids"),
        ]:
            with pytest.raises(RequestError) as refused:
                Client(engine, "x", prompt, **params)
            assert refused.value.param == field
        with pytest.raises(ContextLengthError):
            Client(engine, "x", (1,) * 60, max_tokens=10)
        with pytest.raises(RequestError, match="not served; choose one of dense"):
            engine.submit(Request("x", (1,), SamplingParams(), "nonsense"), print)
        assert Client(engine, "x", max_tokens=3).tokens()
        assert engine.snapshot.steps > 0


def test_an_id_in_use_is_refused() -> None:
    with Engine(MockRunner(step_s=0.01)) as engine:
        client = Client(engine, "a", max_tokens=1000)
        with pytest.raises(RequestError, match="in use"):
            Client(engine, "a")
        engine.cancel("a")
        client.events()


def test_a_full_queue_refuses_with_429_and_recovers() -> None:
    runner = MockRunner(num_rows=1)
    with Engine(runner, EngineSettings(max_waiting=2)) as engine:
        runner.hold()
        running = Client(engine, "r", max_tokens=3)
        wait_for(lambda: engine._waiting == set())
        waiting = [Client(engine, f"w{i}", max_tokens=3) for i in range(2)]
        with pytest.raises(QueueFullError) as refused:
            Client(engine, "w2")
        assert refused.value.status == 429
        assert refused.value.retry_after_s
        runner.release()
        for client in [running, *waiting]:
            assert len(client.tokens()) == 3
        wait_for(lambda: idle(engine))
        assert len(Client(engine, "w2", max_tokens=3).tokens()) == 3


@pytest.mark.parametrize("when", ["before", "after", "result"])
@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_a_device_error_ends_everything_once_and_is_reported(
    call: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = MockRunner(num_rows=2)
    runner.fail(call, 2, OSError("device lost"), when)
    engine = Engine(runner)
    clients = []
    for i in range(4):
        try:
            clients.append(Client(engine, f"c{i}", max_tokens=50))
        except EngineDeadError:
            break
    for client in clients:
        last = client.events()[-1]
        assert last.finish_reason == "error"
        assert isinstance(last.error, EngineDeadError)
        assert "device lost" in str(last.error)
    wait_for(lambda: engine.snapshot.failure is not None)
    assert engine.health == "failed"
    assert "device lost" in str(engine.failure)
    with pytest.raises(EngineDeadError, match="device lost"):
        Client(engine, "late")
    assert all(client.queue.empty() for client in clients)
    assert engine.drain(1.0)
    engine.close()
    assert engine.health == "failed"


def test_lost_pages_are_noticed_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MockRunner())
    pool = engine._scheduler.memory.pool
    free = pool.free
    monkeypatch.setattr(pool, "free", lambda granularity, ids: free(granularity, ids[1:]))
    Client(engine, "a", max_tokens=5).events()
    wait_for(lambda: engine.health == "failed")
    assert isinstance(engine.failure, IntegrityError)
    engine.close()


def test_a_consumer_that_raises_loses_only_its_request() -> None:
    with Engine(MockRunner()) as engine:
        calls = []

        def bad(event: TokenEvent) -> None:
            calls.append(event)
            raise ValueError("consumer")

        engine.submit(Request("bad", (1,), SamplingParams(max_tokens=100)), bad)
        assert len(Client(engine, "good", max_tokens=20).tokens()) == 20
        wait_for(lambda: idle(engine))
        assert sum(event.finish_reason is not None for event in calls) == 1
        assert len(calls) < 10


def test_non_finite_logits_end_one_request() -> None:
    runner = MockRunner()
    runner.poison(7)
    with Engine(runner) as engine:
        bad, good = Client(engine, "bad", (7, 8), max_tokens=5), Client(engine, "good", (8, 9), max_tokens=5)
        last = bad.events()[-1]
        assert last.finish_reason == "error"
        assert "non-finite" in str(last.error)
        assert good.tokens() == runner.generate((8, 9), 5, 1)


def test_a_stuck_device_shows_in_the_snapshot() -> None:
    runner = MockRunner()
    with Engine(runner) as engine:
        runner.hold()
        client = Client(engine, "a", max_tokens=3)
        wait_for(lambda: engine.snapshot.busy)
        wait_for(lambda: engine.snapshot.last_step_age_s > 0.05)
        assert engine.health == "ok"
        with pytest.raises(RequestError):  # the door still answers
            Client(engine, "b", ())
        runner.release()
        assert len(client.tokens()) == 3
        wait_for(lambda: not engine.snapshot.busy)
        assert engine.snapshot.last_step_age_s == 0.0


def test_an_idle_engine_does_nothing() -> None:
    with Engine(MockRunner()) as engine:
        Client(engine, "a", max_tokens=3).tokens()
        wait_for(lambda: idle(engine))
        steps, cpu = engine.snapshot.steps, time.thread_time()
        before = engine._scheduler.runner.calls.copy()  # type: ignore[attr-defined]
        published = engine.snapshot
        time.sleep(0.05)
        assert engine.snapshot is published
        assert engine.snapshot.steps == steps
        assert engine._scheduler.runner.calls == before  # type: ignore[attr-defined]
        assert time.thread_time() - cpu < 0.05


def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    engine = Engine(MockRunner(step_s=0.002))
    client = Client(engine, "a", max_tokens=40)
    client.first()
    assert not engine.drain(0.0)
    assert engine.health == "draining"
    with pytest.raises(ShuttingDownError):
        Client(engine, "b")
    assert engine.drain(10.0)
    assert client.events()[-1].finish_reason == "length"
    engine.close()
    assert engine.health == "closed"


def test_close_cancels_what_is_left_and_ends_the_thread() -> None:
    engine = Engine(MockRunner(step_s=0.002, num_rows=1))
    running, waiting = Client(engine, "a", max_tokens=4000), Client(engine, "b", max_tokens=4000)
    running.first()
    engine.close()
    engine.close()
    assert running.events()[-1].finish_reason == "cancelled"
    assert waiting.events()[-1].finish_reason == "cancelled"
    assert not engine._thread.is_alive()
    with pytest.raises(ShuttingDownError):
        Client(engine, "c")


def test_snapshot_tells_what_rows_see_hold_and_read() -> None:
    runner = MockRunner(step_s=0.002)
    with Engine(runner) as engine:
        done: queue.Queue[TokenEvent] = queue.Queue()
        prompt = tuple(i % 200 for i in range(200))
        engine.submit(Request("a", prompt, SamplingParams(max_tokens=400), "prompt"), done.put)
        wait_for(lambda: any(row.seen_tokens > 210 for row in engine.snapshot.rows))
        (row,) = engine.snapshot.rows
        assert row.request_id == "a"
        assert row.method == "prompt"
        assert row.resident_tokens == row.seen_tokens - 200 + 16
        assert row.read_tokens == row.resident_tokens
        assert engine.snapshot.evicted_pages == (50 - 4) * 2
        assert 0 < engine.snapshot.kv_usage < 0.01
        with pytest.raises(AttributeError):
            engine.snapshot.running = 3  # type: ignore[misc]
        engine.cancel("a")


def test_stats_and_metrics_add_up() -> None:
    runner = MockRunner(step_s=0.001, eos_after=6)
    with Engine(runner) as engine:
        client = Client(engine, "a", tuple(range(30)), max_tokens=10, logprobs=2)
        events = client.events()
        Client(engine, "b", max_tokens=3, n=2, ignore_eos=True).events()
        wait_for(lambda: idle(engine))
        last = events[-1]
        assert last.token_ids == (EOS,)
        assert last.finish_reason == "stop"
        assert last.stop_reason is None
        stats = last.stats
        assert stats is not None
        assert (stats.prompt_tokens, stats.completion_tokens, stats.cached_tokens) == (30, 7, 0)
        assert stats.seen_tokens == stats.resident_tokens >= 36
        assert 0 <= stats.queue_s <= stats.ttft_s
        assert abs(stats.queue_s + stats.prefill_s - stats.ttft_s) < 1e-6
        for event in events:
            (logprob,) = event.logprobs or ()
            assert logprob.token == event.token_ids[0]
            assert len(logprob.top) == 2
            assert logprob.top[0] == (logprob.token, logprob.logprob)
        m = engine.metrics
        assert m.generation_tokens.value() == 13
        assert m.prompt_tokens.value() == 33
        assert m.request_success.value(finished_reason="stop") == 1
        assert m.request_success.value(finished_reason="length") == 2
        assert m.time_to_first_token_seconds.count() == 3
        assert m.inter_token_latency_seconds.count() == 10
        assert m.request_params_n.count() == 2
        assert m.num_requests_running.value() == 0
        assert m.kv_cache_usage_perc.value() == 0


def test_status_line_only_when_something_happens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sparsejax.engine")
    with Engine(MockRunner(step_s=0.002), EngineSettings(status_interval_s=0.01)) as engine:
        time.sleep(0.03)
        assert not caplog.records
        Client(engine, "a", max_tokens=20).tokens()
        wait_for(lambda: any("tokens/s" in record.getMessage() for record in caplog.records))


def test_host_modules_import_no_jax() -> None:
    import subprocess

    code = (
        "import sys, sparsejax.engine, sparsejax.mock, sparsejax.cost;"
        "bad = {'jax', 'flax', 'transformers', 'prometheus_client'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
