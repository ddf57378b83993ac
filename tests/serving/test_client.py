"""The small client, against a live server and against answers made by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sparsejax.config import ServerConfig
from sparsejax.mock import MockRunner
from sparsejax.serving.client import Client, ClientError
from tests.conftest import ROOT
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import say_script

ASK = [{"role": "user", "content": "say:hello"}]


@pytest.fixture
def client(shared: LiveServer) -> Any:
    with Client(f"{shared.url}/v1/") as made:
        yield made


def by_hand(answer: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client("http://host", http=httpx.Client(transport=httpx.MockTransport(answer)))


def test_chat_and_go_on(client: Client) -> None:
    answer = client.chat(ASK, max_tokens=20)
    assert answer.message == {"role": "assistant", "content": "hello"}
    assert (answer.text, answer.finish_reason, answer.completion_tokens) == ("hello", "stop", 6)
    assert 0 < answer.ttft_s <= answer.total_s
    assert answer.chain_id is not None
    again = client.chat([*ASK, answer.message, *ASK], chain_id=answer.chain_id)
    assert again.chain_id == answer.chain_id
    assert again.cached_tokens == again.resident_tokens > answer.prompt_tokens
    assert again.degraded_tokens == 0
    assert again.fields["chain"]["status"] == "resumed"


def test_chains_are_listed_and_dropped(client: Client) -> None:
    chain_id = client.chat([{"role": "user", "content": "say:listed"}]).chain_id
    assert chain_id is not None
    found = {chain.chain_id: chain for chain in client.chains("idle")}
    assert found[chain_id].total_tokens >= found[chain_id].processed_tokens > 0
    assert found[chain_id].fields["object"] == "chain"
    client.drop_chain(chain_id)
    assert chain_id not in {chain.chain_id for chain in client.chains()}


def test_refusals_say_what_the_server_says(client: Client) -> None:
    with pytest.raises(ClientError, match="temperature") as refused:
        client.chat(ASK, temperature=-1.0)
    assert (refused.value.status, refused.value.param) == (400, "temperature")
    with pytest.raises(ClientError) as gone:
        client.drop_chain("chain_nowhere")
    assert gone.value.status == 404
    assert gone.value.code == "chain_not_found"


def test_keys_models_and_fields(servers: Servers) -> None:
    live = servers.start(config=ServerConfig(api_key=("secret",)))
    with Client(live.url) as nobody, pytest.raises(ClientError) as refused:
        nobody.chat(ASK)
    assert refused.value.status == 401
    with Client(live.url, api_key="secret", model="mock", fields={"max_tokens": 2}) as client:
        assert client.ready()
        assert client.chat(ASK).text == "he"
        assert client.chat(ASK, max_tokens=3).text == "hel"
    with Client(live.url, api_key="secret", model="other") as wrong, pytest.raises(ClientError, match="does not exist"):
        wrong.chat(ASK)


def test_no_server() -> None:
    with Client("http://127.0.0.1:9") as client:
        assert not client.ready()
        with pytest.raises(ClientError, match=r"http://127\.0\.0\.1:9: ") as refused:
            client.chains()
        assert refused.value.status is None
        with pytest.raises(ClientError):
            client.chat(ASK)


def test_an_error_in_the_middle_of_a_stream() -> None:
    lines = [{"choices": [{"delta": {"content": "a"}}]}, {"error": {"message": "device lost", "code": "engine_dead"}}]
    text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines)
    with pytest.raises(ClientError, match="device lost") as refused:
        by_hand(lambda request: httpx.Response(200, text=text)).chat(ASK)
    assert refused.value.code == "engine_dead"


def test_answers_of_something_else() -> None:
    with pytest.raises(ClientError, match="not a JSON object"):
        by_hand(lambda request: httpx.Response(200, text="<html>")).chains()
    with pytest.raises(ClientError, match="has no block_size"):
        by_hand(lambda request: httpx.Response(200, json={"enabled": True})).match(ASK)
    with pytest.raises(ClientError, match="the server refused") as refused:
        by_hand(lambda request: httpx.Response(502, json={"detail": "bad gateway"})).match(ASK)
    assert refused.value.status == 502


class Jobs:
    """A server with one prune job, of these statuses one after the other."""

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)
        self.asked: list[tuple[str, str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else dict(request.url.params)
        self.asked.append((request.method, request.url.path, body))
        status = self.statuses.pop(0)
        done = {"logical_tokens": 64, "retained_tokens": 16, "freed_device_slots": 48}
        job = {"prune_id": "prune_1", "status": status, "policy": "drop", "ranges": [[0, 64]]}
        job["result"] = done if status == "completed" else None
        job["error"] = {"message": "no room", "code": "x"} if status in ("failed", "blocked") else None
        return httpx.Response(202 if request.method == "POST" else 200, json=job)


PRUNE = [{"message": 3, "keep": 0}]


def test_a_job_is_waited_for() -> None:
    jobs = Jobs("queued", "running", "completed")
    job = by_hand(jobs).prune(ASK, PRUNE, policy="drop", chain_id="chain_a")
    assert (job.status, job.freed_tokens, job.over) == ("completed", 48, True)
    posted, *polled = jobs.asked
    sent = {"messages": ASK, "prune": PRUNE, "policy": "drop", "chain_id": "chain_a"}
    assert posted == ("POST", "/v1/prefix_cache/prune", sent)
    assert [(verb, path) for verb, path, _ in polled] == [("GET", "/v1/prefix_cache/prune/prune_1")] * 2
    assert all(0 < float(params["wait_s"]) <= 20 for _, _, params in polled)


def test_a_job_is_not_waited_for() -> None:
    jobs = Jobs("queued", "cancelled")
    client = by_hand(jobs)
    job = client.prune(ASK, PRUNE, wait=False)
    assert not job.over
    assert job.freed_tokens == 0
    assert client.cancel(job.prune_id or "").status == "cancelled"
    assert jobs.asked[1][:2] == ("DELETE", "/v1/prefix_cache/prune/prune_1")


def test_match_and_prune(servers: Servers) -> None:
    """Against the server itself."""
    live = servers.start(MockRunner(script=say_script))
    messages = [
        {"role": "user", "content": "say:found"},
        {"role": "tool", "content": "a result of some length", "tool_call_id": "c1"},
        {"role": "user", "content": "say:it"},
    ]
    with Client(live.url) as client:
        assert client.match(messages).miss is not None
        answer = client.chat(messages, max_tokens=8, chain=False)
        messages.append(answer.message)
        found = client.match(messages)
        assert (found.enabled, found.block_size, found.quality_degraded) == (True, 4, False)
        assert found.matched_tokens == found.resident_kv_tokens > 40
        job = client.prune(messages, [{"tool_call_id": "c1", "keep": 0}], policy="drop")
        assert (job.status, job.freed_tokens, len(job.ranges)) == ("completed", 20, 1)
        assert client.job(job.prune_id or "").result == job.result
        after = client.match(messages)
        assert after.matched_tokens == found.matched_tokens
        assert after.resident_kv_tokens == found.resident_kv_tokens - 20
        assert after.quality_degraded
        assert client.match(text="something else").matched_tokens == 0
        assert client.match(token_ids=[1, 2, 3], cache_salt="x").usable_tokens == 0
        with pytest.raises(ClientError, match="is over") as refused:
            client.cancel(job.prune_id or "")
        assert refused.value.status == 409


def test_there_is_nothing_to_prune(servers: Servers) -> None:
    live = servers.start(MockRunner(script=say_script))
    messages = [{"role": "tool", "content": "no"}, *ASK]
    with Client(live.url) as client:
        client.chat(messages, chain=False)
        job = client.prune(messages, [{"message": 0, "keep": 0}])
    assert (job.prune_id, job.status, job.over, job.freed_tokens, job.ranges) == (None, "completed", True, 0, [])
    assert job.fields["skipped"][0] == {"message": 0, "reason": "shorter_than_a_block", "tokens": 2}


@pytest.mark.parametrize("status", ["failed", "blocked"])
def test_a_job_that_did_nothing_is_an_error(status: str) -> None:
    with pytest.raises(ClientError, match=f"prune_1 {status}: no room"):
        by_hand(Jobs("queued", status)).prune(ASK, PRUNE)


def test_a_job_that_takes_too_long() -> None:
    with pytest.raises(ClientError, match="still running after 0 s"):
        by_hand(Jobs("queued", "running")).prune(ASK, PRUNE, timeout_s=0)


def test_it_needs_no_engine() -> None:
    code = "import sys, sparsejax.serving.client; print(sorted(n for n in sys.modules if n.startswith('sparsejax')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['sparsejax', 'sparsejax.serving', 'sparsejax.serving.client']"
