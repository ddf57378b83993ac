"""`prune_policy`: old results of tools go after a turn, without the answer waiting or the client counting tokens."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from sparsejax.caches import Caches
from sparsejax.mock import MockRunner
from sparsejax.prune_records import PruneInfo
from sparsejax.serving import message_spans, prune_policy
from sparsejax.serving.client import Answer, Client
from sparsejax.serving.prune_policy import PolicyTurn, old_results
from sparsejax.serving.tool_results import Result, ToolResults
from sparsejax.settings import EngineSettings
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import say_script

BLOCK = 4
CHAT = "/v1/chat/completions"
DROP = {"keep_last_tool_results": 1}


@pytest.fixture
def live(servers: Servers) -> LiveServer:
    return servers.start(MockRunner(script=say_script), settings=EngineSettings(max_waiting=64, prefix_cache=True))


class Agent:
    """A conversation with one tool result in each turn."""

    def __init__(self, live: LiveServer, result: str = "0123456789abcdefghijkl", **fields: Any) -> None:
        self.live, self.result, self.fields = live, result, {"max_tokens": 4, **fields}
        self.messages: list[dict[str, Any]] = []
        self.number = 0
        self.client = Client(live.url, http=live.client)

    def turn(self, **fields: Any) -> Answer:
        self.number += 1
        self.messages += [
            {"role": "user", "content": "say:ok"},
            {"role": "tool", "content": f"{self.number}{self.result}\nsay:ok", "tool_call_id": f"c{self.number}"},
        ]
        answer = self.client.chat(self.messages, **self.fields | fields)
        self.messages.append(answer.message)
        self.live.wait_for(lambda: not self.live.state.tasks)
        self.live.wait_for(lambda: all(info.ended for info in jobs(self.live)))
        return answer

    def whole_blocks(self, index: int) -> tuple[int, int]:
        """Of a message's content, from the bytes of the mock's template."""
        before = sum(len(f"x{m['role']}:{m['content']}\n") for m in self.messages[:index])
        start = before + len(f"x{self.messages[index]['role']}:")
        stop = start + len(self.messages[index]["content"])
        return -(-start // BLOCK) * BLOCK, stop // BLOCK * BLOCK


def jobs(live: LiveServer, tenant: str = "") -> list[PruneInfo]:
    """Oldest first."""

    def listed(caches: Caches) -> list[PruneInfo]:
        return caches.prunes.listed(tenant, 100)[::-1]

    return live.engine.consult(listed).result(5.0)


@pytest.mark.parametrize("fields", [{"chain": False}, {}, {"chain_lookup": "prefix"}, {"cache_salt": "s"}])
def test_old_results_go_one_by_one(live: LiveServer, fields: dict[str, Any]) -> None:
    agent = Agent(live, prune_policy=DROP, **fields)
    assert agent.turn().resident_tokens == 0
    assert jobs(live) == [], "the newest result stays"
    second = agent.turn()
    assert second.resident_tokens == second.cached_tokens > 0
    third = agent.turn()
    (first_job,) = [info for info in jobs(live) if info.ranges == (agent.whole_blocks(1),)]
    width = first_job.ranges[0][1] - first_job.ranges[0][0]
    assert (first_job.status, first_job.policy, first_job.keep_tokens) == ("completed", "drop", 0)
    assert third.cached_tokens - third.resident_tokens == width
    assert third.cached_tokens >= second.prompt_tokens // BLOCK * BLOCK, "what follows the result stays cached"
    assert third.degraded_tokens == third.cached_tokens - first_job.ranges[0][0]
    fourth = agent.turn()
    assert [info.ranges for info in jobs(live)] == [(agent.whole_blocks(i),) for i in (1, 4, 7)]
    assert fourth.cached_tokens - fourth.resident_tokens == 2 * width
    assert fourth.text == "ok"


def test_named_chains_lose_rows_too(live: LiveServer) -> None:
    agent = Agent(live, prune_policy=DROP)
    chain_id = agent.turn().chain_id
    for _ in range(3):
        answer = agent.turn(chain_id=chain_id)
        assert answer.chain_id == chain_id
        assert answer.fields["chain"]["status"] == "resumed"
    assert all(info.status == "completed" for info in jobs(live))
    assert {info.result["chain_id"] for info in jobs(live) if info.result} == {chain_id}
    freed = sum(info.result["freed_device_slots"] for info in jobs(live)[:-1] if info.result)
    assert answer.cached_tokens - answer.resident_tokens == freed > 0
    assert answer.fields["chain"]["retained_tokens"] == answer.resident_tokens


def test_appended_turns(live: LiveServer) -> None:
    """Only new messages are computed, but all are there: their spans are those of the chain's tokens."""
    agent = Agent(live)
    chain_id = agent.turn().chain_id
    agent.turn(chain_id=chain_id)
    agent.turn(chain_id=chain_id, chain_append_start=len(agent.messages), prune_policy=DROP)
    assert [info.ranges for info in jobs(live)] == [(agent.whole_blocks(1), agent.whole_blocks(4))]
    assert jobs(live)[0].status == "completed"


