"""Whole answers and streams over HTTP: shapes, equality of the two, logprobs, stops, ids."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sparsejax.mock import MockRunner
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import say_script

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "mock", "messages": [{"role": "user", "content": text}], **fields}


def joined(path: str, events: list[Any]) -> dict[int, dict[str, Any]]:
    """Choices put together from the chunks of a stream."""
    assert events[-1] == "[DONE]"
    assert "[DONE]" not in events[:-1]
    choices: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        assert "error" not in event, event
        for chunk in event["choices"]:
            choice = choices.setdefault(chunk["index"], {"text": "", "ids": [], "logprobs": [], "finish": []})
            choice["text"] += chunk["delta"].get("content", "") if path == CHAT else chunk["text"]
            choice["ids"] += chunk.get("token_ids", [])
            if chunk["logprobs"] is not None:
                choice["logprobs"].append(chunk["logprobs"])
            if chunk["finish_reason"] is not None:
                choice["finish"].append((chunk["finish_reason"], chunk["stop_reason"]))
    return choices


def merged_logprobs(path: str, parts: list[dict[str, Any]]) -> Any:
    if not parts:
        return None
    if path == CHAT:
        return {"content": [entry for part in parts for entry in part["content"]], "refusal": None}
    out: dict[str, Any] = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        out[name] = None if values[0] is None else [item for value in values for item in value]
    return out


def test_chat_shape(shared: LiveServer) -> None:
    answer = shared.post(CHAT, chat_body("say:Hello", return_token_ids=True)).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "mock"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["logprobs"] is None
    assert choice["token_ids"] == [*b"Hello", 257]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "resident_tokens": 0, "degraded_tokens": 0}
    cost = answer["sparsejax"]
    assert cost["method"] == "dense"
    assert cost["seen_tokens"] == usage["prompt_tokens"] + 5
    assert cost["ttft_s"] > 0
    assert cost["resident_tokens"] > 0


def test_text_shape(shared: LiveServer) -> None:
    answer = shared.post(TEXT, {"model": "mock", "prompt": "say:Hello"}).json()
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}


def test_default_max_tokens(shared: LiveServer) -> None:
    assert shared.post(TEXT, {"prompt": "x"}).json()["usage"]["completion_tokens"] == 16
    assert shared.post(TEXT, {"prompt": "x", "max_tokens": None}).json()["usage"]["completion_tokens"] == 16


def test_max_tokens_is_clamped_to_the_window(shared: LiveServer) -> None:
    for huge in (4096, 2**31, 2**63):
        answer = shared.post(TEXT, {"prompt": "say:hi", "max_tokens": huge})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "hi"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_stream_equals_whole(shared: LiveServer, path: str) -> None:
    rng = random.Random(7)
    pieces = ["a", "bc", " ", "é", "日本", "👩‍👩‍👧", "हिन्दी", "ไทย", "ďábelské", "end", "STOP"]
    for number in range(20):
        text = "say:" + "".join(rng.choice(pieces) for _ in range(rng.randint(0, 12)))
        fields: dict[str, Any] = {
            "max_tokens": rng.choice([1, 2, 5, 9, 200]),
            "stop": rng.choice([None, "STOP", ["nd", "日"], ["bc ", "é"]]),
            "include_stop_str_in_output": rng.choice([True, False]),
            "skip_special_tokens": rng.choice([True, False]),
            "return_token_ids": True,
            "seed": 3,
            "n": rng.choice([1, 3]),
        }
        if path == CHAT:
            body = chat_body(text, **fields) | rng.choice(
                [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}]
            )
        else:
            body = {"prompt": text, **fields} | rng.choice([{}, {"logprobs": 0}, {"logprobs": 3}])
            if "logprobs" not in body:
                body |= {"echo": rng.choice([True, False])}
        whole = shared.post(path, body | {"cache_salt": f"whole {number}"}).json()
        pieces_of = body | {"cache_salt": f"stream {number}"}  # so that neither begins with rows of the other
        events = shared.stream(path, pieces_of | {"stream_options": {"include_usage": True}})
        streamed = joined(path, events)
        assert len(streamed) == len(whole["choices"]) == fields["n"]
        for choice in whole["choices"]:
            got = streamed[choice["index"]]
            assert got["text"] == (choice["message"]["content"] if path == CHAT else choice["text"]), body
            assert got["ids"] == choice["token_ids"]
            assert got["finish"] == [(choice["finish_reason"], choice["stop_reason"])]
            assert merged_logprobs(path, got["logprobs"]) == choice["logprobs"]
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in events[:-2])


def test_stop_string_over_tokens(shared: LiveServer) -> None:
    for stop in ("beta gamma", "own fox", "GHIJ"):
        text = f"The quick br{stop} jumps"
        answer = shared.post(CHAT, chat_body(f"say:{text}", stop=stop)).json()
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "The quick br"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        kept = shared.post(CHAT, chat_body(f"say:{text}", stop=stop, include_stop_str_in_output=True)).json()
        assert kept["choices"][0]["message"]["content"] == f"The quick br{stop}"
        # Tokens after the stop string are not counted, however far the engine ran ahead.
        assert answer["usage"]["completion_tokens"] == len(f"The quick br{stop}")


def test_a_stop_string_stops_the_engine(servers: Servers) -> None:
    server = servers.start(MockRunner(script=say_script, step_s=0.002, verify=False))
    body = chat_body("say:first, " + "and on " * 100, stop=",")
    assert server.post(CHAT, body).json()["choices"][0]["message"]["content"] == "first"
    server.wait_idle()
    assert server.engine.metrics.generation_tokens.value() < 100


def test_stop_token_ids(shared: LiveServer) -> None:
    answer = shared.post(CHAT, chat_body("say:ab.cd", stop_token_ids=[ord(".")])).json()["choices"][0]
    assert answer["message"]["content"] == "ab"
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", ord("."))


def test_ignore_eos_and_min_tokens(shared: LiveServer) -> None:
    answer = shared.post(CHAT, chat_body("say:ab", ignore_eos=True, max_tokens=9)).json()
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = shared.post(CHAT, chat_body("say:ab", min_tokens=6, max_tokens=20)).json()
    assert answer["usage"]["completion_tokens"] > 6


def test_character_cut_by_max_tokens(shared: LiveServer) -> None:
    answer = shared.post(CHAT, chat_body("say:aé", max_tokens=2)).json()["choices"][0]
    assert answer["message"]["content"] == "a\ufffd"
    text = joined(CHAT, shared.stream(CHAT, chat_body("say:aé", max_tokens=2)))[0]["text"]
    assert text == "a\ufffd"


def test_no_chunk_splits_a_character(shared: LiveServer) -> None:
    events = shared.stream(CHAT, chat_body("say:日本語 👩‍👩‍👧 ไทย"))
    for event in events[:-1]:
        for chunk in event["choices"]:
            assert "\ufffd" not in chunk["delta"].get("content", "")
    assert joined(CHAT, events)[0]["text"] == "日本語 👩‍👩‍👧 ไทย"


def test_chat_logprobs_shape(shared: LiveServer) -> None:
    answer = shared.post(CHAT, chat_body("say:né", logprobs=True, top_logprobs=3)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == 4
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        assert all(set(top) == {"token", "logprob", "bytes"} for top in entry["top_logprobs"])
    text = answer["choices"][0]["message"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"] or []).decode() == text == "né"
    assert content[-1]["bytes"] is None
    alone = shared.post(CHAT, chat_body("say:né", logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in alone)


def test_text_logprobs_shape(shared: LiveServer) -> None:
    choice = shared.post(TEXT, {"prompt": "say:né", "logprobs": 2}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["tokens"] == ["n", "bytes:\\xc3", "bytes:\\xa9", "<eos>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_several_prompts_and_choices(shared: LiveServer) -> None:
    body = {"prompt": ["say:one", "say:two", "say:three"], "n": 2, "best_of": 2}
    whole = shared.post(TEXT, body).json()
    assert [c["text"] for c in whole["choices"]] == ["one", "one", "two", "two", "three", "three"]
    assert [c["index"] for c in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == len("say:onesay:twosay:three")
    streamed = joined(TEXT, shared.stream(TEXT, body))
    assert [streamed[i]["text"] for i in range(6)] == ["one", "one", "two", "two", "three", "three"]


def test_token_ids_in(shared: LiveServer) -> None:
    ids = list(b"say:ids")
    assert shared.post(TEXT, {"prompt": ids}).json()["choices"][0]["text"] == "ids"
    both = shared.post(TEXT, {"prompt": [ids, list(b"say:more")], "return_token_ids": True}).json()["choices"]
    assert [c["text"] for c in both] == ["ids", "more"]
    assert both[0]["prompt_token_ids"] == ids
    chat = shared.post(CHAT, {"prompt_token_ids": ids, "return_token_ids": True}).json()
    assert chat["choices"][0]["message"]["content"] == "ids"
    assert chat["prompt_token_ids"] == ids


def test_echo(shared: LiveServer) -> None:
    assert shared.post(TEXT, {"prompt": "say:x", "echo": True}).json()["choices"][0]["text"] == "say:xx"
    only = shared.post(TEXT, {"prompt": "say:x", "echo": True, "max_tokens": 0}).json()
    assert only["choices"][0]["text"] == "say:x"
    assert only["usage"]["completion_tokens"] == 0


def test_choices_differ_and_repeat(shared: LiveServer) -> None:
    body = chat_body("free", n=3, max_tokens=24, seed=-2)
    first = [c["message"]["content"] for c in shared.post(CHAT, body).json()["choices"]]
    again = [c["message"]["content"] for c in shared.post(CHAT, body).json()["choices"]]
    assert first == again
    assert len(set(first)) == 3
    unseeded = chat_body("free", max_tokens=24)
    texts = {shared.post(CHAT, unseeded).json()["choices"][0]["message"]["content"] for _ in range(4)}
    assert len(texts) == 4


def test_continue_final_message(shared: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "say:on"}]
    answer = shared.post(CHAT, {"messages": messages, "continue_final_message": True}).json()
    assert answer["choices"][0]["message"]["content"] == "on"


def test_content_parts_and_tool_history(shared: LiveServer) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "say:"}, {"type": "text", "text": "parts"}]},
    ]
    assert shared.post(CHAT, {"messages": messages}).json()["choices"][0]["message"]["content"] == "parts"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
    messages = [
        {"role": "user", "content": "use f"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "say:done"},
    ]
    assert shared.post(CHAT, {"messages": messages}).json()["choices"][0]["message"]["content"] == "done"


def test_continuous_usage(shared: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = shared.stream(CHAT, chat_body("say:abc", stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_what_is_not_known_yet_is_not_told(servers: Servers) -> None:
    live = servers.start()
    body = {"prompt": ["say:abcdefgh", "say:ab"], "n": 2, "chain": False, "max_tokens": 9}
    warm = live.post(TEXT, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = live.stream(TEXT, {**body, "stream_options": options})[:-1]
    told = [event["usage"]["prompt_tokens_details"] for event in events]
    assert told[0] is None
    known = [details["cached_tokens"] for details in told if details is not None]
    assert known
    assert set(known) == {known[-1]}
    assert known[-1] > warm


def test_sparse_method_per_request(shared: LiveServer) -> None:
    answer = shared.post(CHAT, chat_body("say:" + "x" * 60, sparse_method="window", max_tokens=70)).json()
    cost = answer["sparsejax"]
    assert cost["method"] == "window"
    assert cost["resident_tokens"] < cost["seen_tokens"]
