"""Health, metrics, models, keys, CORS, tokenise, ids of requests: everything that isn't an answer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from sparsejax.config import Progress, ServerConfig
from sparsejax.mock import MockRunner
from sparsejax.serving.app import create_app
from sparsejax.serving.state import ServerState
from tests.serving.conftest import LiveServer, Servers, run_app

CHAT = "/v1/chat/completions"
SAY = {"messages": [{"role": "user", "content": "say:hello"}]}


def test_health_while_loading_and_after_a_failure() -> None:
    state = ServerState()
    url, _, stop = run_app(create_app(state))
    try:
        with httpx.Client(base_url=url) as client:
            state.report(Progress("compile", 3, 12, "programs", "decode[rows=16]"))
            response = client.get("/health")
            assert response.status_code == 503
            assert response.json()["status"] == "loading"
            assert response.json()["progress"] == {
                "step": "compile",
                "done": 3,
                "total": 12,
                "unit": "programs",
                "detail": "decode[rows=16]",
            }
            assert client.get("/live").status_code == 200
            assert client.get("/version").status_code == 200
            assert client.get("/metrics").status_code == 200
            for path in ("/v1/models", "/load", "/server_info", "/debug/rows"):
                assert client.get(path).status_code == 503
            refused = client.post(CHAT, json=SAY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "loading"
            assert int(refused.headers["retry-after"]) > 0
            state.fail(RuntimeError("no such file\nsecond line"))
            response = client.get("/health")
            assert (response.status_code, response.json()["error"]) == (500, "no such file")
            assert client.post(CHAT, json=SAY).status_code == 500
            assert client.get("/live").status_code == 200
    finally:
        stop()
        state.close()


def test_health_when_ready_draining_stuck_and_dead(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = MockRunner(eos_after=5)
    server = servers.start(runner)
    response = server.get("/health")
    assert (response.status_code, response.json()["status"]) == (200, "ready")
    assert server.client.head("/health").status_code == 200

    monkeypatch.setattr("sparsejax.serving.health.STUCK_AFTER_S", 0.05)
    runner.hold()
    thread = threading.Thread(target=server.post, args=(CHAT, SAY))
    thread.start()
    server.wait_for(lambda: server.get("/health").status_code == 503)
    assert server.get("/health").json()["status"] == "stuck"
    runner.release()
    thread.join()
    server.wait_idle()
    assert server.get("/health").status_code == 200

    server.state.drain()
    assert (server.get("/health").status_code, server.get("/health").json()["status"]) == (503, "draining")
    refused = server.post(CHAT, SAY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in refused.headers


def test_health_when_the_loop_died(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    runner = MockRunner()
    server = servers.start(runner)
    runner.fail("decode", 1, RuntimeError("device lost"))
    response = server.post(CHAT, SAY)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_dead"
    assert server.get("/health").status_code == 500
    assert "device lost" in server.get("/health").json()["error"]
    assert server.get("/live").status_code == 200
    assert server.post(CHAT, SAY).status_code == 500


def scrape(server: LiveServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = server.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_metrics(servers: Servers) -> None:
    server = servers.start()
    before = scrape(server)
    for _ in range(3):
        server.post(CHAT, SAY)
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 4})
    server.wait_idle()
    after = scrape(server)
    assert all(name.startswith("sparsejax:") for name, _ in after)
    assert set(before) <= set(after)
    for (name, labels), value in before.items():
        if name.endswith(("_total", "_count", "_sum", "_bucket")):
            assert after[name, labels] >= value, name
    base = {"model_name": "mock", "engine": "0"}

    def value(name: str, **labels: str) -> float:
        return after["sparsejax:" + name, tuple(sorted({**base, **labels}.items()))]

    assert value("request_success_total", finished_reason="stop") == 3
    assert value("request_success_total", finished_reason="length") == 1
    assert value("generation_tokens_total") == 3 * 6 + 4
    assert value("e2e_request_latency_seconds_count") == 4
    assert value("e2e_request_latency_seconds_bucket", le="+Inf") == 4
    assert value("num_requests_running") == 0
    assert value("kv_cache_usage_perc") == pytest.approx(server.engine.snapshot.kv_usage)
    buckets = [
        v for (name, labels), v in after.items() if name == "sparsejax:time_to_first_token_seconds_bucket" and labels
    ]
    assert buckets == sorted(buckets)
    assert any(name == "sparsejax:build_info" for name, _ in after)
    assert any(name == "sparsejax:cache_config_info" and dict(labels)["page_size"] == "4" for name, labels in after)


def test_two_apps_do_not_share_metrics(servers: Servers) -> None:
    first, second = servers.start(), servers.start()
    first.post(CHAT, SAY)
    key = ("sparsejax:request_success_total", (("engine", "0"), ("finished_reason", "stop"), ("model_name", "mock")))
    assert scrape(first)[key] == 1
    assert key not in scrape(second)


def test_models(servers: Servers) -> None:
    server = servers.start(model_names=("org/model", "alias"), model_path="/models/m")
    cards = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["org/model", "alias"]
    assert cards[0]["max_model_len"] == 4096
    assert cards[0]["root"] == "/models/m"
    assert cards[0]["sparsejax"]["method"] == "dense"
    assert "window" in cards[0]["sparsejax"]["methods"]
    assert server.get("/v1/models/org/model").json()["id"] == "org/model"
    assert server.post(CHAT, {**SAY, "model": "alias"}).json()["model"] == "alias"
    assert server.post(CHAT, SAY).json()["model"] == "org/model"


def test_generation_defaults(servers: Servers) -> None:
    server = servers.start(generation_defaults={"temperature": 0.3, "top_k": 7, "max_new_tokens": 5})
    seen: list[Any] = []
    submit = server.engine.submit
    server.engine.submit = lambda request, on_event: (seen.append(request.params), submit(request, on_event))  # type: ignore[method-assign]
    server.post(CHAT, SAY)
    server.post(CHAT, {**SAY, "temperature": 0, "top_k": 0})
    assert (seen[0].temperature, seen[0].top_k) == (0.3, 7)
    assert (seen[1].temperature, seen[1].top_k) == (0, 0)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_round_trip(shared: LiveServer, prefix: str) -> None:
    text = "héllo 👩‍👩‍👧"
    answer = shared.post(f"{prefix}/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == list(text.encode())
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    assert shared.post(f"{prefix}/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    messages = {"messages": SAY["messages"]}
    rendered = shared.post(f"{prefix}/tokenize", messages).json()
    chat = shared.post(CHAT, {**SAY, "return_token_ids": True}).json()
    assert rendered["tokens"] == chat["prompt_token_ids"]
    shown = shared.post(f"{prefix}/detokenize", {"tokens": rendered["tokens"]}).json()["prompt"]
    assert shown == "<bos>user:say:hello\n<bos>assistant:"
    hidden = shared.post(f"{prefix}/detokenize", {"tokens": rendered["tokens"], "skip_special_tokens": True}).json()
    assert "<bos>" not in hidden["prompt"]


def test_every_route_needs_a_key_but_the_probes(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(api_key=("secret", "zweiter-schlüssel")))
    app = create_app(ServerState())
    open_paths = {"/health", "/readyz", "/live", "/livez"}
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) > 12
    for route in routes:
        path = route.path.replace("{name:path}", "mock")
        for method in sorted(route.methods or ()):
            for header in (None, "Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secretx", "Bearer secre"):
                headers = {} if header is None else {"Authorization": header}
                response = server.client.request(method, path, headers=headers)
                if path in open_paths:
                    assert response.status_code == 200
                else:
                    assert response.status_code == 401, (method, path, header)
                    assert response.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD":
                        assert response.json()["error"]["code"] == "invalid_api_key"
            response = server.client.request(method, path, headers={"Authorization": "Bearer secret"})
            assert response.status_code != 401
    second = "Bearer zweiter-schlüssel".encode()
    assert server.get("/v1/models", headers={b"Authorization": second}).status_code == 200
    assert server.get("/nothing").status_code == 401


def test_cors(servers: Servers) -> None:
    server = servers.start(config=ServerConfig(allowed_origins=("https://ui.example",), api_key=("k",)))
    preflight = server.client.options(
        CHAT,
        headers={
            "Origin": "https://ui.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://ui.example"
    headers = {"Origin": "https://ui.example"}
    refused = server.post(CHAT, SAY, headers=headers)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://ui.example"
    answer = server.post(CHAT, SAY, headers={**headers, "Authorization": "Bearer k"})
    assert answer.status_code == 200
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    other = server.post(CHAT, SAY, headers={"Origin": "https://evil.example", "Authorization": "Bearer k"})
    assert "access-control-allow-origin" not in other.headers


def test_plain_options(shared: LiveServer) -> None:
    response = shared.client.options(CHAT)
    assert response.status_code == 204
    assert "POST" in response.headers["allow"]


def test_request_ids(shared: LiveServer) -> None:
    assert shared.post(CHAT, SAY, headers={"X-Request-Id": "abc-1.2:x"}).headers["x-request-id"] == "abc-1.2:x"
    generated = {shared.post(CHAT, SAY).headers["x-request-id"] for _ in range(3)}
    assert len(generated) == 3
    for strange in ("a b", "x" * 129, "<script>"):
        given = shared.get("/health", headers={"X-Request-Id": strange}).headers["x-request-id"]
        assert given != strange
        assert len(given) == 32
    assert shared.get("/nothing").headers["x-request-id"]
    # Equal ids of two clients don't collide in the engine.
    threads = [threading.Thread(target=shared.post, args=(CHAT, SAY), kwargs={"headers": {"X-Request-Id": "same"}})]
    threads[0].start()
    assert shared.post(CHAT, SAY, headers={"X-Request-Id": "same"}).status_code == 200
    threads[0].join()


def test_load_info_and_rows(servers: Servers) -> None:
    runner = MockRunner(step_s=0.005, verify=False)
    server = servers.start(runner)
    with server.client.stream("POST", CHAT, json={**SAY, "stream": True, "ignore_eos": True, "max_tokens": 2000}) as s:
        lines = s.iter_lines()
        next(lines)
        load = server.get("/load").json()
        assert load["server_load"] == 1
        assert load["running"] == 1
        assert 0 < load["kv_cache_usage"] < 1
        server.wait_for(lambda: len(server.get("/debug/rows").json()["rows"]) == 1)  # refreshed every 50 ms
        (row,) = server.get("/debug/rows").json()["rows"]
        assert row["method"] == "dense"
        assert row["resident_tokens"] > 0
    info = server.get("/server_info").json()
    assert info["method"] == "dense"
    assert info["chain_cache"] is True
    assert info["info"]["cache_config"] == {"page_size": 4}
    server.wait_idle()
    assert server.get("/load").json()["server_load"] == 0


def test_crash_is_a_500_without_internals(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    server = servers.start()

    def crash(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret path /root/x")

    server.state.served().tokenizer.render_chat = crash  # type: ignore[method-assign]
    response = server.post(CHAT, SAY, headers={"X-Request-Id": "crash-1"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "crash-1"
    assert "ZeroDivisionError" in caplog.text
    assert server.post("/v1/completions", {"prompt": "say:fine"}).status_code == 200


def test_slow_tokenizer_does_not_stop_the_loop(servers: Servers) -> None:
    server = servers.start()
    tokenizer = server.state.served().tokenizer
    encode = tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        time.sleep(0.5)
        return encode(text, add_special_tokens)

    tokenizer.encode = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": "say:x"}))
    thread.start()
    for _ in range(10):
        began = time.monotonic()
        assert server.get("/health").status_code == 200
        assert time.monotonic() - began < 0.3
    thread.join()


def test_serving_needs_no_jax() -> None:
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "transformers", "torch"):
            raise ImportError(f"{name} must not be imported by the server")
sys.meta_path.insert(0, Blocked())
import sparsejax.serving.app, sparsejax.llm, sparsejax.chat, sparsejax.serve, sparsejax.cli
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
