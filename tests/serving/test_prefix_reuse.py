"""What requests that begin alike share over HTTP and in `LLM`, who shares with whom, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sparsejax import cli
from sparsejax.config import ServerConfig
from sparsejax.engine import Engine
from sparsejax.llm import LLM
from sparsejax.mock import MockMethod, MockRunner
from sparsejax.request import ChainOptions, PrefixOptions, SamplingParams
from sparsejax.serve import serve_built
from sparsejax.settings import EngineSettings
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import MockBuilt, say_script

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PAGE = 4


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    made = Servers()
    yield made.start()
    made.close()


def ids(seed: int, n: int = 40) -> list[int]:
    return [(seed * 37 + i * 11 + (i * seed) % 13) % 250 for i in range(n)]


def post(server: LiveServer, body: dict[str, Any], path: str = TEXT, key: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = server.post(path, {"max_tokens": 2, **body}, headers=headers)
    assert response.status_code == 200, response.text
    return response


def cached(response: httpx.Response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_every_kind_of_request_shares(server: LiveServer) -> None:
    prompt = ids(1)
    assert cached(post(server, {"prompt": prompt, "chain": False})) == 0
    assert cached(post(server, {"prompt": prompt, "chain": False})) == 36
    assert cached(post(server, {"prompt": [*prompt, 7]})) == 40, "a new chain too"
    assert cached(post(server, {"prompt": [*prompt, 8, 1], "n": 3})) == 40
    assert cached(post(server, {"prompt": [[*prompt, 9], [*prompt, 10]]})) == 80
    assert cached(post(server, {"prompt": [*prompt, 11], "echo": True})) == 40
    messages = [{"role": "system", "content": "You are brief. " * 9}, {"role": "user", "content": "say:a"}]
    first = post(server, {"messages": messages, "chain": False}, CHAT).json()["usage"]["prompt_tokens"]
    again = post(server, {"messages": messages, "n": 2}, CHAT)
    assert cached(again) == (first - 1) // PAGE * PAGE
    other = [messages[0], {"role": "user", "content": "say:b"}]
    assert cached(post(server, {"messages": other, "chain": False}, CHAT)) >= 9 * len("You are brief. ")
    server.wait_idle()


def test_salts_and_methods_share_nothing(servers: Servers) -> None:
    methods = (MockMethod("dense"), MockMethod("selects", selects=True), MockMethod("window", window=24, interval=8))
    server = servers.start(MockRunner(methods=methods, script=say_script, verify=False))
    body = {"prompt": ids(2), "chain": False}
    post(server, body)
    for other in ({"cache_salt": "s"}, {"sparse_method": "selects"}):
        response = post(server, body | other)
        assert cached(response) == 0
        word = "salt" if "cache_salt" in other else "method"
        assert response.json()["sparsejax"]["cache_miss"]["reason"] == word
        assert cached(post(server, body | other)) == 36
    for _ in range(2):
        evicts = post(server, body | {"sparse_method": "window"})
        assert cached(evicts) == 0
        assert evicts.json()["sparsejax"]["cache_miss"]["reason"] == "method"
        assert "window" in evicts.json()["sparsejax"]["cache_miss"]["detail"]


def test_97_keys_share_nothing(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(api_key=("key-a", "key-b")))
    for seed, fields in enumerate(({"chain": False}, {}, {"n": 2})):
        prompt = {"prompt": ids(seed + 20), **fields}
        post(server, prompt, key="key-a")
        other = post(server, prompt, key="key-b")
        assert cached(other) == 0
        miss = other.json()["sparsejax"]["cache_miss"]
        assert miss["reason"] == "cold" or miss["token"] == 0, "not a word of the other key's texts"
        assert cached(post(server, prompt, key="key-b")) >= 36
    server.client.headers["Authorization"] = "Bearer key-a"


def test_headers_and_misses_without_a_chain(server: LiveServer) -> None:
    prompt = ids(5)
    first = post(server, {"prompt": prompt, "chain": False})
    assert first.headers["x-sparsejax-cached-tokens"] == "0"
    assert first.headers["x-sparsejax-cache-miss"].partition(";")[0] in ("cold", "diverged")
    assert "x-sparsejax-chain-id" not in first.headers
    again = post(server, {"prompt": prompt, "chain": False})
    assert again.headers["x-sparsejax-cached-tokens"] == "36"
    assert again.headers["x-sparsejax-retained-fraction"] == "1.0000"
    assert "x-sparsejax-cache-miss" not in again.headers
    assert again.json()["sparsejax"]["cache_miss"] is None
    other = post(server, {"prompt": [*prompt[:22], 251, *ids(6)], "chain": False})
    assert other.headers["x-sparsejax-cached-tokens"] == "20"
    assert other.headers["x-sparsejax-cache-miss"] == "diverged; token=22"
    miss = other.json()["sparsejax"]["cache_miss"]
    assert (miss["reason"], miss["token"], miss["message"]) == ("diverged", 22, None)
    fields = {"prompt": [*prompt, 3], "chain": False, "max_tokens": 2, "stream_options": {"include_usage": True}}
    *_, last, done = server.stream(TEXT, fields)
    assert done == "[DONE]"
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 40, "resident_tokens": 40, "degraded_tokens": 0}
    assert last["sparsejax"]["cache_miss"] is None


def test_the_first_header_of_a_chain_is_exact(server: LiveServer) -> None:
    prompt = ids(7)
    post(server, {"prompt": prompt, "chain": False})
    with server.client.stream("POST", TEXT, json={"prompt": [*prompt, 3], "max_tokens": 2, "stream": True}) as response:
        assert response.headers["x-sparsejax-chain-status"] == "created"
        assert response.headers["x-sparsejax-cached-tokens"] == "40"
        response.read()


def test_lookups_see_what_a_turn_would_reuse(server: LiveServer) -> None:
    prompt = ids(30)
    post(server, {"prompt": prompt, "chain": False})
    wanted = [*prompt, 3]
    found = server.post("/v1/chains/lookup", {"token_ids": wanted}).json()
    assert (found["reused_tokens"], found["retained_tokens"], found["restored_from"]) == (40, 40, "device")
    turn = post(server, {"prompt": wanted}).json()
    assert turn["chain"]["reused_tokens"] == found["reused_tokens"]
    server.wait_quiet()
    edited = [*wanted[:38], 251, 252, 253, 250]
    fields = {"chain_id": turn["chain_id"]}
    found = server.post("/v1/chains/lookup", {"token_ids": edited, **fields}).json()
    report = post(server, {"prompt": edited, **fields}).json()["chain"]
    assert report["reused_tokens"] == found["reused_tokens"] == 36
    assert report["status"] == found["status"]


def test_it_can_be_off(servers: Servers) -> None:
    assert cli.parse_serve([], environ={}).engine.prefix_cache
    assert not cli.parse_serve(["--no-prefix-cache"], environ={}).engine.prefix_cache
    runner = MockRunner()
    with Engine(runner, EngineSettings(prefix_cache=False)) as engine:
        assert not serve_built(MockBuilt(runner, engine), ServerConfig()).prefix_cache
    server = servers.start(settings=EngineSettings(prefix_cache=False))
    for _ in range(2):
        response = post(server, {"prompt": ids(8), "chain": False})
        assert cached(response) == 0
        assert response.json()["sparsejax"]["cache_miss"] is None


def test_101_metrics_are_what_the_books_say(servers: Servers) -> None:
    server = servers.start()
    for tail in range(4):
        post(server, {"prompt": [*ids(9), tail, 1, 2, 3, 4], "chain": False})
    server.wait_quiet()
    index = server.engine.consult(lambda caches: caches.radix.index).result(5)

    def value(name: str, *labels: str) -> float:
        lines = [
            line for line in server.get("/metrics").text.splitlines() if line.startswith(f"sparsejax:{name}" + "{")
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))

    assert value("prefix_cache_queries_total") == 4 * 45
    assert value("prefix_cache_hits_total") == 3 * 40
    assert value("prefix_cache_misses_total", 'reason="cold"') == 1
    assert value("prefix_cache_misses_total", 'reason="diverged"') == 3
    server.wait_for(lambda: value("prefix_cache_blocks") == index.num_blocks == 10 + 4)
    assert value("prefix_cache_pages", 'state="free"') == index.free_pages == 14
    assert value("prefix_cache_pages", 'state="held"') == value("prefix_cache_pages", 'state="pinned"') == 0
    assert value("prefix_cache_events_total", 'event="inserted"') == 14
    server.engine.consult(lambda caches: caches.radix.index.evict(99)).result(5)
    server.wait_for(lambda: value("prefix_cache_events_total", 'event="evicted"') == 14)
    assert value("prefix_cache_blocks") == 0


def test_llm_shares_within_a_process() -> None:
    runner = MockRunner(script=say_script, verify=False)
    with LLM.from_built(MockBuilt(runner, Engine(runner))) as llm:
        params = SamplingParams(max_tokens=2, temperature=0.0)

        def found(prompt: list[int], **options: Any) -> int:
            return llm.generate(prompt, params, progress=False, **options)[0].stats.cached_tokens

        assert [found(ids(10)) for _ in range(2)] == [0, 36]
        assert found([*ids(10), 3], chain=ChainOptions()) == 40
        assert found([*ids(10), 3], chain=ChainOptions(salt="s")) == 0
        assert [found(ids(10), prefix=PrefixOptions(salt="t")) for _ in range(2)] == [0, 36]
        one, two = llm.generate([[*ids(10), 5], [*ids(10), 6]], params, progress=False)
        assert (one.stats.cached_tokens, two.stats.cached_tokens) == (40, 40)
        assert one.stats.miss is None
