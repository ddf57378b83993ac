"""Chains over HTTP: every field, header and error, the shape of answers and streams."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sparsejax.cache.chain import ChainIds
from sparsejax.config import EngineConfig, ServerConfig
from sparsejax.engine import Engine
from sparsejax.errors import ConfigError
from sparsejax.mock import MockRunner
from sparsejax.serve import serve_built
from sparsejax.serving.chain_answer import HEADERS
from sparsejax.settings import EngineSettings
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import MockBuilt, say_script

LONG = {"messages": [{"role": "user", "content": "say:" + "z" * 500}], "max_tokens": 3000}  # takes seconds when slow
CHAT, TEXT, CHAINS = "/v1/chat/completions", "/v1/completions", "/v1/chains"


def say(*texts: str) -> list[dict[str, str]]:
    """A conversation in which the model was asked for each text, and gave all but the last."""
    messages: list[dict[str, str]] = []
    for text in texts:
        messages += [{"role": "user", "content": f"say:{text}"}, {"role": "assistant", "content": text}]
    return messages[:-1]


def chat(server: LiveServer, *texts: str, **fields: Any) -> dict[str, Any]:
    response = server.post(CHAT, {"messages": say(*texts), **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    return error


def slow(**options: Any) -> MockRunner:
    return MockRunner(script=say_script, step_s=0.005, verify=False, **options)


# What an answer says.


def test_a_conversation_without_ids(shared: LiveServer) -> None:
    first = chat(shared, "alpha")
    prompt = first["usage"]["prompt_tokens"]
    assert first["chain_status"] == "created"
    assert first["chain_id"] == first["chain"]["id"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["sparsejax"]["cache_miss"]["reason"] in ("cold", "diverged")
    second = chat(shared, "alpha", "beta")
    assert second["choices"][0]["message"]["content"] == "beta"
    assert (second["chain_id"], second["chain_status"]) == (first["chain_id"], "adopted")
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt + len("alpha")
    assert second["usage"]["reused_tokens"] == second["usage"]["cached_tokens"] == prompt + len("alpha")
    assert second["sparsejax"]["cache_miss"] is None
    assert second["sparsejax"]["retained_fraction"] == 1.0


def test_the_chain_object(shared: LiveServer) -> None:
    first = chat(shared, "one object", cache_salt="object")
    chain, usage = first["chain"], first["usage"]
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    assert (chain["total_tokens"], chain["processed_tokens"]) == (total, total - 1)
    assert (chain["reused_tokens"], chain["prefilled_tokens"]) == (0, usage["prompt_tokens"])
    assert (chain["state"], chain["parent_id"], chain["restored_from"]) == ("idle", None, None)
    assert {chain["recomputed"], chain["state_rebuilt"], chain["interrupted"]} == {False}
    assert 3000 < chain["expires_at"] - time.time() < 3700
    assert chain["quality"]["evicted_tokens"] == 0
    fields = {"chain_id": first["chain_id"], "chain_ttl_s": 50, "cache_salt": "object"}
    second = chat(shared, "one object", "two", **fields)["chain"]
    assert (second["status"], second["restored_from"]) == ("resumed", "device")
    assert second["reused_tokens"] == second["retained_tokens"] == total - 1
    assert 0 < second["expires_at"] - time.time() < 51


def test_headers(shared: LiveServer) -> None:
    salt = {"cache_salt": "headers"}  # else other tests have computed how the template begins
    first = shared.post(CHAT, {"messages": say("headers"), **salt})
    assert first.headers["x-sparsejax-chain-id"] == first.json()["chain_id"] == first.headers["x-sparsevllm-chain-id"]
    assert first.headers["x-sparsejax-chain-status"] == "created"
    assert first.headers["x-sparsejax-cached-tokens"] == "0"
    assert first.headers["x-sparsejax-method"] == "dense"
    assert first.headers["x-sparsejax-cache-miss"].partition(";")[0] == "salt", "their text is known"
    assert "x-sparsejax-retained-fraction" not in first.headers
    body = {"messages": say("headers", "again"), "chain_id": first.json()["chain_id"], **salt}
    for stream in (False, True):
        second = shared.post(CHAT, {**body, "stream": stream})
        assert second.headers["x-sparsejax-chain-status"] == "resumed"
        assert int(second.headers["x-sparsejax-cached-tokens"]) > 0
        assert second.headers["x-sparsejax-retained-fraction"] == "1.0000"
        assert "x-sparsejax-cache-miss" not in second.headers
        chain_id = second.headers["x-sparsejax-chain-id"]
        body = {"messages": say("headers", "again", "more"), "chain_id": chain_id, **salt}
    browser = shared.get("/health", headers={"Origin": "http://x"})
    assert set(HEADERS) <= set(browser.headers["access-control-expose-headers"].split(", "))


def test_every_chunk_names_the_chain(shared: LiveServer) -> None:
    options = {"stream_options": {"include_usage": True}, "cache_salt": "pieces"}
    fields = {"messages": say("in pieces"), **options}
    *chunks, done = shared.stream(CHAT, fields)
    assert done == "[DONE]"
    assert len({chunk["chain_id"] for chunk in chunks}) == 1
    assert {chunk["chain_status"] for chunk in chunks} == {"created"}
    with_chain = [chunk for chunk in chunks if "chain" in chunk]
    assert [chunk["choices"][0]["finish_reason"] for chunk in with_chain] == ["stop"]
    assert with_chain[0]["chain"]["state"] == "idle"
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    chunks = shared.stream(CHAT, {"messages": say("in pieces", "more"), **options})[:-1]
    assert {chunk["chain_status"] for chunk in chunks} == {"adopted"}
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_headers_wait_until_the_chain_is_named(servers: Servers) -> None:
    """Also where a keep-alive is due before the engine has looked at the request."""
    runner = slow()
    server = servers.start(runner, keep_alive_s=0.03)
    runner.hold()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, TEXT, {"prompt": "say:first\n", "max_tokens": 9})
        server.wait_for(lambda: runner.calls.get("prefill", 0) > 0)
        time.sleep(0.05)  # the engine waits for the device, and hears nothing meanwhile
        content = json.dumps({"prompt": "say:second\n", "max_tokens": 9, "stream": True}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(head.encode() + content)
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            runner.release()
            connection.settimeout(5)
            received = b""
            while b"[DONE]" not in received:
                received += connection.recv(1 << 16)
        assert b"x-sparsejax-chain-id: chain_" in received.lower()
        assert first.result().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_text_completions(shared: LiveServer, stream: bool) -> None:
    def ask(body: dict[str, Any]) -> dict[str, Any]:
        if not stream:
            return shared.post(TEXT, body).json()
        chunks = shared.stream(TEXT, {**body, "stream_options": {"include_usage": True}})[:-1]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return {**chunks[-1], "choices": [{"text": text}]}

    prompt = f"say:text {stream}\n"
    first = ask({"prompt": prompt, "max_tokens": 30})
    assert first["choices"][0]["text"] == prompt[4:-1]
    second = ask({"prompt": prompt + prompt[4:-1] + "say:more\n", "max_tokens": 30, "chain_id": first["chain_id"]})
    assert (second["choices"][0]["text"], second["chain_status"]) == ("more", "resumed")
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + len(prompt[4:-1])


def test_several_prompts_have_a_chain_each(shared: LiveServer) -> None:
    answer = shared.post(TEXT, {"prompt": ["say:left\n", "say:right\n"], "max_tokens": 9})
    choices = answer.json()["choices"]
    assert len({choice["chain_id"] for choice in choices}) == 2
    assert {choice["chain_status"] for choice in choices} == {"created"}
    assert all(choice["chain"]["id"] == choice["chain_id"] for choice in choices)
    assert "chain_id" not in answer.json()
    assert "x-sparsejax-chain-id" not in answer.headers
    again = {"prompt": "say:left\nleftsay:on\n", "chain_id": choices[0]["chain_id"], "chain_on_miss": "error"}
    assert shared.post(TEXT, again).json()["chain_status"] == "resumed"
    streamed = shared.stream(TEXT, {"prompt": ["say:a\n", "say:b\n"], "max_tokens": 9})[:-1]
    last = [c for chunk in streamed for c in chunk["choices"] if c["finish_reason"]]
    assert len({c["chain_id"] for c in last}) == 2


# Appending.


def test_appended_messages(shared: LiveServer) -> None:
    first = chat(shared, "kept here")
    new = {"messages": say("what is new"), "chain_id": first["chain_id"], "chain_append": True}
    second = shared.post(CHAT, {**new, "chain_expected_tokens": first["chain"]["total_tokens"]}).json()
    assert second["choices"][0]["message"]["content"] == "what is new"
    assert (second["chain_id"], second["chain_status"]) == (first["chain_id"], "resumed")
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["chain"]["processed_tokens"]
    rendered = len("\n") + len("<user:say:what is new\n") + len("<assistant:")  # the answer's line ends first
    assert second["usage"]["prompt_tokens"] == first["chain"]["total_tokens"] + rendered
    wrong = refusal(shared.post(CHAT, {**new, "chain_expected_tokens": 7}), 409, "chain_prefix_mismatch")
    assert wrong["reason"] == "expected_tokens"
    wrong = refusal(shared.post(CHAT, {**new, "chain_expected_digest": "0" * 64}), 409, "chain_prefix_mismatch")
    assert (wrong["reason"], wrong["recovery"], wrong["retryable"]) == ("expected_digest", "resend_full", False)


def test_appended_text_and_ids(shared: LiveServer) -> None:
    first = shared.post(TEXT, {"prompt": "say:abc\n", "max_tokens": 9}).json()
    for prompt in ("say:def\n", list(b"say:def\n")):
        fields = {"prompt": prompt, "max_tokens": 9, "chain_id": first["chain_id"], "chain_append": True}
        answer = shared.post(TEXT, fields).json()
        assert (answer["choices"][0]["text"], answer["chain_status"]) == ("def", "resumed")
        assert answer["usage"]["prompt_tokens"] > 2 * len("say:def\n")


def test_append_start(shared: LiveServer) -> None:
    first = chat(shared, "start")
    messages = say("start", "go on")
    fields = {"messages": messages, "chain_id": first["chain_id"], "chain_append_start": 2}
    second = shared.post(CHAT, fields).json()
    assert (second["choices"][0]["message"]["content"], second["chain_status"]) == ("go on", "resumed")
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["chain"]["processed_tokens"]
    for start, part in ((0, "[1, "), (3, "[1, 2]"), (1, "must follow an answer")):
        error = refusal(shared.post(CHAT, {**fields, "chain_append_start": start}), 400, "invalid_value")
        assert error["param"] == "chain_append_start"
        assert part in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_append_start_serves_the_whole_conversation_if_the_chain_is_gone(shared: LiveServer, stream: bool) -> None:
    first = chat(shared, "lost")
    assert shared.client.delete(f"{CHAINS}/{first['chain_id']}").status_code == 200
    fields = {"messages": say("lost", "found"), "chain_id": first["chain_id"], "chain_append_start": 2}
    strict = refusal(shared.post(CHAT, {**fields, "chain_on_miss": "error", "stream": stream}), 410, "chain_gone")
    assert (strict["reason"], strict["recovery"]) == ("deleted", "resend_full")
    response = shared.post(CHAT, {**fields, "stream": stream})
    assert response.status_code == 200
    assert response.headers["x-sparsejax-chain-status"] == "recreated"
    assert response.headers["x-sparsejax-cache-miss"] == "deleted"
    assert response.headers["x-sparsejax-chain-id"] != first["chain_id"]


# Why something was missed.


def test_a_divergence_is_named(shared: LiveServer) -> None:
    text = "the first question, which is long enough to be known again"
    first = chat(shared, text, chain_lookup="off")
    messages = say(text, "second")
    messages[1]["content"] = messages[1]["content"].replace("question", "QUESTION")
    response = shared.post(CHAT, {"messages": messages, "chain_id": first["chain_id"]})
    miss = response.json()["sparsejax"]["cache_miss"]
    assert (miss["reason"], miss["message"]) == ("diverged", 1)
    rendered = f"<user:say:{text}\n<assistant:{text}"
    assert miss["token"] == rendered.rindex("question")
    assert response.headers["x-sparsejax-cache-miss"] == f"diverged; token={miss['token']}; message=1"
    assert response.json()["chain_status"] in ("forked", "recreated")
    strict = shared.post(CHAT, {"messages": messages, "chain_id": first["chain_id"], "chain_on_miss": "error"})
    if strict.status_code != 200:  # without a state before the difference
        assert refusal(strict, 409, "chain_prefix_mismatch")["token"] == miss["token"]


def test_another_salt_method_or_nothing(servers: Servers) -> None:
    server = servers.start()
    text = "a text that is long enough to be recognised by its beginning"
    assert chat(server, text)["sparsejax"]["cache_miss"]["reason"] == "cold"
    salted = chat(server, text, "more", cache_salt="s")
    assert (salted["chain_status"], salted["sparsejax"]["cache_miss"]["reason"]) == ("created", "salt")
    other = next(name for name in server.runner.limits.methods if name != "dense")
    changed = chat(server, text, "more", sparse_method=other)
    assert (changed["chain_status"], changed["sparsejax"]["cache_miss"]["reason"]) == ("created", "method")
    named = chat(server, text, "more", cache_salt="t", chain_id=salted["chain_id"])
    assert (named["chain_status"], named["sparsejax"]["cache_miss"]["reason"]) == ("recreated", "salt")
    fields = {"messages": say(text, "more"), "chain_id": salted["chain_id"], "chain_on_miss": "error"}
    error = refusal(server.post(CHAT, fields), 409, "chain_fingerprint_mismatch")
    assert (error["reason"], error["recovery"]) == ("salt", "new_chain")


def test_an_evicted_beginning_is_remembered(servers: Servers) -> None:
    server = servers.start()
    text = "x" * 300
    first = chat(server, text)
    server.drop_chains()
    again = chat(server, text, "more")
    assert again["chain_id"] != first["chain_id"]
    assert again["sparsejax"]["cache_miss"]["reason"] == "deleted"


# Errors.


def test_the_error_object(shared: LiveServer) -> None:
    first = chat(shared, "to be deleted")
    shared.client.delete(f"{CHAINS}/{first['chain_id']}")
    fields = {"messages": say("x"), "chain_id": first["chain_id"], "chain_append": True}
    for stream in (False, True):
        response = shared.post(CHAT, {**fields, "stream": stream})
        error = refusal(response, 410, "chain_gone")
        assert error == {
            "type": "chain_error",
            "code": "chain_gone",
            "message": error["message"],
            "param": "chain_id",
            "chain_id": first["chain_id"],
            "retryable": False,
            "recovery": "resend_full",
            "reason": "deleted",
            "token": None,
        }
        detail = {"code": "chain_gone", "chain_id": first["chain_id"], "message": error["message"]}
        assert response.json()["detail"] == detail


def test_ids_that_were_never_issued(shared: LiveServer) -> None:
    foreign = ChainIds(b"another server", instance=7).mint()
    for chain_id in ("nonsense", foreign, ChainIds(b"guessed").mint()):
        fields = {"messages": say("x"), "chain_id": chain_id}
        assert shared.post(CHAT, fields).json()["chain_status"] == "recreated"
        error = refusal(shared.post(CHAT, {**fields, "chain_on_miss": "error"}), 404, "chain_not_found")
        assert error["chain_id"] == chain_id
        assert shared.get(f"{CHAINS}/{chain_id}").status_code == 404


def test_busy_chains(servers: Servers) -> None:
    server = servers.start(slow())
    first = chat(server, "busy")
    long = {**LONG, "stream": True, "chain_id": first["chain_id"], "chain_append": True}
    with server.client.stream("POST", CHAT, json=long) as response:
        lines = response.iter_lines()  # a generator that is dropped closes the connection
        next(lines)
        fields = {"messages": say("busy", "second"), "chain_id": first["chain_id"]}
        strict = server.post(CHAT, {**fields, "chain_on_busy": "error"})
        error = refusal(strict, 409, "chain_busy")
        assert (error["retryable"], error["recovery"]) == (True, "retry_later")
        assert int(strict.headers["retry-after"]) >= 1
        refusal(server.client.delete(f"{CHAINS}/{first['chain_id']}"), 409, "chain_busy")
        for action in ("demote", "checkpoint"):
            refusal(server.post(f"{CHAINS}/{first['chain_id']}/{action}"), 409, "chain_busy")
        forked = server.post(CHAT, fields).json()
        assert forked["choices"][0]["message"]["content"] == "second"
        assert forked["chain_id"] != first["chain_id"]
        assert forked["chain_status"] in ("forked", "recreated")
        assert server.get(f"{CHAINS}?state=active").json()["total"] == 1
    server.wait_quiet()
    assert server.get(f"{CHAINS}/{first['chain_id']}").json()["quality"]["interrupted"]


def test_a_turn_that_waited_too_long(servers: Servers) -> None:
    server = servers.start(slow(num_rows=1), settings=EngineSettings(chain_queue_timeout_s=0.1, max_waiting=9))
    first = chat(server, "waits")
    with server.client.stream("POST", CHAT, json={**LONG, "stream": True}) as running:
        lines = running.iter_lines()
        next(lines)
        for stream in (False, True):
            fields = {"messages": say("waits", "x"), "chain_id": first["chain_id"], "stream": stream}
            response = server.post(CHAT, fields)
            error = refusal(response, 503, "chain_capacity_unavailable")
            assert (error["retryable"], error["chain_id"]) == (True, first["chain_id"])
            assert int(response.headers["retry-after"]) >= 1
    server.wait_quiet()
    assert chat(server, "waits", "x", chain_id=first["chain_id"])["chain_status"] == "resumed"


def test_more_turns_than_rows_wait(servers: Servers) -> None:
    server = servers.start(slow(num_rows=2), settings=EngineSettings(max_waiting=64))
    firsts = [chat(server, f"number {i}") for i in range(6)]

    def turn(i: int) -> str:
        return chat(server, f"number {i}", "next", chain_id=firsts[i]["chain_id"])["chain_status"]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(turn, range(6))) == ["resumed"] * 6


# Fields.

OFF_LIMITS = [
    ({"chain_id": 5}, "chain_id"),
    ({"chain_id": "x" * 129}, "chain_id"),
    ({"chain": "no"}, "chain"),
    ({"chain": False, "chain_id": "x"}, "chain"),
    ({"chain_append": True}, "chain_id"),
    ({"chain_append_start": 1}, "chain_id"),
    ({"chain_append_start": 1.5, "chain_id": "x"}, "chain_append_start"),
    ({"chain_append_start": 1, "chain_append": True, "chain_id": "x"}, "chain_append_start"),
    ({"chain_lookup": "always"}, "chain_lookup"),
    ({"chain_match": "guess"}, "chain_match"),
    ({"chain_on_miss": "reprefill"}, "chain_on_miss"),
    ({"chain_on_busy": "wait"}, "chain_on_busy"),
    ({"chain_branch": "cut"}, "chain_branch"),
    ({"chain_expected_tokens": -1, "chain_id": "x"}, "chain_expected_tokens"),
    ({"chain_expected_tokens": 5}, "chain_id"),
    ({"chain_expected_digest": "00", "chain_id": "x"}, "chain_expected_digest"),
    ({"chain_expected_digest": "g" * 64, "chain_id": "x"}, "chain_expected_digest"),
    ({"chain_priority": 101}, "chain_priority"),
    ({"chain_priority": 0.5}, "chain_priority"),
    ({"chain_ttl_s": -1}, "chain_ttl_s"),
    ({"chain_ttl_s": 1e10}, "chain_ttl_s"),
    ({"chain_expected_resume_s": -0.1}, "chain_expected_resume_s"),
    ({"chain_shared_tokens": -1}, "chain_shared_tokens"),
    ({"chain_compat": "yes"}, "chain_compat"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"recall": "disk"}, "recall"),
    ({"recall_budget": "some"}, "recall_budget"),
    ({"recall_budget": -1}, "recall_budget"),
    ({"chain_id": "x", "n": 2}, "n"),
]


@pytest.mark.parametrize(("fields", "param"), OFF_LIMITS, ids=[str(fields)[:40] for fields, _ in OFF_LIMITS])
def test_wrong_fields_are_named(shared: LiveServer, fields: dict[str, Any], param: str) -> None:
    before = shared.get(CHAINS).json()["total"]
    response = shared.post(CHAT, {"messages": say("a", "b"), **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert shared.get(CHAINS).json()["total"] == before


def test_with_an_id_exactly_one_prompt_and_no_echo(shared: LiveServer) -> None:
    first = shared.post(TEXT, {"prompt": "say:x\n"}).json()
    for fields, param in (({"prompt": ["a", "b"]}, "prompt"), ({"prompt": "a", "echo": True}, "echo")):
        error = refusal(shared.post(TEXT, {**fields, "chain_id": first["chain_id"]}), 400, "invalid_value")
        assert error["param"] == param


def test_requests_that_have_no_chain(shared: LiveServer) -> None:
    for fields in ({"n": 2}, {"chain": False}):
        before = shared.get(CHAINS).json()["total"]
        answer = chat(shared, "none", **fields)
        assert "chain" not in answer
        assert answer.get("chain_id") is None
        assert answer.get("chain_status") == ("disabled" if "chain" in fields else None)
        cached, known = answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]
        assert (answer["sparsejax"]["cache_miss"] is None) == (cached == (known - 1) // 4 * 4)
        assert shared.get(CHAINS).json()["total"] == before
    echoed = shared.post(TEXT, {"prompt": "say:x\n", "echo": True}).json()
    assert "chain_id" not in echoed


@pytest.mark.parametrize("empty", ["", "  ", None])
def test_an_empty_id_begins_a_chain(shared: LiveServer, empty: str | None) -> None:
    answer = chat(shared, f"empty {empty!r}", chain_id=empty, chain_lookup="off")
    assert answer["chain_status"] == "created"


def test_lookup_off_begins_a_new_chain(shared: LiveServer) -> None:
    first = chat(shared, "look")
    second = chat(shared, "look", "again", chain_lookup="off")
    assert (second["chain_status"], second["chain"]["parent_id"]) == ("created", None)
    assert second["chain_id"] != first["chain_id"]
    cached, known = second["usage"]["prompt_tokens_details"]["cached_tokens"], first["chain"]["processed_tokens"]
    assert known - 4 < cached <= known, "whole pages of 4 tokens, from the prefix cache"
    alone = chat(shared, "look", "again", chain_lookup="off", cache_salt="look")
    assert (alone["chain_status"], alone["usage"]["prompt_tokens_details"]["cached_tokens"]) == ("created", 0)


def test_named_chains_are_forked_by_those_who_name_none(shared: LiveServer) -> None:
    first = chat(shared, "mine")
    second = chat(shared, "mine", "still mine", chain_id=first["chain_id"])
    other = chat(shared, "mine", "still mine", "another")
    assert (other["chain_status"], other["chain"]["parent_id"]) == ("forked", second["chain_id"])
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == second["chain"]["processed_tokens"]
    compat = chat(shared, "mine", "still mine", "third", chain_compat=True)
    assert (compat["chain_status"], compat["chain"]["status"]) == ("created", "forked")


@pytest.mark.parametrize("branch", ["fork", "rewind"])
def test_edited_conversations(shared: LiveServer, branch: str) -> None:
    first = chat(shared, f"edit {branch}")
    second = chat(shared, f"edit {branch}", "to be edited", chain_id=first["chain_id"])
    edited = chat(shared, f"edit {branch}", "other", chain_id=second["chain_id"], chain_branch=branch)
    assert edited["choices"][0]["message"]["content"] == "other"
    cached = edited["usage"]["prompt_tokens_details"]["cached_tokens"]
    part = len("\n<user:say:")  # of the template, which the edited message begins with too
    assert first["chain"]["processed_tokens"] <= cached <= first["chain"]["total_tokens"] + part
    assert edited["chain_status"] == ("forked" if branch == "fork" else "rewound")
    assert (edited["chain_id"] == first["chain_id"]) == (branch == "rewind")


def test_hints_reach_the_chain(shared: LiveServer) -> None:
    answer = chat(shared, "hints", chain_priority=3, chain_ttl_s=9, chain_expected_resume_s=2)
    chain = shared.engine.ask(lambda chains: chains.index.find(answer["chain_id"])).result(5)
    assert (chain.priority, chain.ttl_s, chain.resume_hint_s, chain.implicit) == (3, 9, 2, False)
    answer = chat(shared, "no hints")
    assert shared.engine.ask(lambda chains: chains.index.find(answer["chain_id"])).result(5).implicit


def test_chains_can_be_off(servers: Servers) -> None:
    server = servers.start(settings=EngineSettings(chain_cache=False), chain_cache=False)
    assert "chain_id" not in chat(server, "x")
    assert chat(server, "x", chain_ttl_s=5)["chain_status"] == "disabled"
    error = refusal(server.post(CHAT, {"messages": say("x"), "chain_id": "chain_x"}), 400, "chain_mode_disabled")
    assert error["chain_id"] == "chain_x"
    refusal(server.get(CHAINS), 400, "chain_mode_disabled")
    match = server.post("/v1/chain_cache/routing_match", {"chain_id": "x"}).json()
    assert match == {"enabled": False, "present": False, "state": None, "tombstone": False}


def test_the_setting_reaches_the_server() -> None:
    for on in (True, False):
        runner = MockRunner()
        with Engine(runner, EngineSettings(chain_cache=on)) as engine:
            assert serve_built(MockBuilt(runner, engine), ServerConfig()).chain_cache is on
    for word in ("off", False):
        assert EngineConfig(chain_cache=word).chain_cache == "off"  # type: ignore[arg-type]
    assert EngineConfig(chain_cache=True).chain_cache == EngineConfig().chain_cache == "on"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--chain-cache must be one of on, off"):
        EngineConfig(chain_cache="maybe")


# Ends of turns.


def test_a_stop_string_leaves_what_was_seen(shared: LiveServer) -> None:
    fields = {"messages": [{"role": "user", "content": "say:visible hidden rest"}], "stop": [" hidden"]}
    first = shared.post(CHAT, fields).json()
    assert first["choices"][0]["message"]["content"] == "visible"
    assert first["chain"]["total_tokens"] == first["usage"]["prompt_tokens"] + len("visible")
    messages = [*fields["messages"], {"role": "assistant", "content": "visible"}, *say("more")]
    second = shared.post(CHAT, {"messages": messages, "chain_id": first["chain_id"], "chain_on_miss": "error"}).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["chain"]["processed_tokens"]


@pytest.mark.parametrize("checkpoints", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_the_last_token(servers: Servers, stream: bool, checkpoints: int) -> None:
    """The engine has ended the turn by itself when it is found."""
    server = servers.start(settings=EngineSettings(chain_checkpoints=checkpoints))
    messages = [{"role": "user", "content": "say:visible hidden rest"}]
    fields = {"messages": messages, "stop": [" hidden"], "max_tokens": len("visible hidden")}
    if stream:
        *_, last, _ = server.stream(CHAT, fields)
        text, chain, status = "visible", last["chain"], last["chain_status"]
        assert last["choices"][0]["finish_reason"] == "stop"
    else:
        answer = server.post(CHAT, fields).json()
        text, chain, status = answer["choices"][0]["message"]["content"], answer["chain"], answer["chain_status"]
    prompt = len("<user:say:visible hidden rest\n<assistant:")
    assert text == "visible"
    if not checkpoints:
        assert (status, chain["gone_reason"]) == ("invalidated", "rollback")
        assert server.get(f"{CHAINS}/{chain['id']}").status_code == 410
        return
    assert (chain["total_tokens"], chain["processed_tokens"]) == (prompt + len("visible"), prompt)
    new = {"messages": say("more"), "chain_id": chain["id"], "chain_append": True}
    second = server.post(CHAT, new).json()
    assert second["choices"][0]["message"]["content"] == "more"
    assert prompt <= second["usage"]["cached_tokens"] <= prompt + len("visible"), "the rest is in the prefix cache"
    assert second["usage"]["prompt_tokens"] == prompt + len("visible\n<user:say:more\n<assistant:")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_keeps_its_chain(servers: Servers, stream: bool) -> None:
    server = servers.start(slow())
    body = {**LONG, "stream": stream}
    if stream:
        with server.client.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            for _ in range(20):
                next(lines)
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.post(CHAT, body, timeout=0.3)
    server.wait_quiet()
    (chain,) = server.get(CHAINS).json()["data"]
    assert (chain["state"], chain["quality"]["interrupted"]) == ("idle", True)
    assert chain["processed_tokens"] > 500 + len("<user:say:\n<assistant:")


def test_a_deadline_keeps_the_chain(servers: Servers) -> None:
    server = servers.start(slow())
    response = server.post(CHAT, LONG, headers={"X-Request-Timeout": "0.3"})
    assert response.status_code == 408
    server.wait_quiet()
    assert server.get(CHAINS).json()["data"][0]["quality"]["interrupted"]
