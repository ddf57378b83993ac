"""A server's life as a process: listen, load, answer, drain, exit status."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sparsejax import cli, serve
from sparsejax.config import Progress, ServerConfig
from tests.repo.layout import ROOT

CHAT = "/v1/chat/completions"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


class Process:
    """A server on a port of its own."""

    def __init__(self, *argv: str, **environ: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-W", "error", "-m", "tests.serving.mock_server", "--port", str(self.port), *argv]
        environment = {**os.environ, **environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20)

    def wait_for(self, condition: Callable[[httpx.Response], bool]) -> httpx.Response:
        deadline = time.monotonic() + 20
        while True:
            try:
                response = self.client.get("/health")
                if condition(response):
                    return response
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ready(self) -> None:
        self.wait_for(lambda response: response.status_code == 200)

    def end(self, *signals: int) -> tuple[int, str]:
        """Exit status and what was shown, after the signals."""
        for number in signals:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=20)
        self.client.close()
        assert out == ""
        return self.process.returncode, err


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def run(*argv: str, **environ: str) -> Process:
        made.append(Process(*argv, **environ))
        return made[-1]

    yield run
    for one in made:
        one.client.close()
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_normal_life(start: Callable[..., Process], number: int) -> None:
    server = start()
    server.ready()
    answer = server.client.post(CHAT, json=chat("say:hello"))
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    status, shown = server.end(number)
    assert status == 0
    assert shown.splitlines() == [
        f"sparsejax 0.1.0  |  listening on http://127.0.0.1:{server.port}",
        "model     mock, 0 GiB",
        "compile   0/3 programs  decode[0]",
        "compile   1/3 programs  decode[1]",
        "compile   2/3 programs  decode[2]",
        "compile   3/3 programs  decode[3]",
        f"ready     http://127.0.0.1:{server.port}  (metrics /metrics)",
    ]


def test_drain(start: Callable[..., Process]) -> None:
    """Running requests finish, new ones get 503, the exit status is 0."""
    server = start(MOCK_STEP_S="0.005")
    server.ready()
    wanted = "steady " * 25
    texts: list[str] = []

    def read() -> None:
        with httpx.stream(
            "POST", f"http://127.0.0.1:{server.port}{CHAT}", json=chat(f"say:{wanted}", stream=True)
        ) as r:
            events = [line.removeprefix("data: ") for line in r.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
        texts.append("".join(chunks))

    threads = [threading.Thread(target=read) for _ in range(5)]
    for thread in threads:
        thread.start()
    server.wait_for(lambda response: response.json().get("running") == 5)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda response: response.json()["status"] == "draining")
    refused = server.client.post(CHAT, json=chat("say:late"))
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    for thread in threads:
        thread.join()
    assert texts == [wanted] * 5
    status, shown = server.end()
    assert status == 0
    assert "5 requests may finish" in shown


def test_drain_timeout_ends_with_an_error_event(start: Callable[..., Process]) -> None:
    server = start("--drain-timeout-s=0.2", MOCK_STEP_S="0.005")
    server.ready()
    with server.client.stream("POST", CHAT, json=chat("for ever", stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["code"] == "shutting_down"
    assert server.end()[0] == 0


def test_second_signal_stops_at_once(start: Callable[..., Process]) -> None:
    server = start(MOCK_STEP_S="0.005")
    server.ready()
    with server.client.stream("POST", CHAT, json=chat("for ever", stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        began = time.monotonic()
        status, shown = server.end(signal.SIGINT)
    assert status == 1
    assert time.monotonic() - began < 5
    assert "stopping at once" in shown


def test_signal_while_loading(start: Callable[..., Process]) -> None:
    server = start(MOCK_LOAD="slow")
    response = server.wait_for(lambda response: response.json()["progress"]["done"] == 3)
    assert response.status_code == 503
    assert server.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(("load", "shown"), [("refused", "error: --model: no such folder"), ("crash", "a bug")])
def test_failed_load(start: Callable[..., Process], load: str, shown: str) -> None:
    status, text = start(MOCK_LOAD=load).end()
    assert status == 1
    assert shown in text
    assert ("Traceback" in text) == (load == "crash")
    assert "ready" not in text


def test_dead_engine(start: Callable[..., Process]) -> None:
    server = start(MOCK_DIE="3")
    server.ready()
    assert server.client.post(CHAT, json=chat("say:hello")).status_code == 500
    assert server.client.get("/health").status_code == 500
    status, text = server.end()
    assert status == 1
    assert "device lost" in text


def test_unix_socket(start: Callable[..., Process], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    server = start("--uds", str(path))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                break
        time.sleep(0.01)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
        while client.get("/health").status_code != 200:
            assert time.monotonic() < deadline
        assert client.post(CHAT, json=chat("say:hi")).json()["choices"][0]["message"]["content"] == "hi"
    assert server.end(signal.SIGTERM)[0] == 0
    assert not path.exists()


def test_root_path_and_key(start: Callable[..., Process]) -> None:
    server = start("--root-path=/llm", "--api-key=k", "--served-model-name=name")
    server.ready()
    assert server.client.get("/v1/models").status_code == 401
    models = server.client.get("/v1/models", headers={"Authorization": "Bearer k"})
    assert models.json()["data"][0]["id"] == "name"
    assert server.end(signal.SIGTERM)[0] == 0


def test_port_in_use(start: Callable[..., Process]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, text = start("--port", str(port)).end()
    assert status == 1
    assert text == f"error: can't listen on --host 127.0.0.1 --port {port}: Address already in use\n"


def test_explain_loads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tests.serving.mock_server", "--explain", "--page-size=32"]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "page_size 32\n", "")


def test_list_methods(capsys: pytest.CaptureFixture[str]) -> None:
    from sparsejax import registry

    assert serve.main(["--list-methods"]) == 0
    table = capsys.readouterr().out
    for name, entry in registry.available().items():
        assert name in table
        assert entry.summary in table
    for knob in registry.method_params():
        assert f"--{knob.replace('_', '-')}" in table


def test_answers_do_not_wait_for_the_network_buffer() -> None:
    """asyncio turns Nagle's algorithm off only where the protocol is named; with it, each answer takes 40 ms."""
    listener, address = serve._listen(ServerConfig(port=0))
    with listener:
        assert listener.proto == socket.IPPROTO_TCP
        assert address.startswith("http://127.0.0.1:")


def test_progress_on_a_terminal() -> None:
    class Terminal:
        def __init__(self) -> None:
            self.text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            """Nothing is buffered."""

    terminal = Terminal()
    console = cli.Console(terminal)
    console(Progress("model", detail="a fact"))
    for done in range(0, 101, 50):
        console(Progress("load", done, 100, "bytes", "shard"))
    console(Progress("compile", 1, 2, "programs", "decode"))
    console.close()
    assert "model     a fact\n" in terminal.text
    assert "100%" in terminal.text
    assert "1/2" in terminal.text
