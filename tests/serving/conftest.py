"""A live server on a MockRunner, up in milliseconds."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from sparsejax.caches import Caches
from sparsejax.config import ServerConfig
from sparsejax.engine import Engine
from sparsejax.mock import MockRunner
from sparsejax.serving.app import create_app
from sparsejax.serving.state import Served, ServerState
from sparsejax.settings import EngineSettings
from tests.serving.byte_tokenizer import ByteTokenizer
from tests.serving.mocks import say_script


@dataclasses.dataclass
class LiveServer:
    """An app on a uvicorn of its own, in a thread."""

    url: str
    port: int
    state: ServerState
    engine: Engine
    runner: MockRunner
    client: httpx.Client

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def stream(self, path: str, body: dict[str, Any], **options: Any) -> list[Any]:
        """All events of a stream; the last is "[DONE]" if it came."""
        with self.client.stream("POST", path, json={**body, "stream": True}, **options) as response:
            assert response.status_code == 200, response.read()
            return read_events(response.iter_lines())

    def wait_idle(self, timeout_s: float = 5.0) -> None:
        """Until nothing runs and every page and row is free. Chains are dropped."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            s = self.engine.snapshot
            if not (s.busy or s.running or s.waiting or s.swapped):
                self.drop_chains()
                if self.pages_free():
                    return
            time.sleep(0.002)
        raise AssertionError(f"not idle after {timeout_s} s: {self.engine.snapshot}")

    def wait_quiet(self, timeout_s: float = 5.0) -> None:
        """Until nothing runs. Chains stay."""
        self.wait_for(lambda: not (s := self.engine.snapshot).busy and not s.running + s.waiting + s.swapped, timeout_s)

    def drop_chains(self) -> None:
        """Ends every chain without a turn, and gives up what the prefix cache has that nobody needs."""

        def drop(caches: Caches) -> None:
            chains, blocks = caches.chains.index, caches.radix.index
            for chain in [c for c in chains.chains.values() if not c.busy]:
                chains.drop(chain, "deleted")
            blocks.evict(blocks.num_pages)

        self.engine.consult(drop).result(5.0)

    def pages_free(self) -> bool:
        s = self.engine.snapshot
        return s.free_pages == IDLE_FREE[id(self.engine)] and s.free_rows == self.runner.limits.num_rows

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"still waiting; {self.engine.snapshot}"
            time.sleep(0.002)


IDLE_FREE: dict[int, int] = {}


def read_events(lines: Any) -> list[Any]:
    events: list[Any] = []
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert not line or line.startswith(":"), line
    return events


class Servers:
    """Starts servers and stops them all."""

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []

    def start(
        self,
        runner: MockRunner | None = None,
        config: ServerConfig | None = None,
        settings: EngineSettings | None = None,
        keep_alive_s: float = 15.0,
        check: bool = True,
        send_buffer: int | None = None,
        **served: Any,
    ) -> LiveServer:
        runner = runner or MockRunner(script=say_script, verify=False)
        engine = Engine(runner, settings or EngineSettings(max_waiting=256))
        IDLE_FREE[id(engine)] = engine.snapshot.free_pages
        state = ServerState()
        state.attach(
            Served(
                engine=engine,
                tokenizer=ByteTokenizer(),
                model_names=served.pop("model_names", ("mock",)),
                max_model_len=runner.limits.geometry.max_model_len,
                default_method=next(iter(runner.limits.methods)),
                methods=tuple(runner.limits.methods),
                info={"cache_config": {"page_size": 4}},
                **served,
            )
        )
        url, port, stop = run_app(create_app(state, config, keep_alive_s=keep_alive_s), send_buffer)
        client = httpx.Client(base_url=url, timeout=20.0)
        live = LiveServer(url, port, state, engine, runner, client)

        def shut_down() -> None:
            try:
                runner.release()
                if check and engine.failure is None:
                    live.wait_idle()
            finally:
                client.close()
                engine.close()
                stop()
                state.close()

        self._stops.append(shut_down)
        return live

    def close(self) -> None:
        errors = []
        for stop in reversed(self._stops):
            try:
                stop()
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]


def run_app(app: Any, send_buffer: int | None = None) -> tuple[str, int, Callable[[], None]]:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.001)

    def stop() -> None:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()

    return f"http://127.0.0.1:{port}", port, stop


@pytest.fixture
def servers() -> Iterator[Servers]:
    """Makes servers for one test."""
    made = Servers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    """One server for a module's tests that need no settings of their own."""
    made = Servers()
    yield made.start()
    made.close()
