"""/v1/prefix_cache over HTTP: what a beginning has, who may see it, how it is kept, deleted and pruned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sparsejax.caches import Caches
from sparsejax.config import ServerConfig
from sparsejax.mock import MockRunner
from sparsejax.settings import EngineSettings
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import say_script

PAGE = 4
ROOT = "/v1/prefix_cache"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ON = EngineSettings(prefix_cache=True, max_waiting=256)
SELECTED = ("match", "routing_match", "inspect", "delete_subtree", "unpin")
WITH_MORE = {"set_retention": {"retention": 1}, "set_eviction_priority": {"priority": 1}, "pin": {"ttl_s": 5}}
ALL: dict[str, dict[str, Any]] = {**{name: {} for name in SELECTED}, **WITH_MORE}


@pytest.fixture(scope="module")
def server() -> Any:
    made = Servers()
    yield made.start(settings=ON)
    made.close()


def ids(seed: int, n: int = 40) -> list[int]:
    return [(seed * 37 + i * 11 + (i * seed) % 13) % 250 for i in range(n)]


def put(server: LiveServer, tokens: list[int], **fields: Any) -> dict[str, Any]:
    """Has a prompt computed, without a chain, so that nobody holds its blocks afterwards."""
    body = {"prompt": tokens, "max_tokens": 1, "chain": False, **fields}
    headers = body.pop("headers", {})
    response = server.post(TEXT, body, headers=headers)
    assert response.status_code == 200, response.text
    server.wait_quiet()
    return response.json()


def call(server: LiveServer, name: str, body: dict[str, Any], status: int = 200, **options: Any) -> dict[str, Any]:
    response = server.post(f"{ROOT}/{name}", body, **options)
    assert response.status_code == status, response.text
    return response.json()


def refusal(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code, error
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


def asked(server: LiveServer, function: Callable[[Caches], Any]) -> Any:
    return server.engine.consult(function).result(5.0)


# Match.


@pytest.mark.parametrize("name", ["match", "routing_match"])
def test_match_says_what_a_request_would_begin_with(server: LiveServer, name: str) -> None:
    tokens = ids(50 + len(name))
    put(server, tokens)
    found = call(server, name, {"token_ids": tokens})
    assert (found["prompt_tokens"], found["usable_tokens"], found["matched_tokens"]) == (40, 36, 36)
    assert (found["matched_blocks"], found["block_size"], found["match_ratio"]) == (9, PAGE, 1.0)
    assert (found["resident_kv_tokens"], found["quality_degraded"], found["miss"]) == (36, False, None)
    assert (found["supported"], found["enabled"], found["snapshot"]) == (True, True, name == "routing_match")
    assert len(bytes.fromhex(found["last_block_id"])) == 16
    assert found["live_blocks"] >= 10
    longer = call(server, name, {"token_ids": [*tokens, 1, 2, 3, 4, 5]})
    assert (longer["usable_tokens"], longer["matched_tokens"], longer["match_ratio"]) == (44, 40, 40 / 44)
    assert put(server, [*tokens, 1, 2, 3, 4, 5])["usage"]["prompt_tokens_details"]["cached_tokens"] == 40
    shorter = call(server, name, {"token_ids": tokens[:PAGE]})
    assert (shorter["usable_tokens"], shorter["matched_tokens"], shorter["match_ratio"]) == (0, 0, 0.0)
    assert shorter["last_block_id"] is None


def test_match_counts_for_nothing(server: LiveServer) -> None:
    put(server, ids(2))

    def facts(caches: Caches) -> Any:
        index = caches.radix.index
        return dict(index.counts), index.changes, [(b.hits, b.used_s) for b in index.blocks()]

    before = asked(server, facts)
    for name in ("match", "routing_match", "inspect"):
        call(server, name, {"token_ids": ids(2)})
    assert asked(server, facts) == before


def test_a_miss_has_a_reason(server: LiveServer) -> None:
    tokens = ids(3)
    put(server, tokens)
    other = [*tokens[:17], tokens[17] + 1, *tokens[18:]]
    miss = call(server, "match", {"token_ids": other})["miss"]
    assert (miss["reason"], miss["token"]) == ("diverged", 17)
    assert call(server, "match", {"token_ids": ids(4)})["miss"]["reason"] in ("cold", "diverged")
    salted = call(server, "match", {"token_ids": tokens, "cache_salt": "pepper"})
    assert (salted["matched_tokens"], salted["miss"]["reason"]) == (0, "salt")
    call(server, "delete_subtree", {"token_ids": tokens})
    asked(server, lambda caches: caches.radix.index.evict(caches.radix.index.num_pages))
    put(server, tokens)
    asked(server, lambda caches: caches.radix.index.evict(caches.radix.index.num_pages))
    assert call(server, "match", {"token_ids": tokens})["miss"]["reason"] == "evicted"


def test_methods_that_share_nothing_say_so(server: LiveServer) -> None:
    methods = server.state.served().methods
    assert "window" in methods
    for name in ("match", "routing_match", "inspect"):
        found = call(server, name, {"token_ids": ids(1), "sparse_method": "window"})
        assert not found["enabled"]
        assert "window" in found["reason"]
    for name in ("delete_subtree", "unpin", *WITH_MORE):
        body = {"token_ids": ids(1), "sparse_method": "window", **ALL[name]}
        refusal(server.post(f"{ROOT}/{name}", body), 400, "prefix_cache_disabled")


def test_a_server_without_the_cache_says_so(servers: Servers) -> None:
    server = servers.start(settings=EngineSettings(prefix_cache=False))
    put(server, ids(1))
    for name in ("match", "routing_match", "inspect"):
        found = call(server, name, {"token_ids": ids(1)})
        assert not found["enabled"]
        assert "--prefix-cache" in found["reason"]
    for name, more in (("pin", {"ttl_s": 5}), ("prune", {"ranges": [[0, PAGE]], "keep_tokens": 0})):
        refusal(server.post(f"{ROOT}/{name}", {"token_ids": ids(1), **more}), 400, "prefix_cache_disabled")


def test_messages_and_text_are_what_requests_send(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "say:thirty letters and a few more"}]
    answer = server.post(CHAT, {"messages": messages, "chain": False}).json()
    server.wait_quiet()
    tokens = answer["usage"]["prompt_tokens"]
    usable = (tokens - 1) // PAGE * PAGE
    for body in (
        {"messages": messages},
        {"chat": messages},
        {"chat": {"messages": messages, "temperature": 0}},
        {"chat": {"messages": messages, "tools": [], "tool_choice": "none"}},
    ):
        found = call(server, "match", body)
        assert (found["prompt_tokens"], found["matched_tokens"]) == (tokens, usable), body
    text = "say:a text that is no chat\n"
    put(server, list(text.encode()))
    for name in ("text", "prompt"):
        assert call(server, "match", {name: text})["matched_tokens"] == (len(text) - 1) // PAGE * PAGE
    half = call(server, "match", {"messages": messages, "add_generation_prompt": False})
    assert half["prompt_tokens"] < tokens


def test_messages_of_a_conversation_are_found_by_its_own_ids(server: LiveServer) -> None:
    first = [{"role": "user", "content": "say:<think>hm</think>an answer with a thought"}]
    answer = server.post(CHAT, {"messages": first}).json()
    server.wait_quiet()
    shown = {"role": "assistant", "content": "an answer with a thought"}  # clients leave the reasoning out
    later = [*first, shown, {"role": "user", "content": "say:go on"}]
    found = call(server, "match", {"messages": later})
    turn = answer["chain"]["processed_tokens"]
    assert found["matched_tokens"] == turn // PAGE * PAGE, "reasoning of the chain's is in the path"


# Inspect.


def test_inspect_lists_the_path(server: LiveServer) -> None:
    tokens = ids(5)
    put(server, tokens)
    put(server, [*tokens[:20], *ids(6)])
    put(server, [*tokens[:20], *ids(6)])
    found = call(server, "inspect", {"token_ids": tokens, "include_subtree": True})
    assert (found["matched"], found["selector_block_count"], found["hit_block_count"], found["hit_len"]) == (
        True,
        10,
        10,
        40,
    )
    blocks = found["path_blocks"]
    assert [b["logical_block_idx"] for b in blocks] == list(range(10))
    assert [b["child_count"] for b in blocks] == [1, 1, 1, 1, 2, 1, 1, 1, 1, 0]
    assert {b["hits"] for b in blocks[:5]} == {2}
    assert {b["hits"] for b in blocks[5:]} == {0}
    for block in blocks:
        assert (block["ref_count"], block["pin_count"], block["retention"], block["eviction_priority"]) == (0, 0, 0, 0)
        assert (block["logical_tokens"], block["resident_kv_tokens"], block["device_present"]) == (PAGE, PAGE, True)
        assert not block["quality_degraded"]
        assert block["prune"] is None
        assert 0 <= block["idle_s"] < 60
    assert blocks[-1]["block_id"] == found["last_block_id"]
    assert found["subtree"] == {
        "block_count": 1,
        "referenced_block_count": 0,
        "pinned_block_count": 0,
        "leaf_block_count": 1,
        "truncated": False,
    }
    beginning = call(server, "inspect", {"token_ids": tokens[:20], "include_subtree": True})
    assert beginning["subtree"]["block_count"] == 1 + 5 + 10
    assert beginning["subtree"]["leaf_block_count"] == 2
    assert call(server, "match", {"token_ids": [*tokens[:20], 0]})["last_block_id"] == beginning["last_block_id"]


def test_inspect_is_bounded(server: LiveServer) -> None:
    tokens = ids(7)
    put(server, tokens)
    part = call(server, "inspect", {"token_ids": tokens, "offset": 3, "limit": 4})
    assert [b["logical_block_idx"] for b in part["path_blocks"]] == [3, 4, 5, 6]
    assert (part["truncated"], part["hit_block_count"], part["offset"]) == (True, 10, 3)
    assert call(server, "inspect", {"token_ids": tokens, "limit": 0})["path_blocks"] == []
    assert call(server, "inspect", {"token_ids": tokens, "offset": 2**31 - 1})["path_blocks"] == []
    for field, bad in (("limit", -1), ("limit", 8193), ("offset", -1), ("offset", 2**70)):
        refused = refusal(server.post(f"{ROOT}/inspect", {"token_ids": tokens, field: bad}), 400, "invalid_value")
        assert refused["param"] == field


def test_inspect_of_what_is_not_there(server: LiveServer) -> None:
    found = call(server, "inspect", {"token_ids": [7, 7, 7, 9, 9, 9, 9, 9], "include_subtree": True})
    assert (found["matched"], found["reason"], found["path_blocks"], found["subtree"]) == (False, "not_found", [], None)
    short = call(server, "inspect", {"token_ids": [7, 7, 7]})
    assert short["reason"] == "prefix_shorter_than_block_size"


def test_inspect_shows_who_needs_a_block(servers: Servers) -> None:
    server = servers.start(settings=ON)
    first = server.post(CHAT, {"messages": [{"role": "user", "content": "say:kept by its chain"}]}).json()
    server.wait_quiet()
    messages = [{"role": "user", "content": "say:kept by its chain"}]
    blocks = call(server, "inspect", {"messages": messages})["path_blocks"]
    assert {b["ref_count"] for b in blocks} == {1}
    stays = call(server, "delete_subtree", {"messages": messages}, 409)
    assert stays["error"]["code"] == "prefix_in_use"
    assert set(stays["blocked_reasons"]) == {"referenced"}
    server.client.delete(f"/v1/chains/{first['chain_id']}")
    assert {b["ref_count"] for b in call(server, "inspect", {"messages": messages})["path_blocks"]} == {0}
    assert call(server, "delete_subtree", {"messages": messages})["deleted_block_count"] > 0


# Deletion.


def test_a_subtree_goes_deepest_first(server: LiveServer) -> None:
    tokens = ids(8)
    put(server, tokens)
    put(server, [*tokens[:20], *ids(9)])
    before = call(server, "inspect", {"token_ids": tokens})["path_blocks"]
    gone = call(server, "delete_subtree", {"token_ids": tokens[:24]})
    assert gone["deleted_block_ids"] == [b["block_id"] for b in before[:4:-1]]
    assert (gone["deleted_block_count"], gone["blocked_block_count"], gone["blocked_blocks"]) == (5, 0, [])
    assert call(server, "match", {"token_ids": tokens})["matched_tokens"] == 20
    assert call(server, "match", {"token_ids": [*tokens[:20], *ids(9)]})["matched_tokens"] == 56
    missing = call(server, "delete_subtree", {"token_ids": tokens[:24]}, 404)
    assert missing["error"]["code"] == "prefix_not_found"
    assert missing["blocked_blocks"] == [{"block_id": None, "reason": "not_found"}]
    assert missing["deleted_block_count"] == 0
    call(server, "delete_subtree", {"token_ids": tokens[:4]})
    assert call(server, "match", {"token_ids": tokens})["matched_tokens"] == 0


def test_deletion_leaves_what_is_needed(server: LiveServer) -> None:
    tokens = ids(10)
    put(server, tokens)
    put(server, [*tokens[:20], *ids(11)])
    call(server, "pin", {"token_ids": tokens[:28], "ttl_s": 600})
    part = call(server, "delete_subtree", {"token_ids": tokens[:12]})
    assert part["deleted_block_count"] == 3 + 10
    assert part["blocked_reasons"] == {"pinned": 5}
    assert {b["reason"] for b in part["blocked_blocks"]} == {"pinned"}
    assert len(part["blocked_blocks"]) == part["blocked_block_count"] == 5
    assert call(server, "match", {"token_ids": tokens})["matched_tokens"] == 28
    call(server, "unpin", {"token_ids": tokens[:28]})
    assert call(server, "delete_subtree", {"token_ids": tokens[:12]})["deleted_block_count"] == 5


# Classes and pins.


def test_classes_decide_who_goes_first(servers: Servers) -> None:
    server = servers.start(settings=ON)
    for seed in (20, 21, 22):
        put(server, ids(seed))
    late = call(server, "set_retention", {"token_ids": ids(20)[:4], "retention": 7})
    assert (late["matched"], late["updated_block_count"], late["retention"], late["eviction_priority"]) == (
        True,
        10,
        7,
        -7,
    )
    early = call(server, "set_eviction_priority", {"token_ids": ids(22)[:4], "priority": 3})
    assert (early["updated_block_count"], early["retention"], early["eviction_priority"]) == (10, -3, 3)
    shown = call(server, "inspect", {"token_ids": ids(22)})["path_blocks"]
    assert {(b["retention"], b["eviction_priority"]) for b in shown} == {(-3, 3)}

    def left() -> list[int]:
        return [call(server, "match", {"token_ids": [*ids(seed), 0]})["matched_blocks"] for seed in (20, 21, 22)]

    assert left() == [10, 10, 10]
    for wanted in ([10, 10, 0], [10, 0, 0], [0, 0, 0]):
        asked(server, lambda caches: caches.radix.index.evict(10))
        assert left() == wanted
    never = call(server, "set_eviction_priority", {"token_ids": ids(20), "priority": -1}, 404)
    assert never["error"]["code"] == "prefix_not_found"


def test_pins_hold_until_they_end(servers: Servers) -> None:
    server = servers.start(settings=ON)
    for seed in (23, 24):
        put(server, ids(seed))
    pinned = call(server, "pin", {"token_ids": ids(23), "ttl_s": 0.2})
    assert (pinned["pinned"], pinned["pinned_blocks"], pinned["resident_kv_tokens"]) == (True, 10, 40)
    assert (pinned["pinned_pages"], pinned["max_pinned_pages"]) == (10, int(0.25 * 2048))
    assert 0 < pinned["expires_at"] - time.time() < 1
    asked(server, lambda caches: caches.radix.index.evict(1000))
    assert call(server, "match", {"token_ids": ids(23)})["matched_blocks"] == 9
    assert call(server, "match", {"token_ids": ids(24)})["matched_blocks"] == 0
    server.wait_for(
        lambda: {b["pin_count"] for b in call(server, "inspect", {"token_ids": ids(23)})["path_blocks"]} == {0}
    )
    asked(server, lambda caches: caches.radix.index.evict(1000))
    assert call(server, "match", {"token_ids": ids(23)})["matched_blocks"] == 0


def test_a_second_pin_takes_the_place_of_the_first(server: LiveServer) -> None:
    put(server, ids(25))
    for ttl_s in (600, 300, 900):
        pinned = call(server, "pin", {"token_ids": ids(25), "ttl_s": ttl_s})
        assert abs(pinned["expires_at"] - time.time() - ttl_s) < 10
    assert {b["pin_count"] for b in call(server, "inspect", {"token_ids": ids(25)})["path_blocks"]} == {1}
    ended = call(server, "pin", {"token_ids": ids(25), "ttl_s": 0})
    assert (ended["pinned"], ended["pinned_blocks"], ended["expires_at"], ended["pinned_pages"]) == (False, 0, None, 0)
    assert not call(server, "unpin", {"token_ids": ids(25)})["pinned"]
    assert {b["pin_count"] for b in call(server, "inspect", {"token_ids": ids(25)})["path_blocks"]} == {0}


def test_pins_have_a_limit(servers: Servers) -> None:
    runner = MockRunner(script=say_script, verify=False, num_sequence_pages=81)
    server = servers.start(runner, config=ServerConfig(api_key=("key-a", "key-b", "key-c")), settings=ON)
    for key in ("a", "b", "c"):
        put(server, ids(26, 60), headers=bearer(f"key-{key}"))
        put(server, ids(27), headers=bearer(f"key-{key}"))
    a, b, c = (bearer(f"key-{key}") for key in "abc")
    body = {"token_ids": ids(26, 60), "ttl_s": 600}
    assert call(server, "pin", body, headers=a)["max_pinned_pages"] == 20
    more = refusal(
        server.post(f"{ROOT}/pin", {"token_ids": ids(27), "ttl_s": 600}, headers=a), 409, "pin_quota_exceeded"
    )
    assert "25 pages of this key" in more["message"]
    assert "20 and 40 are allowed" in more["message"]
    call(server, "pin", body, headers=a)  # once more is no more
    call(server, "pin", body, headers=b)
    refusal(server.post(f"{ROOT}/pin", body, headers=c), 409, "pin_quota_exceeded")
    call(server, "unpin", {"token_ids": ids(26, 60)}, headers=b)
    call(server, "pin", body, headers=c)
    for who in (a, c):
        call(server, "unpin", {"token_ids": ids(26, 60)}, headers=who)


# Who sees what.


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_97_keys_do_not_see_each_other(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(api_key=("key-a", "key-b")), settings=ON)
    a, b, tokens = bearer("key-a"), bearer("key-b"), ids(30)
    put(server, tokens, headers=a)
    assert call(server, "match", {"token_ids": tokens}, headers=a)["matched_tokens"] == 36
    for name in ("match", "routing_match"):
        found = call(server, name, {"token_ids": tokens}, headers=b)
        assert (found["matched_tokens"], found["last_block_id"], found["live_blocks"]) == (0, None, 0)
    theirs, never = (call(server, "match", {"token_ids": t}, headers=b)["miss"] for t in (tokens, ids(31)))
    assert theirs["reason"] == never["reason"] == "cold", "nothing tells a guess that is right from one that is not"
    assert not call(server, "inspect", {"token_ids": tokens, "include_subtree": True}, headers=b)["matched"]
    for name in ("delete_subtree", "unpin", *WITH_MORE):
        body = {"token_ids": tokens, **ALL[name]}
        stolen = refusal(server.post(f"{ROOT}/{name}", body, headers=b), 404, "prefix_not_found")
        other = refusal(
            server.post(f"{ROOT}/{name}", {**body, "token_ids": ids(31)}, headers=b), 404, "prefix_not_found"
        )
        assert stolen == other
        refusal(server.post(f"{ROOT}/{name}", body), 401, "invalid_api_key")
    assert put(server, tokens, headers=b)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    call(server, "delete_subtree", {"token_ids": tokens}, headers=b)
    mine = call(server, "match", {"token_ids": tokens}, headers=a)
    assert mine["matched_tokens"] == 36
    blocks = call(server, "inspect", {"token_ids": tokens}, headers=a)["path_blocks"]
    assert {(block["pin_count"], block["retention"]) for block in blocks} == {(0, 0)}


def test_97_conversations_are_those_of_the_key(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(api_key=("key-a", "key-b")), settings=ON)
    first = [{"role": "user", "content": "say:<think>hm</think>what only its owner finds"}]
    shown = {"role": "assistant", "content": "what only its owner finds"}
    later = [*first, shown, {"role": "user", "content": "say:go on"}]
    for salt in ({}, {"cache_salt": "pepper"}):
        answer = server.post(CHAT, {"messages": first, **salt}, headers=bearer("key-a")).json()
        server.wait_quiet()
        mine = call(server, "match", {"messages": later, **salt}, headers=bearer("key-a"))
        assert mine["matched_tokens"] == answer["chain"]["processed_tokens"] // PAGE * PAGE
        theirs = call(server, "match", {"messages": later, **salt}, headers=bearer("key-b"))
        assert (theirs["matched_tokens"], theirs["miss"]["reason"]) == (0, "cold")
        assert theirs["prompt_tokens"] < mine["prompt_tokens"], "the reasoning is not theirs to count"


def test_salts_divide_further(server: LiveServer) -> None:
    tokens = ids(32)
    put(server, tokens, cache_salt="one")
    assert call(server, "match", {"token_ids": tokens, "cache_salt": "one"})["matched_tokens"] == 36
    for salt in ({}, {"cache_salt": "two"}):
        assert call(server, "match", {"token_ids": tokens, **salt})["matched_tokens"] == 0
        refusal(server.post(f"{ROOT}/delete_subtree", {"token_ids": tokens, **salt}), 404, "prefix_not_found")
    talk = {"messages": [{"role": "user", "content": "say:salted"}], "cache_salt": "one", "chain": False}
    server.post(CHAT, talk)
    server.wait_quiet()
    assert call(server, "match", {"chat": talk})["matched_tokens"] > 0, "a request's own salt"
    assert call(server, "match", {"chat": talk, "cache_salt": "two"})["matched_tokens"] == 0
    assert not call(server, "match", {"chat": {**talk, "sparse_method": "window"}})["enabled"]
    refusal(server.post(f"{ROOT}/match", {"chat": {**talk, "model": "no such"}}), 404, "model_not_found")
    long = refusal(server.post(f"{ROOT}/match", {"token_ids": tokens, "cache_salt": "x" * 257}), 400, "invalid_value")
    assert long["param"] == "cache_salt"


# What is refused.


@pytest.mark.parametrize("name", ALL)
def test_selectors_are_checked(server: LiveServer, name: str) -> None:
    def bad(body: dict[str, Any], status: int, code: str) -> dict[str, Any]:
        return refusal(server.post(f"{ROOT}/{name}", {**ALL[name], **body}), status, code)

    bad({}, 400, "invalid_selector")
    both = bad({"token_ids": [1, 2, 3, 4], "text": "x"}, 400, "invalid_selector")
    assert "token_ids and text" in both["message"]
    bad({"text": "x", "prompt": "x"}, 400, "invalid_selector")
    bad(
        {"messages": [{"role": "user", "content": "x"}], "chat": [{"role": "user", "content": "x"}]},
        400,
        "invalid_selector",
    )
    assert bad({"token_ids": []}, 400, "invalid_value")["param"] == "token_ids"
    assert bad({"token_ids": [1, 2, 99_999, 4]}, 400, "invalid_value")["param"].startswith("token_ids")
    for value in ([1, -1], [1, 2**70]):
        assert bad({"token_ids": value}, 400, "invalid_value")["param"].startswith("token_ids")
    for value in ("abc", [1.5], [True], [None], {"a": 1}, 7):
        assert bad({"token_ids": value}, 400, "invalid_type")["param"].startswith("token_ids")
    bad({"token_ids": [1] * 5000}, 400, "context_length_exceeded")
    bad({"text": 5}, 400, "invalid_type")
    for field in ("text", "prompt"):
        assert bad({field: "x" * 200_000}, 400, "context_length_exceeded")["param"] == field
    bad({"messages": []}, 400, "invalid_value")
    bad({"messages": [{"role": "user"}]}, 400, "invalid_value")
    bad({"messages": [5]}, 400, "invalid_type")
    bad({"chat": {}}, 400, "missing_required_parameter")
    bad({"chat": "x"}, 400, "invalid_type")
    tools = [{"type": "function", "function": {"name": "f"}}]
    bad({"chat": {"messages": [{"role": "user", "content": "x"}], "tools": tools}}, 400, "unsupported_parameter")
    bad({"token_ids": [1] * 8, "sparse_method": "no such"}, 400, "invalid_value")
    bad({"messages": [{"role": "user", "content": "x"}], "sparse_method": "no such"}, 400, "invalid_value")
    bad({"token_ids": [1] * 8, "model": "no such"}, 404, "model_not_found")
    response = server.client.post(f"{ROOT}/{name}", content=b"{nonsense")
    refusal(response, 400, "invalid_json")
    refusal(server.client.post(f"{ROOT}/{name}", content=b""), 400, "invalid_json")
    refusal(server.client.post(f"{ROOT}/{name}", content=b"[1]"), 400, "invalid_json")
    refusal(server.get(f"{ROOT}/{name}"), 405, "method_not_allowed")


def test_values_are_checked(server: LiveServer) -> None:
    for name, field, bad in (
        ("set_retention", "retention", [1001, -1001, 10**30, True, 1.5, "1", None]),
        ("set_eviction_priority", "priority", [1001, -1001, -(10**30), True, 1.5, "1", None]),
        ("pin", "ttl_s", [-1, 86_401, 1e300, True, "1", None]),
    ):
        for value in bad:
            response = server.post(f"{ROOT}/{name}", {"token_ids": [1] * 8, field: value})
            assert response.status_code == 400, (name, value, response.text)
            assert response.json()["error"]["param"] == field
        refusal(server.post(f"{ROOT}/{name}", {"token_ids": [1] * 8}), 400, "missing_required_parameter")
    nan = server.client.post(f"{ROOT}/pin", content=b'{"token_ids": [1, 1, 1, 1], "ttl_s": NaN}')
    assert refusal(nan, 400, "invalid_type")["param"] == "ttl_s"
    short = refusal(server.post(f"{ROOT}/delete_subtree", {"token_ids": [1, 2, 3]}), 400, "prefix_too_short")
    assert "one block of 4" in short["message"]


def test_huge_bodies_are_refused(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(max_body_bytes=10_000), settings=ON)
    for name in ALL:
        refusal(server.post(f"{ROOT}/{name}", {"text": "x" * 20_000, **ALL[name]}), 413, "body_too_large")


def test_unknown_fields_are_named(servers: Servers) -> None:
    server = servers.start(settings=ON)
    response = server.post(f"{ROOT}/match", {"token_ids": [1] * 8, "nonsense": 1})
    assert response.headers["X-Sparsejax-Ignored-Fields"] == "nonsense"
    strict = servers.start(config=ServerConfig(strict_requests=True), settings=ON)
    refusal(strict.post(f"{ROOT}/match", {"token_ids": [1] * 8, "nonsense": 1}), 400, "unknown_parameter")


def test_a_dead_engine_is_named(servers: Servers) -> None:
    server = servers.start(settings=ON, check=False)
    put(server, ids(1))
    server.runner.fail("prefill", 1, RuntimeError("device lost"))
    server.post(TEXT, {"prompt": ids(2), "max_tokens": 1})
    server.wait_for(lambda: server.engine.failure is not None)
    for name in ALL:
        response = server.post(f"{ROOT}/{name}", {"token_ids": ids(1), **ALL[name]})
        refusal(response, 500, "engine_dead")


def test_routers_need_not_wait_for_a_step(servers: Servers) -> None:
    server = servers.start(settings=ON)
    put(server, ids(33))
    talk = [{"role": "user", "content": "say:an answer that its chain remembers"}]
    answer = server.post(CHAT, {"messages": talk}).json()
    server.wait_quiet()
    talk += [answer["choices"][0]["message"], {"role": "user", "content": "say:more"}]
    held, go = threading.Event(), threading.Event()

    def hold(caches: Caches) -> None:
        held.set()
        assert go.wait(10)

    waiting = server.engine.consult(hold)
    assert held.wait(5)
    try:
        began = time.monotonic()
        assert call(server, "routing_match", {"token_ids": ids(33)})["matched_tokens"] == 36
        found = call(server, "routing_match", {"messages": talk})
        assert found["matched_tokens"] == answer["chain"]["processed_tokens"] // PAGE * PAGE
        assert time.monotonic() - began < 2
        with pytest.raises(httpx.ReadTimeout):
            server.post(f"{ROOT}/match", {"token_ids": ids(33)}, timeout=0.2)
    finally:
        go.set()
    waiting.result(5)


def test_routing_reads_what_is_being_changed(servers: Servers) -> None:
    """Readers beside the engine's thread find no more than was ever true, while blocks come and go."""
    server = servers.start(settings=ON)
    texts = [ids(seed, 200) for seed in range(40, 48)]
    stop = threading.Event()
    wrong: list[Any] = []

    def read() -> None:
        while not stop.is_set():
            for text in texts:
                found = call(server, "routing_match", {"token_ids": text})
                fits = found["matched_tokens"] % PAGE == 0 and found["matched_tokens"] <= 196
                if not fits or found["resident_kv_tokens"] > found["matched_tokens"]:
                    wrong.append(found)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for round_ in range(12):
        for text in texts[round_ % 3 :: 3]:
            put(server, text)
        asked(server, lambda caches: caches.radix.index.evict(60))
    stop.set()
    for reader in readers:
        reader.join(10)
    assert not wrong
    assert (
        call(server, "routing_match", {"token_ids": texts[0]})["matched_tokens"]
        == call(server, "match", {"token_ids": texts[0]})["matched_tokens"]
    )
