"""Many clients at once on a small cache: turns, forks, deletions, moves, and clients that leave. Nothing breaks."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sparsejax.config import ServerConfig
from sparsejax.mock import MockRunner
from sparsejax.settings import EngineSettings
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import say_script
from tests.serving.test_chains import CHAINS, CHAT, say

CLIENTS, OPERATIONS = 10, 25
# Busy, gone, or no room: what clients must be ready for.
EXPECTED = {200, 409, 410, 503}


def client(server: LiveServer, number: int) -> dict[int, int]:
    """One client's life: how often it got each status. What it is answered must be right."""
    rng = random.Random(number)
    headers = {"Authorization": f"Bearer key-{number % 3}"}
    texts = [f"client {number % 5} begins"]  # some share their beginning
    chain_id: str | None = None
    seen: dict[int, int] = {}

    def note(status: int) -> bool:
        seen[status] = seen.get(status, 0) + 1
        assert status in EXPECTED, (number, status)
        return status == 200

    for step in range(OPERATIONS):
        choice = rng.random()
        if chain_id is None or choice < 0.5:
            text = f"answer {number} {step} " + "x" * rng.randrange(30)
            body: dict[str, Any] = {"messages": say(*texts, text), "max_tokens": 200}
            if chain_id and rng.random() < 0.7:
                body["chain_id"] = chain_id
                body["chain_branch"] = rng.choice(["fork", "rewind"])
                if rng.random() < 0.3:
                    body |= {"messages": say(text), "chain_append": True}
            response = server.post(CHAT, body, headers=headers)
            if note(response.status_code):
                answer = response.json()
                assert answer["choices"][0]["message"]["content"] == text
                usage = answer["usage"]
                assert usage["cached_tokens"] + answer["chain"]["prefilled_tokens"] == usage["prompt_tokens"]
                chain_id = answer["chain_id"] if answer["chain"]["state"] == "idle" else None
                texts.append(text)
                if len(texts) > 5:
                    texts, chain_id = texts[:1], None
            else:
                chain_id = None
        elif choice < 0.6:  # leaves in the middle
            body = {"messages": say(*texts, "y" * 150), "max_tokens": 200, "stream": True, "chain_id": chain_id}
            with server.client.stream("POST", CHAT, json=body, headers=headers) as response:
                if note(response.status_code):
                    lines = response.iter_lines()
                    for _ in range(rng.randrange(1, 20)):
                        next(lines, None)
        elif choice < 0.9:
            action = rng.choice(["fork", "checkpoint", "demote", "pin"])
            body = {"ttl_s": rng.choice([0, 0.05])} if action == "pin" else {}
            response = server.post(f"{CHAINS}/{chain_id}/{action}", body, headers=headers)
            if note(response.status_code) and action == "fork":
                chain_id = response.json()["id"]
        elif choice < 0.95:
            note(server.post(f"{CHAINS}/lookup", {"messages": say(*texts, "z")}, headers=headers).status_code)
            note(server.get(CHAINS, headers=headers).status_code)
        else:
            note(server.client.delete(f"{CHAINS}/{chain_id}", headers=headers).status_code)
            chain_id = None
    return seen


@pytest.mark.parametrize("host", [0, 1 << 30])
def test_a_storm_of_clients(servers: Servers, host: int) -> None:
    runner = MockRunner(script=say_script, num_sequence_pages=800, num_rows=4)
    settings = EngineSettings(max_waiting=64, chain_host_bytes=host)
    server = servers.start(runner, ServerConfig(api_key=("key-0", "key-1", "key-2")), settings)
    with ThreadPoolExecutor(CLIENTS) as pool:
        seen = list(pool.map(lambda number: client(server, number), range(CLIENTS)))
    assert server.engine.failure is None
    assert sum(each.get(200, 0) for each in seen) > CLIENTS * OPERATIONS // 2
    server.wait_quiet()
    server.engine.ask(lambda chains: chains.index.check_integrity(deep=True)).result(5)
    server.wait_idle()
