"""/v1/prefix_cache/prune over HTTP: what may be asked for, jobs and their ends, who may see them."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from sparsejax.config import ServerConfig
from sparsejax.mock import MockRunner
from sparsejax.serving.prune import share_of
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import say_script
from tests.serving.test_prefix_cache_api import CHAT, ON, PAGE, ROOT, TEXT, bearer, call, ids, put, refusal

PRUNE = f"{ROOT}/prune"
DROP = {"policy": "drop", "keep_tokens": 0}


@pytest.fixture(scope="module")
def server() -> Any:
    made = Servers()
    yield made.start(settings=ON)
    made.close()


def start(server: LiveServer, body: dict[str, Any], status: int = 202, **options: Any) -> dict[str, Any]:
    response = server.post(PRUNE, body, **options)
    assert response.status_code == status, response.text
    return response.json()


def job(server: LiveServer, prune_id: str, wait_s: float = 0, **options: Any) -> dict[str, Any]:
    response = server.get(f"{PRUNE}/{prune_id}?wait_s={wait_s}", **options)
    assert response.status_code == 200, response.text
    return response.json()


def prune(server: LiveServer, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A whole job that must succeed."""
    done = job(server, start(server, body, **options)["prune_id"], 10, **options)
    assert done["status"] == "completed", done
    return done


