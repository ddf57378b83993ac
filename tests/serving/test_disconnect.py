"""Clients that leave, stall, or are told of an error half-way: nothing stays behind."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sparsejax.mock import MockRunner
from sparsejax.settings import EngineSettings
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import POISON, say_script

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 4000, **fields}


def slow_runner(**options: Any) -> MockRunner:
    """So slow that a request to max_tokens takes far longer than a test."""
    return MockRunner(script=say_script, step_s=0.005, verify=False, **options)


Dial = Callable[[LiveServer, dict[str, Any]], socket.socket]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Sends a request on a raw socket; what is still open at the end of the test is closed then."""
    connections = []

    def send(server: LiveServer, fields: dict[str, Any]) -> socket.socket:
        content = json.dumps(fields).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        connections.append(connection)
        connection.sendall(head.encode() + content)
        return connection

    yield send
    for connection in connections:
        connection.close()


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    received = b""
    while wanted not in received:
        data = connection.recv(1 << 20)
        assert data, received[-2000:]
        received += data
    return received


def kill(connection: socket.socket) -> None:
    """Closes with a reset, as a killed process does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_mid_answer_frees_the_pages(servers: Servers, dial: Dial, stream: bool, n: int, reset: bool) -> None:
    server = servers.start(slow_runner())
    connection = dial(server, body(stream=stream, n=n))
    server.wait_for(lambda: server.engine.snapshot.running == n)
    if stream:
        read_until(connection, b"data: ")
    assert not server.pages_free()
    kill(connection) if reset else connection.close()
    server.wait_idle(2.0)
    assert server.state.active_requests == 0


def test_leaving_while_queued(servers: Servers, dial: Dial) -> None:
    server = servers.start(slow_runner(num_rows=1))
    first = dial(server, body(stream=True))
    server.wait_for(lambda: server.engine.snapshot.running == 1)
    queued = [dial(server, body(stream=bool(i % 2))) for i in range(20)]
    server.wait_for(lambda: server.engine.snapshot.waiting == 20)
    for connection in queued:
        kill(connection)
    server.wait_for(lambda: server.engine.snapshot.waiting == 0)
    assert server.engine.snapshot.running == 1
    kill(first)
    server.wait_idle(2.0)


def test_leaving_during_prefill(servers: Servers, dial: Dial) -> None:
    runner = slow_runner()
    server = servers.start(runner)
    runner.hold()
    connection = dial(server, body(stream=True))
    server.wait_for(lambda: runner.calls.get("prefill", 0) >= 1)
    kill(connection)
    time.sleep(0.05)
    runner.release()
    server.wait_idle(2.0)


def test_leaving_before_the_body_is_complete(shared: LiveServer) -> None:
    connection = socket.create_connection(("127.0.0.1", shared.port), timeout=10)
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{{".encode())
    time.sleep(0.05)
    kill(connection)
    assert shared.get("/health").status_code == 200


def test_many_leave_at_random(servers: Servers, dial: Dial) -> None:
    server = servers.start(slow_runner())
    connections = [dial(server, body(stream=bool(i % 3))) for i in range(40)]
    for i, connection in enumerate(connections):
        if i % 4 == 0:
            time.sleep(0.003)
        kill(connection)
    server.wait_for(lambda: server.state.active_requests == 0)
    server.wait_idle(3.0)
    good = server.post(CHAT, {"messages": [{"role": "user", "content": "say:fine"}]})
    assert good.json()["choices"][0]["message"]["content"] == "fine"


def test_client_that_never_reads(servers: Servers, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsejax.serving.generation.MAX_PENDING_EVENTS", 50)
    server = servers.start(send_buffer=4096)
    connection = dial(server, body(stream=True, n=2, logprobs=True, top_logprobs=20))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    server.wait_for(lambda: server.engine.snapshot.running == 2)
    # The socket's buffers fill up, then the events pile up, then the request is cancelled.
    server.wait_idle(10.0)
    assert b"[DONE]" not in read_until(connection, b'"code":"interrupted"')


def test_keep_alive_comments(servers: Servers, dial: Dial) -> None:
    runner = slow_runner()
    server = servers.start(runner, keep_alive_s=0.05)
    runner.hold()
    connection = dial(server, body(stream=True, max_tokens=3))
    assert read_until(connection, b": keep-alive\n\n").startswith(b"HTTP/1.1 200")
    read_until(connection, b": keep-alive\n\n")
    runner.release()
    read_until(connection, b"[DONE]")


def test_deadline_header(servers: Servers) -> None:
    server = servers.start(slow_runner())
    headers = {"X-Request-Timeout": "0.1"}
    response = server.post(CHAT, body(), headers=headers)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "deadline_exceeded"
    server.wait_idle(2.0)
    with server.client.stream("POST", CHAT, json=body(stream=True), headers=headers) as stream:
        assert stream.status_code == 200
        events = [line for line in stream.iter_lines() if line.startswith("data: ")]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    server.wait_idle(2.0)
    quick = {"messages": [{"role": "user", "content": "say:quick"}]}
    assert server.post(CHAT, quick, headers={"X-Request-Timeout": "20"}).status_code == 200
    for wrong in ("0", "-1", "nan", "inf", "soon"):
        response = server.post(CHAT, quick, headers={"X-Request-Timeout": wrong})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "X-Request-Timeout"


def lines_of(server: LiveServer, fields: dict[str, Any]) -> Iterator[str]:
    with server.client.stream("POST", CHAT, json={**fields, "stream": True}) as response:
        yield str(response.status_code)
        yield from response.iter_lines()


def test_error_before_the_stream_keeps_its_status(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    runner = slow_runner()
    runner.poison(POISON)
    server = servers.start(runner)
    bad = {"messages": [{"role": "user", "content": "!"}]}
    for stream in (True, False):
        response = server.post(CHAT, {**bad, "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
    assert "non-finite" not in response.text
    assert "non-finite" in caplog.text
    server.wait_idle()


def test_error_after_the_stream_began_is_an_event(servers: Servers) -> None:
    runner = slow_runner()
    runner.poison(POISON)
    server = servers.start(runner)
    lines = list(lines_of(server, {"messages": [{"role": "user", "content": "say:abcdefQxyz"}]}))
    assert lines[0] == "200"
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert sum("error" in event for event in events) == 1
    assert events[-1]["error"]["type"] == "server_error"
    text = "".join(c["delta"].get("content", "") for e in events[:-1] for c in e["choices"])
    assert text
    assert "abcdef!".startswith(text)
    assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"])
    server.wait_idle()


def test_one_choice_fails_all_end(servers: Servers) -> None:
    runner = MockRunner(script=say_script, verify=False)
    runner.poison(POISON)
    server = servers.start(runner)
    body = {"prompt": ["say:fine " + "x" * 50, "say:badQ " + "y" * 50], "max_tokens": 60}
    response = server.post("/v1/completions", body)
    assert response.status_code == 500
    server.wait_idle()


def test_refused_prompt_cancels_its_siblings(servers: Servers, dial: Dial) -> None:
    server = servers.start(slow_runner(num_rows=2), settings=EngineSettings(max_waiting=2))
    hold = [dial(server, body(stream=True)) for _ in range(2)]
    server.wait_for(lambda: server.engine.snapshot.running == 2)
    response = server.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 3000})
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) >= 1
    server.wait_for(lambda: server.engine.snapshot.waiting == 0)
    for connection in hold:
        kill(connection)
    server.wait_idle(2.0)


def test_queue_timeout_is_a_503(servers: Servers, dial: Dial) -> None:
    server = servers.start(slow_runner(num_rows=1), settings=EngineSettings(queue_timeout_s=0.1))
    first = dial(server, body(stream=True))
    server.wait_for(lambda: server.engine.snapshot.running == 1)
    response = server.post(CHAT, body(stream=True))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_timeout"
    kill(first)
    server.wait_idle(2.0)
