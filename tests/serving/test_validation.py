"""Malformed requests: each gets a 4xx that names the field, leaves nothing behind, and the next request works."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from sparsejax.config import ServerConfig
from tests.serving.conftest import LiveServer, Servers

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "say:ok"}


def chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": [USER], **fields}


def text(**fields: Any) -> tuple[str, Any]:
    return TEXT, {"prompt": "say:ok", **fields}


def raw(path: str, body: bytes) -> tuple[str, bytes]:
    return path, body


TOO_DEEP = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

# (request, status, param)
CASES: list[tuple[tuple[str, Any], int, str | None]] = [
    # Not JSON, or not an object.
    (raw(CHAT, b""), 400, None),
    (raw(CHAT, b"{"), 400, None),
    (raw(CHAT, b"null"), 400, None),
    (raw(CHAT, b"[]"), 400, None),
    (raw(CHAT, b'"text"'), 400, None),
    (raw(CHAT, b"\xff\xfe{}"), 400, None),
    (raw(CHAT, b'{"messages": "\xe2\x82"}'), 400, None),
    (raw(CHAT, b'{"messages":[{"role":"user","content":"\\ud800"}]}'), 400, None),
    (raw(CHAT, TOO_DEEP), 400, None),
    (raw(TEXT, b'{"prompt": ' + b"[" * 100_000), 400, None),
    (raw(CHAT, b'{"a":' * 50_000 + b"1" + b"}" * 50_000), 400, None),
    # Numbers that JSON does not have, or that are out of range.
    (raw(CHAT, b'{"messages":[],"temperature":NaN}'), 400, "temperature"),
    (raw(CHAT, b'{"messages":[],"temperature":Infinity}'), 400, "temperature"),
    (raw(CHAT, b'{"messages":[],"top_p":-Infinity}'), 400, "top_p"),
    (raw(CHAT, b'{"messages":[],"temperature":1e999}'), 400, "temperature"),
    (raw(CHAT, b'{"messages":[],"logit_bias":{"5":NaN}}'), 400, "logit_bias.5"),
    (chat(temperature=1e308), 400, "temperature"),
    (chat(temperature=-0.1), 400, "temperature"),
    (chat(temperature="0.5"), 400, "temperature"),
    (chat(temperature=True), 400, "temperature"),
    (chat(temperature=[1]), 400, "temperature"),
    (chat(top_p=-1), 400, "top_p"),
    (chat(top_p=0), 400, "top_p"),
    (chat(top_p=1.01), 400, "top_p"),
    (chat(top_k=0.01), 400, "top_k"),
    (chat(top_k=-2), 400, "top_k"),
    (chat(top_k="5"), 400, "top_k"),
    (chat(min_p=-0.5), 400, "min_p"),
    (chat(min_p=2), 400, "min_p"),
    (chat(presence_penalty=3), 400, "presence_penalty"),
    (chat(frequency_penalty=-2.5), 400, "frequency_penalty"),
    (chat(repetition_penalty=0), 400, "repetition_penalty"),
    (chat(repetition_penalty=-1), 400, "repetition_penalty"),
    (chat(max_tokens=0), 400, "max_tokens"),
    (chat(max_tokens=-5), 400, "max_tokens"),
    (chat(max_tokens=1.5), 400, "max_tokens"),
    (chat(max_tokens="many"), 400, "max_tokens"),
    (chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    (chat(max_tokens=3, max_completion_tokens=4), 400, "max_completion_tokens"),
    (chat(min_tokens=-1), 400, "min_tokens"),
    (chat(min_tokens=9, max_tokens=3), 400, "min_tokens"),
    (chat(n=0), 400, "n"),
    (chat(n=-1), 400, "n"),
    (chat(n=129), 400, "n"),
    (chat(n=True), 400, "n"),
    (chat(seed=2**70), 400, "seed"),
    (chat(seed="x"), 400, "seed"),
    (chat(seed=1.5), 400, "seed"),
    # Tokens and strings.
    (chat(logit_bias={"99999999": -100}), 400, "logit_bias"),
    (chat(logit_bias={"-1": 5}), 400, "logit_bias"),
    (chat(logit_bias={"abc": 1}), 400, "logit_bias"),
    (chat(logit_bias={"5": "x"}), 400, "logit_bias"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias"),
    (chat(logit_bias={"٣": 1}), 400, "logit_bias"),
    (chat(logit_bias={str(i % 257): 1 for i in range(257)}), 400, "logit_bias"),
    (chat(logit_bias=[1]), 400, "logit_bias"),
    (chat(stop=5), 400, "stop"),
    (chat(stop=[5]), 400, "stop[0]"),
    (chat(stop=""), 400, "stop"),
    (chat(stop=["x"] * 17), 400, "stop"),
    (chat(stop="x" * 257), 400, "stop"),
    (chat(stop=["x"] * 1_000_000), 400, "stop"),
    (chat(stop_token_ids=[258]), 400, "stop_token_ids"),
    (chat(stop_token_ids=[-1]), 400, "stop_token_ids"),
    (chat(stop_token_ids=["a"]), 400, "stop_token_ids[0]"),
    (chat(stop_token_ids=list(range(17))), 400, "stop_token_ids"),
    (text(prompt=[258]), 400, "prompt"),
    (text(prompt=[-1]), 400, "prompt"),
    (text(prompt=[2**31]), 400, "prompt"),
    (text(prompt=[2**63]), 400, "prompt"),
    (text(prompt=[2**64]), 400, "prompt"),
    (text(prompt=[True]), 400, "prompt[0]"),
    (text(prompt=[1.5]), 400, "prompt[0]"),
    (text(prompt=[[1], [999]]), 400, "prompt[1]"),
    (text(prompt=["a", 1]), 400, "prompt"),
    (text(prompt=["a", [1]]), 400, "prompt"),
    (text(prompt={"a": 1}), 400, "prompt"),
    (text(prompt=5), 400, "prompt"),
    (text(prompt=""), 400, "prompt"),
    (text(prompt=[]), 400, "prompt"),
    (text(prompt=[""]), 400, "prompt"),
    (text(prompt=[[]]), 400, "prompt"),
    (text(prompt=None), 400, "prompt"),
    (text(prompt=["x"] * 1025), 400, "prompt"),
    # Too long for the window.
    (text(prompt="x" * 4096), 400, "prompt"),
    (text(prompt="x" * 1_000_000), 400, "prompt"),
    (text(prompt=[5] * 4096), 400, "prompt"),
    # Messages.
    ((CHAT, {}), 400, "messages"),
    (chat(messages=None), 400, "messages"),
    (chat(messages=[]), 400, "messages"),
    (chat(messages="hi"), 400, "messages"),
    (chat(messages=[5]), 400, "messages[0]"),
    (chat(messages=[{"content": "x"}]), 400, "messages[0].role"),
    (chat(messages=[{"role": 5, "content": "x"}]), 400, "messages[0].role"),
    (chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
    (chat(messages=[USER, {"role": "user", "content": None}]), 400, "messages[1].content"),
    (chat(messages=[{"role": "user", "content": [{"text": "x"}]}]), 400, "messages[0].content[0].type"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages[0].content[0].type",
    ),
    (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, "messages[0].content[0].text"),
    (chat(messages=[USER] * 10_001), 400, "messages"),
    (chat(messages=[{"role": "user", "content": "x" * 4096}]), 400, "prompt"),
    (chat(messages=[{"role": "user", "content": "x" * 1_000_000}]), 400, "messages"),
    (chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 1_000_000}]}]), 400, "messages"),
    (chat(continue_final_message=True), 400, "continue_final_message"),
    (
        chat(
            messages=[USER, {"role": "assistant", "content": "x"}],
            continue_final_message=True,
            add_generation_prompt=True,
        ),
        400,
        "continue_final_message",
    ),
    (chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs"),
    (chat(chat_template_kwargs={"tokenize": False}), 400, "chat_template_kwargs"),
    (chat(chat_template_kwargs={"refuse": True}), 400, "messages"),
    (chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs"),
    (chat(prompt_token_ids=[5]), 400, "prompt_token_ids"),
    ((CHAT, {"prompt_token_ids": [999]}), 400, "prompt_token_ids"),
    ((CHAT, {"prompt_token_ids": []}), 400, "prompt_token_ids"),
    ((CHAT, {"prompt_token_ids": [5] * 4097}), 400, "prompt_token_ids"),
    (text(prompt=[[5], [5] * 100_000]), 400, "prompt"),
    # Log-probabilities.
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs"),
    (chat(top_logprobs=2), 400, "top_logprobs"),
    (chat(logprobs=3), 400, "logprobs"),
    (text(logprobs=21), 400, "logprobs"),
    (text(logprobs=-1), 400, "logprobs"),
    (text(logprobs=True), 400, "logprobs"),
    # What would change the answer and is not there.
    (chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    (chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"), 400, "tools"),
    (chat(tool_choice="required"), 400, "tool_choice"),
    (chat(functions=[{"name": "f"}]), 400, "functions"),
    (chat(function_call={"name": "f"}), 400, "function_call"),
    (chat(response_format={"type": "json_object"}), 400, "response_format"),
    (chat(response_format={}), 400, "response_format"),
    (chat(response_format="text"), 400, "response_format"),
    (chat(modalities=["text", "audio"]), 400, "modalities"),
    (chat(audio={"voice": "x"}), 400, "audio"),
    (chat(web_search_options={}), 400, "web_search_options"),
    (chat(chat_template="{{ lipsum.__globals__ }}"), 400, "chat_template"),
    (chat(store=True), 400, "store"),
    (text(suffix="end"), 400, "suffix"),
    (text(best_of=2), 400, "best_of"),
    (text(echo=True, logprobs=1), 400, "echo"),
    (text(echo=True, max_tokens=0, stream=True), 400, "stream"),
    (text(prompt_logprobs=1), 400, "prompt_logprobs"),
    (text(response_format={"type": "json_schema"}), 400, "response_format"),
    # Model, method, streams.
    (chat(model="gpt-4"), 404, "model"),
    (chat(model=5), 400, "model"),
    (text(model="no/such"), 404, "model"),
    (chat(sparse_method="magic"), 400, "sparse_method"),
    (chat(stream="yes"), 400, "stream"),
    (chat(stream=1), 400, "stream"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (chat(stream=True, stream_options=5), 400, "stream_options"),
    (chat(stream=True, temperature=-1), 400, "temperature"),
    (text(stream=True, prompt="x" * 5000), 400, "prompt"),
    # The other endpoints.
    (("/tokenize", {}), 400, "prompt"),
    (("/tokenize", {"prompt": "x", "messages": [USER]}), 400, "prompt"),
    (("/tokenize", {"prompt": 5}), 400, "prompt"),
    (("/detokenize", {}), 400, "tokens"),
    (("/detokenize", {"tokens": [999]}), 400, "tokens"),
    (("/v1/detokenize", {"tokens": "x"}), 400, "tokens"),
]


def send(server: LiveServer, path: str, body: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.client.post(path, content=content, headers={"Content-Type": "application/json"})


def test_there_are_many_cases() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize(("request_", "status", "param"), CASES, ids=[f"{i}-{c[2]}" for i, c in enumerate(CASES)])
def test_malformed(shared: LiveServer, request_: tuple[str, Any], status: int, param: str | None) -> None:
    response = send(shared, *request_)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["type"] in {"invalid_request_error", "not_found_error"}
    assert error["message"]
    assert len(error["message"]) < 1000
    if param:
        assert param.split("[")[0].split(".")[0] in error["message"], error
    shared.wait_idle()
    good = send(shared, CHAT, {"messages": [USER]})
    assert good.json()["choices"][0]["message"]["content"] == "ok"


def test_a_running_request_is_undisturbed(servers: Servers) -> None:
    server = servers.start()
    wanted = "say:" + "steady " * 40
    with server.client.stream("POST", CHAT, json={"messages": [{**USER, "content": wanted}], "stream": True}) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        for request, status, _ in CASES[:60]:
            assert send(server, *request).status_code == status
        rest = [first, *lines]
    text = "".join(
        chunk["delta"].get("content", "")
        for line in rest
        if line.startswith("data: {")
        for chunk in json.loads(line.removeprefix("data: "))["choices"]
    )
    assert text == "steady " * 40


@pytest.mark.parametrize("top_k", [0, -1, 9_999_999])
def test_top_k_extremes_are_accepted(shared: LiveServer, top_k: int) -> None:
    assert send(shared, *chat(top_k=top_k)).status_code == 200


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-12, None, 2])
def test_temperatures_are_accepted(shared: LiveServer, temperature: float | None) -> None:
    assert send(shared, *chat(temperature=temperature)).status_code == 200


def test_null_means_default(shared: LiveServer) -> None:
    from sparsejax.serving.protocol import ChatBody

    nulls = dict.fromkeys(name for name in ChatBody.__struct_fields__ if name != "messages")
    assert send(shared, *chat(**nulls, some_new_field=None)).status_code == 200


def test_harmless_fields(shared: LiveServer) -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": False,
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "x"},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    response = send(shared, *chat(**fields))
    assert response.status_code == 200, response.text
    assert "x-sparsejax-ignored-fields" not in response.headers


def test_unknown_fields_are_named(shared: LiveServer) -> None:
    body = {"messages": [{**USER, "mood": "good"}], "frobnicate": 1, "evil\r\nX-Injected: 1": 2}
    response = send(shared, CHAT, body)
    assert response.status_code == 200
    assert response.headers["x-sparsejax-ignored-fields"] == "frobnicate, evil??X-Injected??1, messages[].mood"
    assert "x-injected" not in response.headers
    many = send(shared, *chat(**{f"field{i}": 1 for i in range(1000)}))
    assert many.status_code == 200
    assert "and 980 more" in many.headers["x-sparsejax-ignored-fields"]


def test_strict_requests(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(strict_requests=True))
    response = send(server, *chat(frobnicate=1))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "frobnicate"
    assert send(server, *chat(user="u")).status_code == 200
    too_long = send(server, *chat(max_tokens=5000))
    assert too_long.status_code == 400
    assert "4096" in too_long.json()["error"]["message"]
    assert "5000" in too_long.json()["error"]["message"]


def test_prompt_too_long_quotes_both_numbers(shared: LiveServer) -> None:
    error = send(shared, *text(prompt=[5] * 4100)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "4100" in error["message"]
    assert "4096" in error["message"]


def test_body_limit(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(max_body_bytes=100_000))
    response = send(server, TEXT, {"prompt": "x" * 200_000})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"

    # Without Content-Length the bytes are counted.
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    chunks = (b'{"prompt": "' if i == 0 else b"x" * 10_000 for i in range(100))
    try:
        connection.request("POST", TEXT, chunks, {"Content-Type": "application/json"}, encode_chunked=True)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the refusal came while we were still sending
    else:
        assert connection.getresponse().status == 413
    connection.close()
    assert send(server, *chat()).status_code == 200


def test_not_found_and_wrong_method(shared: LiveServer) -> None:
    response = shared.get("/v1/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    response = shared.get(CHAT)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert "POST" in response.headers["allow"]
    assert shared.get("/v1/models/none").status_code == 404


@pytest.mark.parametrize("messages", [[1], {"a": 1}, "x", 7])
def test_fields_that_a_body_does_not_have_may_be_anything(shared: LiveServer, messages: Any) -> None:
    response = shared.post("/detokenize", {"tokens": [65], "messages": messages})
    assert (response.status_code, response.headers["X-Sparsejax-Ignored-Fields"]) == (200, "messages")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "r" * 100_000, "content": "x"}]}),
        (CHAT, {"messages": [USER], "tool_choice": "t" * 100_000}),
        (CHAT, {"messages": [USER], "model": "m" * 100_000}),
        ("/v1/prefix_cache/prune", {"messages": [USER], "prune": [{"tool_call_id": "c" * 100_000, "keep": 0}]}),
        ("/v1/prefix_cache/prune", {"messages": [USER], "prune": [{"message": 0, "k" * 100_000: 0}]}),
        ("/v1/chains/chain_" + "c" * 6000, None),
        ("/v1/prefix_cache/prune/" + "p" * 6000, None),
        ("/" + "n" * 6000, None),
    ],
    ids=range(8),
)
def test_what_was_sent_is_not_sent_back_whole(shared: LiveServer, path: str, body: Any) -> None:
    response = shared.get(path) if body is None else shared.post(path, body)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"]
    assert len(response.text) < 9000