def talk(results: int, words: int = 12) -> list[dict[str, Any]]:
    """A conversation with results of tools, which ends with a question."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You look things up."}]
    for i in range(results):
        function = {"name": "search", "arguments": f'{{"n": {i}}}'}
        content = " ".join(f"word{i}x{j}" for j in range(words))
        messages += [
            {"role": "user", "content": f"question {i}"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"call_{i}", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": f"call_{i}", "content": content},
        ]
    return [*messages, {"role": "user", "content": "say:done"}]


# Jobs.


@pytest.mark.parametrize("form", ["ranges", "pair"])
def test_a_range_loses_its_rows_and_is_found_as_before(server: LiveServer, form: str) -> None:
    tokens = ids(160 + len(form), 60)
    put(server, tokens)
    before = call(server, "match", {"token_ids": tokens})
    where = {"ranges": [[8, 32]]} if form == "ranges" else {"range_start": 8, "range_end": 32}
    response = server.post(PRUNE, {"token_ids": tokens, **where, **DROP})
    assert response.status_code == 202
    queued = response.json()
    assert response.headers["Location"] == f"{PRUNE}/{queued['prune_id']}"
    assert (queued["object"], queued["policy"], queued["keep_tokens"]) == ("prefix_cache.prune", "drop", 0)
    assert (queued["range"], queued["ranges"]) == ([8, 32], [[8, 32]])
    assert queued["status"] in ("queued", "running", "completed")
    assert abs(queued["created_at"] - time.time()) < 60
    assert "skipped" not in queued
    done = job(server, queued["prune_id"], 10)
    assert (done["status"], done["error"]) == ("completed", None)
    assert queued["created_at"] <= done["started_at"] <= done["finished_at"]
    result = done["result"]
    assert (result["logical_tokens"], result["retained_tokens"], result["freed_device_slots"]) == (24, 0, 24)
    assert (result["ranges"], result["affected_blocks"], result["quality_degraded"]) == ([[8, 32]], 6, True)
    after = call(server, "match", {"token_ids": tokens})
    assert after["matched_tokens"] == before["matched_tokens"] == 56
    assert before["resident_kv_tokens"] - after["resident_kv_tokens"] == result["freed_device_slots"]
    assert (before["quality_degraded"], after["quality_degraded"]) == (False, True)
    assert call(server, "routing_match", {"token_ids": tokens})["resident_kv_tokens"] == after["resident_kv_tokens"]
    exact = call(server, "match", {"token_ids": tokens, "require_unpruned": True})
    assert (exact["matched_tokens"], exact["quality_degraded"], exact["miss"]["reason"]) == (8, False, "pruned")
    assert call(server, "routing_match", {"token_ids": tokens, "require_unpruned": True})["matched_tokens"] == 8


def test_inspect_shows_what_was_lost_and_what_inherits_it(server: LiveServer) -> None:
    tokens = ids(72, 60)
    put(server, tokens)
    prune(server, {"token_ids": tokens, "ranges": [[8, 16], [24, 40]], **DROP})
    put(server, [*tokens, *ids(73, 8)])
    found = call(server, "inspect", {"token_ids": [*tokens, *ids(73, 8)]})
    blocks = found["path_blocks"]
    assert len(blocks) == found["hit_block_count"] == 17
    assert [b["resident_kv_tokens"] for b in blocks] == [4, 4, 0, 0, 4, 4, 0, 0, 0, 0, *[4] * 7]
    assert found["resident_kv_tokens"] == sum(b["resident_kv_tokens"] for b in blocks) == 68 - 24
    records = [b["prune"] and b["prune"]["range"] for b in blocks]
    assert records == [None, None, *[[8, 16]] * 4, *[[24, 40]] * 11]
    assert [b["quality_degraded"] for b in blocks] == [False, False, *[True] * 15]
    assert blocks[2]["prune"] == {
        "range": [8, 16],
        "policy": "drop",
        "logical_tokens": 8,
        "retained_tokens": 0,
        "quality_degraded": True,
    }
    inside = call(server, "inspect", {"token_ids": tokens[:12]})["path_blocks"]
    assert [b["quality_degraded"] for b in inside] == [False, False, True], "the end of the range is out of sight"
    assert (inside[-1]["resident_kv_tokens"], inside[-1]["prune"]) == (0, None)


@pytest.mark.parametrize("policy", ["snapkv_global", "kvzip_global"])
def test_budgets_keep_whole_pages(server: LiveServer, policy: str) -> None:
    tokens = ids(174 + len(policy), 120)
    put(server, tokens)
    body = {
        "token_ids": tokens,
        "ranges": [[8, 40], [60, 100]],
        "keep_tokens": 27,
        "policy": policy,
        "observation_tokens": 8,
        "score_chunk_size": 16,
        "prev_postfix_size": 4,
        "allow_recompress": False,
    }
    result = prune(server, body)["result"]
    assert (result["logical_tokens"], result["retained_tokens"], result["freed_device_slots"]) == (72, 24, 48)
    found = call(server, "match", {"token_ids": tokens})
    assert (found["matched_tokens"], found["resident_kv_tokens"]) == (116, 116 - 48)
    assert put(server, [*tokens, 1, 2])["usage"]["prompt_tokens_details"]["cached_tokens"] == 120


def test_shares_are_rounded_up_to_blocks(server: LiveServer) -> None:
    assert [share_of(keep, 40, 4) for keep in (0.0, 0.01, 0.1, 0.11, 0.55, 0.999)] == [0, 4, 4, 8, 24, 40]
    assert share_of(0.07, 400, 4) == 28, "0.07 * 400 is a little more than 28 in binary"
    tokens = ids(80, 60)
    put(server, tokens)
    queued = start(server, {"token_ids": tokens, "ranges": [[8, 32]], "keep": 0.4})
    assert (queued["keep_tokens"], queued["policy"]) == (12, "kvzip_global")
    assert job(server, queued["prune_id"], 10)["result"]["retained_tokens"] == 12
    last = start(server, {"token_ids": tokens, "ranges": [[40, 48]], "keep": 0.999})
    assert last["keep_tokens"] == 4, "at least one block goes"
    assert start(server, {"token_ids": tokens, "ranges": [[52, 56]], "keep": 0})["policy"] == "drop"


def test_ranges_may_be_pruned_again(server: LiveServer) -> None:
    tokens = ids(81, 80)
    put(server, tokens)
    prune(server, {"token_ids": tokens, "ranges": [[16, 48]], "keep_tokens": 16, "policy": "kvzip_global"})
    part = server.post(PRUNE, {"token_ids": tokens, "ranges": [[16, 32]], **DROP})
    assert "pruned before" in refusal(part, 400, "invalid_prune")["message"]
    again = prune(server, {"token_ids": tokens, "ranges": [[8, 64]], "allow_recompress": True, **DROP})
    assert (again["result"]["logical_tokens"], again["result"]["freed_device_slots"]) == (56, 40)
    found = call(server, "match", {"token_ids": tokens})
    assert (found["matched_tokens"], found["resident_kv_tokens"]) == (76, 76 - 56)


def test_requests_say_what_they_ran_on(server: LiveServer) -> None:
    tokens = ids(82, 60)
    put(server, tokens)
    prune(server, {"token_ids": tokens, "ranges": [[8, 32]], **DROP})
    degraded = put(server, [*tokens[:56], 9, 9, 9])["usage"]["prompt_tokens_details"]
    assert degraded == {"cached_tokens": 56, "resident_tokens": 56 - 24, "degraded_tokens": 56 - 8}
    exact = put(server, [*tokens[:56], 8, 8, 8], require_unpruned=True)["usage"]["prompt_tokens_details"]
    assert exact == {"cached_tokens": 8, "resident_tokens": 8, "degraded_tokens": 0}


# Messages.


def test_results_of_tools_are_named_by_their_call(servers: Servers) -> None:
    server = servers.start(settings=ON)
    messages = talk(3)
    assert server.post(CHAT, {"messages": messages, "chain": False}).status_code == 200
    server.wait_quiet()
    before = call(server, "match", {"messages": messages})
    wanted = [{"tool_call_id": "call_0", "keep": 0}, {"message": 6, "keep": 0.5}]
    queued = start(server, {"messages": messages, "prune": wanted})
    assert (len(queued["ranges"]), queued["skipped"], queued["policy"]) == (2, [], "kvzip_global")
    tokens = list(server.post("/tokenize", {"messages": messages}).json()["tokens"])
    for (first, stop), index in zip(queued["ranges"], (3, 6), strict=True):
        text = bytes(tokens[first:stop]).decode()
        content = messages[index]["content"]
        assert text in content
        assert len(content) - len(text) < 2 * PAGE, "all whole blocks"
    done = job(server, queued["prune_id"], 10)
    assert done["status"] == "completed", done
    whole, half = (stop - first for first, stop in queued["ranges"])
    assert done["result"]["freed_device_slots"] == whole + half - share_of(0.5, half, PAGE)
    after = call(server, "match", {"messages": messages})
    assert after["matched_tokens"] == before["matched_tokens"]
    assert before["resident_kv_tokens"] - after["resident_kv_tokens"] == done["result"]["freed_device_slots"]


def test_what_has_no_whole_block_is_skipped(server: LiveServer) -> None:
    messages = [
        {"role": "user", "content": "hm"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "a question that is longer than two blocks of tokens"},
        {"role": "user", "content": "say:skip"},
    ]
    server.post(CHAT, {"messages": messages, "chain": False})
    server.wait_quiet()
    everything = [{"message": 0, "keep": 0}, {"message": 1, "keep": 0}, {"message": 2, "keep": 0.99}]
    nothing = start(server, {"messages": messages, "prune": everything}, 200)
    assert (nothing["prune_id"], nothing["status"], nothing["ranges"]) == (None, "completed", [])
    assert nothing["result"]["freed_device_slots"] == 0
    assert [(s["message"], s["reason"]) for s in nothing["skipped"]] == [
        (0, "shorter_than_a_block"),
        (1, "shorter_than_a_block"),
        (2, "nothing_to_drop"),
    ]
    assert [s["tokens"] for s in nothing["skipped"]] == [2, 0, len(messages[2]["content"])]
    some = start(server, {"messages": messages, "prune": [everything[0], {"message": 2, "keep_tokens": 0}]})
    assert ([s["message"] for s in some["skipped"]], len(some["ranges"])) == ([0], 1)
    assert job(server, some["prune_id"], 10)["status"] == "completed"
    rest = start(server, {"messages": messages, "prune": [{"message": 3}, {"message": 0}], "keep": 0})
    assert ([s["message"] for s in rest["skipped"]], rest["policy"]) == ([0], "drop"), (
        "keep is for those without their own"
    )


def test_messages_are_checked(server: LiveServer) -> None:
    messages = talk(1)
    twice = [*messages, messages[3]]

    def bad(entries: Any, param: str | None, code: str = "invalid_value", **fields: Any) -> None:
        body = {"messages": messages, "prune": entries, **fields}
        assert refusal(server.post(PRUNE, body), 400, code)["param"] == param

    bad([], "prune")
    bad([{"keep": 0}], "prune[0]")
    bad([{"message": 1, "tool_call_id": "call_0", "keep": 0}], "prune[0]")
    bad([{"message": 1}], "prune[0].keep", "missing_required_parameter")
    bad([{"message": 1, "keep": 0, "keep_tokens": 0}], "prune[0].keep")
    for keep in (-0.1, 1, 1.5):
        bad([{"message": 3, "keep": 0}, {"message": 1, "keep": keep}], "prune[1].keep")
    bad([{"message": 1, "keep_tokens": -1}], "prune[0].keep_tokens")
    for index in (-1, 5, 2**70):
        bad([{"message": index, "keep": 0}], "prune[0].message")
    bad([{"tool_call_id": "call_9", "keep": 0}], "prune[0].tool_call_id")
    bad([{"tool_call_id": "call_0", "keep": 0}], "prune[0].tool_call_id", messages=twice)
    bad([{"message": 3, "keep": 0}, {"tool_call_id": "call_0", "keep": 0}], "prune[1]")
    bad([{"message": 3, "keep": 0}], "keep_tokens", keep_tokens=4)
    bad([{"message": 3, "keep": 0.5}], "keep_tokens", "invalid_prune", policy="drop")
    for value, param in (("1", "prune[0].message"), (True, "prune[0].message"), (1.0, "prune[0].message")):
        bad([{"message": value, "keep": 0}], param, "invalid_type")
    bad([{"message": 1, "keep": True}], "prune[0].keep", "invalid_type")
    bad([7], "prune[0]", "invalid_type")
    bad([{"message": 1, "keep": 0, "policy": "drop"}], "prune[0]", "invalid_type")
    response = server.post(PRUNE, {"token_ids": ids(1), "prune": [{"message": 1, "keep": 0}]})
    assert refusal(response, 400, "invalid_value")["param"] == "messages"


# Validation: contract test 85.


@pytest.mark.parametrize(
    ("ranges", "code"),
    [
        ([], "invalid_prune"),
        ([[4, 6]], "invalid_prune"),
        ([[5, 8]], "invalid_prune"),
        ([[8, 8]], "invalid_prune"),
        ([[12, 8]], "invalid_prune"),
        ([[-4, 8]], "invalid_prune"),
        ([[8, 64]], "invalid_prune"),
        ([[0, 2**70]], "invalid_prune"),
        ([[4, 16], [12, 20]], "invalid_prune"),
        ([[4, 16], [4, 16]], "invalid_prune"),
        ([[True, 8]], "invalid_type"),
        ([[4.0, 8]], "invalid_type"),
        ([["4", 8]], "invalid_type"),
        ([[4]], "invalid_type"),
        ([[4, 8, 12]], "invalid_type"),
        ([4, 8], "invalid_type"),
        ("4-8", "invalid_type"),
        ([[0, 4]] * 10_001, "invalid_value"),
    ],
)
def test_85_ranges(server: LiveServer, ranges: Any, code: str) -> None:
    put(server, ids(83, 60))
    before = len(server.get(PRUNE).json()["data"])
    error = refusal(server.post(PRUNE, {"token_ids": ids(83, 60), "ranges": ranges, **DROP}), 400, code)
    assert error["param"].startswith("ranges")
    assert len(server.get(PRUNE).json()["data"]) == before, "no state is left behind"
    assert call(server, "match", {"token_ids": ids(83, 60)})["resident_kv_tokens"] == 56


def test_85_touching_ranges_are_one(server: LiveServer) -> None:
    put(server, ids(84, 60))
    done = prune(server, {"token_ids": ids(84, 60), "ranges": [[16, 24], [8, 16]], **DROP})
    assert (done["ranges"], done["range"]) == ([[8, 24]], [8, 24])


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "ranges", "invalid_prune"),
        ({"ranges": [[4, 8]], "range_start": 4, "range_end": 8}, "range_start", "invalid_prune"),
        ({"range_start": 4}, "range_end", "missing_required_parameter"),
        ({"range_end": 4}, "range_start", "missing_required_parameter"),
        ({"range_start": 4, "range_end": 10}, "ranges", "invalid_prune"),
        ({"range_start": True, "range_end": 8}, "range_start", "invalid_type"),
        ({"ranges": [[4, 8]], "keep_tokens": None}, "keep_tokens", "missing_required_parameter"),
        ({"ranges": [[4, 8]], "keep_tokens": 4, "policy": "kvzip_global"}, "keep_tokens", "invalid_prune"),
        ({"ranges": [[4, 8]], "keep_tokens": -1}, "keep_tokens", "invalid_prune"),
        ({"ranges": [[4, 8]], "keep_tokens": 10**30}, "keep_tokens", "invalid_prune"),
        ({"ranges": [[4, 8]], "keep_tokens": True}, "keep_tokens", "invalid_type"),
        ({"ranges": [[4, 8]], "keep_tokens": 1.0}, "keep_tokens", "invalid_type"),
        ({"ranges": [[4, 12]], "keep_tokens": 4, "policy": "drop"}, "keep_tokens", "invalid_prune"),
        ({"ranges": [[4, 8]], "keep": 0.5}, "keep", "invalid_value"),
        ({"ranges": [[4, 8]], "keep_tokens": None, "keep": 1}, "keep", "invalid_value"),
        ({"ranges": [[4, 8]], "keep_tokens": None, "keep": -0.5}, "keep", "invalid_value"),
        ({"ranges": [[4, 8]], "keep_tokens": None, "keep": True}, "keep", "invalid_type"),
        ({"ranges": [[4, 8]], "policy": "best"}, "policy", "invalid_value"),
        ({"ranges": [[4, 8]], "policy": 5}, "policy", "invalid_type"),
        ({"ranges": [[4, 8]], "observation_tokens": 0}, "observation_tokens", "invalid_value"),
        ({"ranges": [[4, 8]], "observation_tokens": True}, "observation_tokens", "invalid_type"),
        ({"ranges": [[4, 8]], "score_chunk_size": 0}, "score_chunk_size", "invalid_value"),
        ({"ranges": [[4, 8]], "score_chunk_size": 2**31}, "score_chunk_size", "invalid_value"),
        ({"ranges": [[4, 8]], "prev_postfix_size": -1}, "prev_postfix_size", "invalid_value"),
        ({"ranges": [[4, 8]], "block_timeout_s": -1}, "block_timeout_s", "invalid_value"),
        ({"ranges": [[4, 8]], "block_timeout_s": 1e6}, "block_timeout_s", "invalid_value"),
        ({"ranges": [[4, 8]], "idempotency_key": ""}, "idempotency_key", "invalid_value"),
        ({"ranges": [[4, 8]], "idempotency_key": "x" * 129}, "idempotency_key", "invalid_value"),
        ({"ranges": [[4, 8]], "recompute": 1}, "recompute", "invalid_type"),
        ({"ranges": [[4, 8]], "allow_recompress": "no"}, "allow_recompress", "invalid_type"),
        ({"ranges": [[4, 8]], "text": "both"}, "text", "invalid_selector"),
    ],
)
def test_85_fields(server: LiveServer, fields: dict[str, Any], param: str, code: str) -> None:
    put(server, ids(85, 60))
    body = {"token_ids": ids(85, 60), "keep_tokens": 0, **fields}
    assert refusal(server.post(PRUNE, body), 400, code)["param"] == param
    assert call(server, "match", {"token_ids": ids(85, 60)})["resident_kv_tokens"] == 56


def test_nan_is_no_share(server: LiveServer) -> None:
    for value in (b"NaN", b"Infinity", b"1e999"):
        body = b'{"token_ids": [1, 2, 3, 4, 5], "ranges": [[0, 4]], "keep": ' + value + b"}"
        assert refusal(server.client.post(PRUNE, content=body), 400, "invalid_type")["param"] == "keep"


def test_what_is_not_there_can_not_be_pruned(server: LiveServer) -> None:
    tokens = ids(86, 60)
    refusal(server.post(PRUNE, {"token_ids": tokens, "ranges": [[8, 16]], **DROP}), 404, "prefix_not_found")
    put(server, tokens[:24])
    refusal(server.post(PRUNE, {"token_ids": tokens, "ranges": [[8, 32]], **DROP}), 404, "prefix_not_found")
    prune(server, {"token_ids": tokens, "ranges": [[8, 24]], **DROP})  # what is behind the ranges need not be there


def test_methods_that_share_nothing(server: LiveServer) -> None:
    body = {"token_ids": ids(85, 60), "ranges": [[8, 16]], **DROP, "sparse_method": "window"}
    response = server.post(PRUNE, body)
    assert response.status_code in (400, 404), response.text
    assert "window" in response.json()["error"]["message"]


# Jobs: long poll, list, cancel.


def busy_chain(servers: Servers, **options: Any) -> tuple[LiveServer, str, threading.Thread]:
    """A server on which a turn of a chain is under way for some seconds."""
    server = servers.start(MockRunner(script=say_script, step_s=0.005, verify=False), settings=ON, **options)
    first = server.post(CHAT, {"messages": [{"role": "user", "content": "say:a first answer"}]}).json()
    server.wait_quiet()
    long = {"messages": [{"role": "user", "content": "say:" + "z" * 400}], "chain_id": first["chain_id"]}
    body = {**long, "chain_append": True, "max_tokens": 400}
    turn = threading.Thread(target=lambda: server.post(CHAT, body))
    turn.start()
    server.wait_for(lambda: server.engine.snapshot.running > 0)
    return server, first["chain_id"], turn


def test_a_job_waits_for_a_turn_of_its_chain(servers: Servers) -> None:
    server, chain_id, turn = busy_chain(servers)
    waits = start(server, {"chain_id": chain_id, "ranges": [[4, 12]], **DROP})
    began = time.monotonic()
    early = job(server, waits["prune_id"], 0.2)
    assert 0.15 < time.monotonic() - began < 1.5
    assert early["status"] in ("queued", "running")
    done = job(server, waits["prune_id"], 30)
    assert done["status"] == "completed", done
    turn.join(10)
    chain = server.get(f"/v1/chains/{chain_id}").json()
    assert chain["retained_tokens"] == chain["processed_tokens"] - 8


def test_a_job_gives_up_after_its_time(servers: Servers) -> None:
    server, chain_id, turn = busy_chain(servers)
    waits = start(server, {"chain_id": chain_id, "ranges": [[4, 12]], **DROP, "block_timeout_s": 0.1})
    over = job(server, waits["prune_id"], 10)
    assert (over["status"], over["result"]) == ("blocked", None)
    assert over["error"]["code"] == "prune_blocked"
    turn.join(10)


def test_a_job_can_be_cancelled_and_watched(servers: Servers) -> None:
    server, chain_id, turn = busy_chain(servers)
    waits = start(server, {"chain_id": chain_id, "ranges": [[4, 12]], **DROP})
    seen: list[Any] = []
    watchers = [threading.Thread(target=lambda: seen.append(job(server, waits["prune_id"], 20))) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    server.wait_for(lambda: server.state.waiting_for_jobs == 3)
    gone = server.client.delete(f"{PRUNE}/{waits['prune_id']}").json()
    assert gone["status"] == "cancelled"
    for watcher in watchers:
        watcher.join(5)
    assert [info["status"] for info in seen] == ["cancelled"] * 3
    assert server.state.waiting_for_jobs == 0
    refusal(server.client.delete(f"{PRUNE}/{waits['prune_id']}"), 409, "prune_conflict")
    turn.join(10)


def test_a_client_that_leaves_waits_no_more(servers: Servers) -> None:
    server, chain_id, turn = busy_chain(servers)
    waits = start(server, {"chain_id": chain_id, "ranges": [[4, 12]], **DROP})
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"GET {PRUNE}/{waits['prune_id']}?wait_s=60 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        server.wait_for(lambda: server.state.waiting_for_jobs == 1)
    server.wait_for(lambda: server.state.waiting_for_jobs == 0)
    assert job(server, waits["prune_id"])["status"] in ("queued", "running")
    server.client.delete(f"{PRUNE}/{waits['prune_id']}")
    turn.join(10)


def test_waiting_clients_hear_that_the_engine_died(servers: Servers) -> None:
    server, chain_id, turn = busy_chain(servers, check=False)
    waits = start(server, {"chain_id": chain_id, "ranges": [[4, 12]], **DROP})
    seen: list[Any] = []
    watcher = threading.Thread(target=lambda: seen.append(server.get(f"{PRUNE}/{waits['prune_id']}?wait_s=30")))
    watcher.start()
    server.wait_for(lambda: server.state.waiting_for_jobs == 1)
    server.runner.fail("decode", 1, RuntimeError("device lost"))
    watcher.join(10)
    refusal(seen[0], 500, "engine_dead")
    turn.join(10)


def test_so_many_may_wait(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsejax.serving.prune.MAX_WAITING", 1)
    server, chain_id, turn = busy_chain(servers)
    waits = start(server, {"chain_id": chain_id, "ranges": [[4, 12]], **DROP})
    watcher = threading.Thread(target=lambda: job(server, waits["prune_id"], 20))
    watcher.start()
    server.wait_for(lambda: server.state.waiting_for_jobs == 1)
    response = server.get(f"{PRUNE}/{waits['prune_id']}?wait_s=5")
    refusal(response, 503, "too_many_waiting")
    assert response.headers["Retry-After"] == "1"
    assert job(server, waits["prune_id"])["status"] in ("queued", "running"), "who does not wait is answered"
    server.client.delete(f"{PRUNE}/{waits['prune_id']}")
    watcher.join(10)
    turn.join(10)


def test_waits_are_bounded(server: LiveServer) -> None:
    put(server, ids(87))
    done = prune(server, {"token_ids": ids(87), "ranges": [[4, 8]], **DROP})
    for bad in ("-1", "61", "nan", "inf", "x", "1e1", "", "9" * 400):
        refused = refusal(server.get(f"{PRUNE}/{done['prune_id']}?wait_s={bad}"), 400, "invalid_value")
        assert refused["param"] == "wait_s"
    for good in ("0", "0.5", "60"):
        assert server.get(f"{PRUNE}/{done['prune_id']}?wait_s={good}").status_code == 200


def test_jobs_are_listed_newest_first(servers: Servers) -> None:
    server = servers.start(settings=ON)
    put(server, ids(88))
    made = [prune(server, {"token_ids": ids(88), "ranges": [[at, at + 4]], **DROP})["prune_id"] for at in (4, 12, 20)]
    listed = server.get(PRUNE).json()
    assert (listed["object"], [info["prune_id"] for info in listed["data"]]) == ("list", made[::-1])
    assert [info["prune_id"] for info in server.get(f"{PRUNE}?limit=2").json()["data"]] == made[:0:-1]
    for bad in ("0", "1001", "x", "-1", "", "9" * 400):
        assert refusal(server.get(f"{PRUNE}?limit={bad}"), 400, "invalid_value")["param"] == "limit"


def test_a_request_that_is_sent_again_is_one_job(server: LiveServer) -> None:
    put(server, ids(89))
    body = {"token_ids": ids(89), "ranges": [[4, 8]], **DROP, "idempotency_key": "once"}
    first = prune(server, body)
    again = start(server, body)
    assert (again["prune_id"], again["status"]) == (first["prune_id"], "completed")


# Who may do what.


def test_97_jobs_belong_to_their_key(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(api_key=("key-a", "key-b")), settings=ON)
    a, b, tokens = bearer("key-a"), bearer("key-b"), ids(90)
    put(server, tokens, headers=a)
    body = {"token_ids": tokens, "ranges": [[4, 8]], **DROP}
    stolen = refusal(server.post(PRUNE, body, headers=b), 404, "prefix_not_found")
    never = refusal(server.post(PRUNE, {**body, "token_ids": ids(91)}, headers=b), 404, "prefix_not_found")
    assert stolen == never
    refusal(server.post(PRUNE, body), 401, "invalid_api_key")
    done = prune(server, {**body, "idempotency_key": "k"}, headers=a)
    for prune_id in (done["prune_id"], "prune_0123456789abcdef01234567"):
        for method in ("GET", "DELETE"):
            refusal(server.client.request(method, f"{PRUNE}/{prune_id}", headers=b), 404, "prune_not_found")
            refusal(server.client.request(method, f"{PRUNE}/{prune_id}"), 401, "invalid_api_key")
    refusal(server.get(f"{PRUNE}/{done['prune_id']}?wait_s=5", headers=b), 404, "prune_not_found")
    assert server.get(PRUNE, headers=b).json()["data"] == []
    assert len(server.get(PRUNE, headers=a).json()["data"]) == 1
    put(server, tokens, headers=b)
    assert call(server, "match", {"token_ids": tokens}, headers=b)["resident_kv_tokens"] == 36
    other = prune(server, {**body, "ranges": [[8, 12]], "idempotency_key": "k"}, headers=b)
    assert other["prune_id"] != done["prune_id"], "keys of one client are nothing to another"
    assert call(server, "match", {"token_ids": tokens}, headers=a)["resident_kv_tokens"] == 32


def test_97_chains_belong_to_their_key(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(api_key=("key-a", "key-b")), settings=ON)
    a, b = bearer("key-a"), bearer("key-b")
    messages = [{"role": "user", "content": "say:nobody else may cut this"}]
    chain_id = server.post(CHAT, {"messages": messages}, headers=a).json()["chain_id"]
    server.wait_quiet()
    body = {"chain_id": chain_id, "ranges": [[4, 8]], **DROP}
    refusal(server.post(PRUNE, body, headers=b), 404, "chain_not_found")
    refusal(server.post(PRUNE, {**body, "messages": messages}, headers=b), 404, "chain_not_found")
    refusal(server.post(PRUNE, {**body, "chain_id": "chain_never"}, headers=a), 404, "chain_not_found")
    refusal(server.post(PRUNE, {**body, "cache_salt": "x"}, headers=a), 409, "chain_fingerprint_mismatch")
    refusal(server.post(PRUNE, {**body, "sparse_method": "window"}, headers=a), 409, "chain_fingerprint_mismatch")
    for bad in ("", "x" * 129):
        assert (
            refusal(server.post(PRUNE, {**body, "chain_id": bad}, headers=a), 400, "invalid_value")["param"]
            == "chain_id"
        )
    assert prune(server, body, headers=a)["result"]["freed_device_slots"] == 4


def test_a_chain_and_messages_name_the_same(servers: Servers) -> None:
    server = servers.start(settings=ON)
    messages = talk(2)
    first = server.post(CHAT, {"messages": messages}).json()
    server.wait_quiet()
    later = [*messages, {"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
    wanted = [{"tool_call_id": "call_0", "keep": 0}]
    done = prune(server, {"messages": later, "prune": wanted, "chain_id": first["chain_id"]})
    freed = done["result"]["freed_device_slots"]
    assert freed > 60
    chain = server.get(f"/v1/chains/{first['chain_id']}").json()
    assert chain["retained_tokens"] == chain["processed_tokens"] - freed
    body = {"messages": [*later, {"role": "user", "content": "say:and on"}], "chain_id": first["chain_id"]}
    turn = server.post(CHAT, body).json()
    assert turn["chain_status"] == "resumed"
    assert turn["choices"][0]["message"]["content"] == "and on"
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] >= chain["processed_tokens"]
    other = [{"role": "user", "content": "say:another talk"}, *messages]
    wrong = server.post(PRUNE, {"messages": other, "prune": [{"message": 4, "keep": 0}], "chain_id": first["chain_id"]})
    refusal(wrong, 409, "chain_prefix_mismatch")


def test_huge_bodies_are_refused(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(max_body_bytes=10_000), settings=ON)
    refusal(server.post(PRUNE, {"text": "x" * 20_000, "ranges": [[0, 4]], **DROP}), 413, "body_too_large")
    for content, code in ((b"", "invalid_json"), (b"{", "invalid_json"), (b"[]", "invalid_json")):
        refusal(server.client.post(PRUNE, content=content), 400, code)
    refusal(server.client.put(PRUNE), 405, "method_not_allowed")


def test_a_dead_engine_is_named(servers: Servers) -> None:
    server = servers.start(settings=ON, check=False)
    put(server, ids(1))
    done = prune(server, {"token_ids": ids(1), "ranges": [[4, 8]], **DROP})
    server.runner.fail("prefill", 1, RuntimeError("device lost"))
    server.post(TEXT, {"prompt": ids(2), "max_tokens": 1})
    server.wait_for(lambda: server.engine.failure is not None)
    refusal(server.post(PRUNE, {"token_ids": ids(1), "ranges": [[8, 12]], **DROP}), 500, "engine_dead")
    for path in (PRUNE, f"{PRUNE}/{done['prune_id']}", f"{PRUNE}/{done['prune_id']}?wait_s=5"):
        refusal(server.get(path), 500, "engine_dead")
    refusal(server.client.delete(f"{PRUNE}/{done['prune_id']}"), 500, "engine_dead")