def test_nothing_is_pruned_twice(live: LiveServer) -> None:
    agent = Agent(live, prune_policy={"keep_last_tool_results": 0}, chain=False)
    agent.turn()
    again = agent.client.chat(agent.messages[:-1], **agent.fields)
    live.wait_for(lambda: not live.state.tasks)
    assert len(jobs(live)) == 1
    assert again.resident_tokens < again.cached_tokens


def test_a_share_stays(live: LiveServer) -> None:
    policy = {"keep_last_tool_results": 0, "older": {"keep": 0.3, "policy": "snapkv_global"}}
    agent = Agent(live, result="x" * 40, prune_policy=policy, chain=False)
    agent.turn()
    (info,) = jobs(live)
    start, stop = info.ranges[0]
    assert (info.status, info.policy) == ("completed", "snapkv_global")
    assert info.keep_tokens == -(-(stop - start) * 3 // 10 // BLOCK) * BLOCK
    agent.client.chat(agent.messages[:-1], **agent.fields)
    live.wait_for(lambda: not live.state.tasks)
    assert len(jobs(live)) == 1, "it has this ratio already"


def test_each_result_is_looked_for_once(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[list[int]] = []

    def counted(tokenizer: Any, conversation: Any, ids: Any, wanted: Any) -> Any:
        looked.append(list(wanted))
        return message_spans.spans(tokenizer, conversation, ids, wanted)

    monkeypatch.setattr(prune_policy, "spans", counted)
    agent = Agent(live, prune_policy=DROP, chain=False)
    for _ in range(4):
        agent.turn()
    assert looked == [[1], [4], [7]]
    agent.messages[1] = {**agent.messages[1], "content": "Z" + agent.messages[1]["content"][1:]}
    agent.turn()
    assert looked[3:] == [[1, 4, 7, 10]], "another text has other tokens, as far as is known"


def test_what_is_queued_is_not_queued_again(live: LiveServer) -> None:
    def pause(caches: Caches) -> None:
        caches.prunes.step = lambda *_, **__: False  # type: ignore[method-assign]

    def go_on(caches: Caches) -> None:
        del caches.prunes.step  # type: ignore[attr-defined]

    agent = Agent(live, chain=False)
    agent.turn()
    agent.fields["prune_policy"] = {"keep_last_tool_results": 0}
    live.engine.consult(pause).result(5.0)
    for _ in range(3):
        agent.client.chat(agent.messages[:-1], **agent.fields)
        live.wait_for(lambda: not live.state.tasks)
    assert [info.status for info in jobs(live)] == ["queued"]
    live.engine.consult(go_on).result(5.0)
    live.wait_for(lambda: jobs(live)[0].status == "completed")


def test_ranges_that_others_pruned_in_part_stay(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(live, chain=False)
    agent.turn()
    agent.turn()
    start, _ = agent.whole_blocks(1)
    body = {"messages": agent.messages, "ranges": [[start - BLOCK, start + BLOCK]], "keep_tokens": 0}
    assert live.post("/v1/prefix_cache/prune", body).status_code == 202
    live.wait_for(lambda: jobs(live)[0].ended)
    with caplog.at_level(logging.WARNING, "sparsejax.serving"):
        agent.turn(prune_policy={"keep_last_tool_results": 0})
    assert [info.ranges for info in jobs(live)[1:]] == [(agent.whole_blocks(4), agent.whole_blocks(7))]
    assert caplog.records == []


def test_a_chain_that_goes_meanwhile(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others may begin with is pruned all the same."""
    agent = Agent(live)
    chain_id = agent.turn().chain_id
    cuts = PolicyTurn._cuts

    def slow(self: PolicyTurn, *about: Any) -> Any:
        with Client(live.url) as client:
            client.drop_chain(chain_id or "")
        return cuts(self, *about)

    monkeypatch.setattr(PolicyTurn, "_cuts", slow)
    agent.turn(chain_id=chain_id, prune_policy=DROP)
    (info,) = jobs(live)
    assert info.status == "completed"
    assert info.result is not None
    assert info.result["path"]


def test_equal_conversations_with_other_tokens(live: LiveServer) -> None:
    """White space around an answer means nothing, but its tokens count."""
    agent = Agent(live, chain=False)
    agent.turn()
    agent.turn()
    agent.fields["prune_policy"] = {"keep_last_tool_results": 0}
    agent.client.chat(agent.messages[:-1], **agent.fields)
    live.wait_for(lambda: [info.ended for info in jobs(live)] == [True])
    other = [{**m, "content": f"{m['content']}     "} if m["role"] == "assistant" else m for m in agent.messages]

    def shifted(index: int) -> tuple[int, int]:
        two = Agent(live)
        two.messages = other
        return two.whole_blocks(index)

    agent.client.chat(other[:-1], **agent.fields)
    live.wait_for(lambda: not live.state.tasks)
    assert [info.ranges for info in jobs(live)] == [(agent.whole_blocks(1), agent.whole_blocks(4)), (shifted(4),)]


def test_several_at_once_are_one_job(live: LiveServer) -> None:
    agent = Agent(live, chain=False)
    for _ in range(3):
        agent.turn()
    agent.turn(prune_policy=DROP)
    (info,) = jobs(live)
    assert len(info.ranges) == 3


def test_results_shorter_than_a_block_stay(live: LiveServer) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "tool", "content": "ok"},
        {"role": "user", "content": "say:a"},
    ]
    client = Client(live.url, http=live.client)
    client.chat(messages, prune_policy={"keep_last_tool_results": 0})
    live.wait_for(lambda: not live.state.tasks)
    assert jobs(live) == []


def test_no_answer_waits(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(self: PolicyTurn) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(PolicyTurn, "run", slow)
    client = Client(live.url, http=live.client)
    answer = client.chat([{"role": "user", "content": "say:now"}], prune_policy={})
    assert answer.text == "now"
    assert answer.total_s < 30
    assert len(live.state.tasks) == 1


def test_failures_are_logged_once(live: LiveServer, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    async def fail(self: PolicyTurn) -> None:
        raise ValueError("no luck")

    monkeypatch.setattr(PolicyTurn, "run", fail)
    agent = Agent(live, prune_policy=DROP)
    with caplog.at_level(logging.WARNING, "sparsejax.serving"):
        assert agent.turn().text == "ok"
        assert agent.turn().text == "ok"
    assert [record.getMessage() for record in caplog.records] == [
        "prune_policy: a conversation stays as it is: ValueError: no luck"
    ]


def test_chains_alone_are_pruned(servers: Servers) -> None:
    """Without a prefix cache there is no path that others find."""
    settings = EngineSettings(max_waiting=64, prefix_cache=False)
    live = servers.start(MockRunner(script=say_script), settings=settings, prefix_cache=False)
    agent = Agent(live, prune_policy=DROP)
    chain_id = agent.turn().chain_id
    for _ in range(3):
        answer = agent.turn(chain_id=chain_id)
    assert [info.status for info in jobs(live)] == ["completed"] * 3
    assert answer.cached_tokens > answer.resident_tokens


@pytest.mark.parametrize("fields", [{}, {"chain": False}])
def test_methods_whose_rows_can_not_be_pruned(servers: Servers, fields: Any, caplog: pytest.LogCaptureFixture) -> None:
    live = servers.start(MockRunner(script=say_script))
    agent = Agent(live, prune_policy=DROP, sparse_method="window", **fields)
    with caplog.at_level(logging.WARNING, "sparsejax.serving"):
        for _ in range(3):
            agent.turn()
    assert jobs(live) == []
    (logged,) = [record.getMessage() for record in caplog.records]
    assert "a conversation stays as it is: PruneError: " in logged
    assert "rows of window" in logged


def test_nothing_is_kept_at_all(servers: Servers) -> None:
    settings = EngineSettings(prefix_cache=False, chain_cache=False)
    live = servers.start(MockRunner(), settings=settings, prefix_cache=False, chain_cache=False)
    response = live.post(CHAT, {"messages": [{"role": "user", "content": "say:a"}], "prune_policy": {}})
    assert response.status_code == 400
    assert "keeps nothing" in response.json()["error"]["message"]


def test_streams_and_several_choices(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[PolicyTurn] = []
    start = PolicyTurn.start
    monkeypatch.setattr(PolicyTurn, "start", lambda self: (started.append(self), start(self)))
    agent = Agent(live, chain=False)
    agent.turn()
    agent.turn(n=2, prune_policy=DROP)
    assert len(started) == len(jobs(live)) == 1
    body = {"messages": agent.messages, "max_tokens": 2, "chain": False, "prune_policy": {"keep_last_tool_results": 0}}
    assert live.post(CHAT, body).status_code == 200
    live.wait_for(lambda: not live.state.tasks)
    assert len(jobs(live)) == 2


@pytest.mark.parametrize(
    ("policy", "param"),
    [
        ({"keep_last_tool_results": -1}, "prune_policy.keep_last_tool_results"),
        ({"keep_last_tool_results": True}, "prune_policy.keep_last_tool_results"),
        ({"keep_last": 2}, "prune_policy"),
        ({"older": {"keep": 1.0}}, "prune_policy.older.keep"),
        ({"older": {"keep": -0.1}}, "prune_policy.older.keep"),
        ({"older": {"keep": "a"}}, "prune_policy.older.keep"),
        ({"older": {"keep": 0.1, "policy": "best"}}, "prune_policy.older.policy"),
        ({"older": {"keep": 0.1, "policy": "drop"}}, "prune_policy.older.policy"),
        ({"older": {"ratio": 0.1}}, "prune_policy.older"),
        ([], "prune_policy"),
    ],
)
def test_wrong_fields(shared: LiveServer, policy: Any, param: str) -> None:
    response = shared.post(CHAT, {"messages": [{"role": "user", "content": "say:a"}], "prune_policy": policy})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_only_whole_conversations(shared: LiveServer) -> None:
    for fields in ({"prompt_token_ids": [1, 2]}, {"chain_id": "chain_x", "chain_append": True, "messages": []}):
        response = shared.post(CHAT, {**fields, "prune_policy": {}})
        assert response.status_code == 400
        assert "whole conversation" in response.json()["error"]["message"]


def test_old_results_are_those_of_tools() -> None:
    messages = [{"role": role} for role in ("user", "tool", "assistant", "function", "tool", "user")]
    assert old_results(messages, 1) == [1, 3]
    assert old_results(messages, 0) == [1, 3, 4]
    assert [old_results(messages, keep) for keep in (3, 4, 9)] == [[], [], []]


def test_what_is_remembered_is_bounded() -> None:
    results = ToolResults(2)
    for number in range(3):
        results.put(bytes([number]), Result((0, number), b""))
    assert len(results) == 2
    assert results.get(b"\x00") is None
    assert results.get(b"\x02") == Result((0, 2), b"")
    assert results.is_new_problem("a")
    assert not results.is_new_problem("a")
