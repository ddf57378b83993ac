"""Chains over HTTP: who sees them, what can be done with them, the real client, metrics and the log."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from typing import Any

import openai
import pytest

from sparsejax.config import ServerConfig
from sparsejax.mock import MockRunner
from sparsejax.serving.auth import tenant_of
from sparsejax.settings import EngineSettings
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import say_script
from tests.serving.test_chains import CHAINS, CHAT, TEXT, chat, refusal, say

# Tenants.


@pytest.fixture
def keyed(servers: Servers) -> LiveServer:
    return servers.start(config=ServerConfig(api_key=("key-a", "key-b")))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_do_not_see_each_other(keyed: LiveServer) -> None:
    a, b = bearer("key-a"), bearer("key-b")
    text = "a secret that is long enough to be recognised if somebody sends it"
    first = keyed.post(CHAT, {"messages": say(text)}, headers=a).json()
    chain_id = first["chain_id"]
    guess = keyed.post(CHAT, {"messages": say(text, "x")}, headers=b).json()
    assert guess["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert guess["sparsejax"]["cache_miss"]["reason"] == "cold"
    named = {"messages": say(text, "x"), "chain_id": chain_id, "chain_on_miss": "error"}
    stolen = refusal(keyed.post(CHAT, named, headers=b), 404, "chain_not_found")
    never = refusal(keyed.post(CHAT, {**named, "chain_id": "chain_never"}, headers=b), 404, "chain_not_found")
    assert stolen["recovery"] == never["recovery"]
    for method, path in (
        ("GET", f"{CHAINS}/{chain_id}"),
        ("DELETE", f"{CHAINS}/{chain_id}"),
        ("POST", f"{CHAINS}/{chain_id}/fork"),
        ("POST", f"{CHAINS}/{chain_id}/checkpoint"),
        ("POST", f"{CHAINS}/{chain_id}/demote"),
    ):
        refusal(keyed.client.request(method, path, headers=b), 404, "chain_not_found")
        refusal(keyed.client.request(method, path), 401, "invalid_api_key")
    refusal(keyed.post(f"{CHAINS}/{chain_id}/pin", {"ttl_s": 5}, headers=b), 404, "chain_not_found")
    assert [c["id"] for c in keyed.get(CHAINS, headers=b).json()["data"]] == [guess["chain_id"]]
    looked = keyed.post(f"{CHAINS}/lookup", {"messages": say(text, "x")}, headers=b).json()
    assert looked["chain_id"] in (None, guess["chain_id"])
    mine = keyed.post(CHAT, {**named, "messages": say(text, "x")}, headers=a).json()
    assert (mine["chain_id"], mine["chain_status"]) == (chain_id, "resumed")


def test_the_tenant_is_a_digest() -> None:
    assert tenant_of(b"key-a") != tenant_of(b"key-b")
    assert "key" not in tenant_of(b"key-a")
    assert len(tenant_of(b"x")) == 32


# Management.


def test_list_get_and_delete(servers: Servers) -> None:
    server = servers.start()
    ids = [chat(server, f"chain number {i}")["chain_id"] for i in range(3)]
    listed = server.get(CHAINS).json()
    assert (listed["object"], listed["total"]) == ("list", 3)
    assert [chain["id"] for chain in listed["data"]] == ids[::-1]
    short = server.get(f"{CHAINS}?state=idle&limit=1").json()
    assert (len(short["data"]), short["total"]) == (1, 3)
    assert server.get(f"{CHAINS}?state=active").json()["data"] == []
    one = server.get(f"{CHAINS}/{ids[0]}").json()
    assert (one["object"], one["id"], one["state"], one["tier"], one["turns"]) == ("chain", ids[0], "idle", "device", 1)
    assert one["total_tokens"] == one["processed_tokens"] + 1
    assert one["retained_tokens"] == one["processed_tokens"]
    assert abs(one["created_at"] - time.time()) < 60 < one["expires_at"] - time.time()
    assert "ledger" not in one
    assert server.client.delete(f"{CHAINS}/{ids[0]}").json() == {
        "id": ids[0],
        "object": "chain.deleted",
        "deleted": True,
    }
    assert refusal(server.get(f"{CHAINS}/{ids[0]}"), 410, "chain_gone")["reason"] == "deleted"
    refusal(server.client.delete(f"{CHAINS}/{ids[0]}"), 410, "chain_gone")
    for query, param in (("state=dead", "state"), ("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit")):
        assert refusal(server.get(f"{CHAINS}?{query}"), 400, "invalid_value")["param"] == param


def test_the_digest_is_that_of_the_tokens(shared: LiveServer) -> None:
    prompt = list(b"say:digest\n")
    first = shared.post(TEXT, {"prompt": prompt, "return_token_ids": True, "max_tokens": 9}).json()
    ids = [*prompt, *first["choices"][0]["token_ids"]]
    digest = hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()
    assert shared.get(f"{CHAINS}/{first['chain_id']}").json()["digest"] == digest
    fields = {"prompt": "say:on\n", "chain_id": first["chain_id"], "chain_append": True}
    assert shared.post(TEXT, {**fields, "chain_expected_digest": digest}).json()["chain_status"] == "resumed"


def test_forks_go_their_own_ways(shared: LiveServer) -> None:
    first = chat(shared, "to be forked")
    forked = shared.post(f"{CHAINS}/{first['chain_id']}/fork").json()
    assert (forked["parent_id"], forked["state"]) == (first["chain_id"], "idle")
    assert forked["total_tokens"] == first["chain"]["total_tokens"]
    for chain_id, text in ((forked["id"], "left"), (first["chain_id"], "right")):
        fields = {"messages": say(text), "chain_id": chain_id, "chain_append": True}
        answer = shared.post(CHAT, fields).json()
        assert (answer["chain_id"], answer["choices"][0]["message"]["content"]) == (chain_id, text)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["chain"]["processed_tokens"]
    early = shared.post(f"{CHAINS}/{first['chain_id']}/fork", {"at_tokens": first["chain"]["processed_tokens"]}).json()
    assert early["processed_tokens"] == early["total_tokens"] == first["chain"]["processed_tokens"]
    wrong = refusal(shared.post(f"{CHAINS}/{first['chain_id']}/fork", {"at_tokens": 3}), 409, "chain_prefix_mismatch")
    assert wrong["reason"] == "no_checkpoint"
    refusal(shared.post(f"{CHAINS}/{first['chain_id']}/fork", {"at_tokens": 0}), 400, "invalid_value")


def test_checkpoints_are_kept_on_demand(servers: Servers) -> None:
    server = servers.start(settings=EngineSettings(chain_checkpoints=0, prefix_cache=False))
    first = chat(server, "checkpoint")
    path = f"{CHAINS}/{first['chain_id']}"
    assert server.get(path).json()["checkpoints"] == []
    kept = server.post(f"{path}/checkpoint").json()["checkpoints"]
    tokens = first["chain"]["processed_tokens"]
    assert kept == [{"kind": "turn_end", "processed_tokens": tokens, "tier": "device"}]
    assert len(server.post(f"{path}/checkpoint").json()["checkpoints"]) == 1
    chat(server, "checkpoint", "wrong way", chain_id=first["chain_id"])
    back = chat(server, "checkpoint", "right way", chain_id=first["chain_id"], chain_branch="rewind")
    assert (back["chain_status"], back["usage"]["prompt_tokens_details"]["cached_tokens"]) == ("rewound", tokens)


def test_pins(servers: Servers) -> None:
    server = servers.start(MockRunner(script=say_script, verify=False, num_sequence_pages=200))
    first = chat(server, "x" * 100)
    path = f"{CHAINS}/{first['chain_id']}"
    assert 59 < server.post(f"{path}/pin", {"ttl_s": 60}).json()["pinned_s"] <= 60
    assert server.post(f"{path}/pin", {"ttl_s": 0}).json()["pinned_s"] == 0
    for wrong in ({"ttl_s": -1}, {"ttl_s": 86_401}, {}, {"ttl_s": "long"}):
        assert server.post(f"{path}/pin", wrong).json()["error"]["param"] == "ttl_s"
    big = chat(server, "y" * 250)
    refused = server.post(f"{CHAINS}/{big['chain_id']}/pin", {"ttl_s": 60})
    assert refusal(refused, 503, "chain_capacity_unavailable")["retryable"]


def test_demotion_and_return(servers: Servers) -> None:
    server = servers.start(settings=EngineSettings(prefix_cache=False))  # its blocks would serve as well
    first = chat(server, "goes to the host")
    path = f"{CHAINS}/{first['chain_id']}"
    for _ in range(2):
        assert server.post(f"{path}/demote").json()["tier"] == "host"
    second = chat(server, "goes to the host", "comes back", chain_id=first["chain_id"])
    assert second["choices"][0]["message"]["content"] == "comes back"
    assert second["chain"]["restored_from"] == "host"
    assert server.get(path).json()["tier"] == "device"


def test_demotion_without_host_memory(servers: Servers) -> None:
    server = servers.start(settings=EngineSettings(chain_host_bytes=0))
    first = chat(server, "nowhere to go")
    refused = server.post(f"{CHAINS}/{first['chain_id']}/demote")
    assert refusal(refused, 503, "chain_capacity_unavailable")["recovery"] == "retry_later"
    assert server.get(f"{CHAINS}/{first['chain_id']}").json()["tier"] == "device"


def test_lookup_is_a_dry_run(shared: LiveServer) -> None:
    first = chat(shared, "dry run")
    before = shared.get(f"{CHAINS}/{first['chain_id']}").json()
    ways: list[dict[str, Any]] = [
        {"messages": say("dry run", "x")},
        {"messages": say("dry run", "x"), "chain_id": first["chain_id"]},
        {"messages": say("x"), "chain_id": first["chain_id"], "chain_append": True},
        {"prompt": " more", "chain_id": first["chain_id"], "chain_append": True},
    ]
    for way, status in zip(ways, ("adopted", "resumed", "resumed", "resumed"), strict=True):
        found = shared.post(f"{CHAINS}/lookup", way).json()
        assert (found["object"], found["status"], found["chain_id"]) == ("chain.lookup", status, first["chain_id"])
        assert found["reused_tokens"] == first["chain"]["processed_tokens"]
        assert found["total_tokens"] == found["reused_tokens"] + found["prefilled_tokens"]
    after = shared.get(f"{CHAINS}/{first['chain_id']}").json()
    assert {k: v for k, v in after.items() if not k.endswith("_s")} == {
        k: v for k, v in before.items() if not k.endswith("_s")
    }
    nothing = shared.post(f"{CHAINS}/lookup", {"token_ids": list(range(40, 140))}).json()
    assert (nothing["status"], nothing["chain_id"], nothing["reused_tokens"]) == ("created", None, 0)
    for wrong, param in (({}, "messages"), ({"prompt": "x", "token_ids": [1]}, "token_ids"), ({"token_ids": []}, None)):
        error = refusal(shared.post(f"{CHAINS}/lookup", wrong), 400, "invalid_value")
        assert param in (None, error["param"])
    unknown = {"messages": say("x"), "sparse_method": "none"}
    assert refusal(shared.post(f"{CHAINS}/lookup", unknown), 400, "invalid_value")["param"] == "sparse_method"
    known = {"messages": say("dry"), "chain_id": chat(shared, "dry")["chain_id"], "sparse_method": "no such"}
    assert refusal(shared.post(f"{CHAINS}/lookup", known), 400, "invalid_value")["param"] == "sparse_method"
    strict = {"token_ids": [1, 2, 3], "chain_id": first["chain_id"], "chain_on_miss": "error"}
    refusal(shared.post(f"{CHAINS}/lookup", strict), 409, "chain_prefix_mismatch")


def test_routers_can_ask(shared: LiveServer) -> None:
    first = chat(shared, "routed")
    path = "/v1/chain_cache/routing_match"
    assert shared.post(path, {"chain_id": first["chain_id"]}).json() == {
        "enabled": True,
        "present": True,
        "state": "idle",
        "tombstone": False,
    }
    shared.client.delete(f"{CHAINS}/{first['chain_id']}")
    assert shared.post(path, {"chain_id": first["chain_id"]}).json()["tombstone"]


# The real client, metrics and the log.


def test_the_openai_client(shared: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "say:from the client"}]
        first = client.chat.completions.create(model="mock", messages=messages, extra_body={"chain_ttl_s": 60})
        extra = first.model_extra or {}
        messages += [first.choices[0].message, {"role": "user", "content": "say:again"}]
        raw = client.chat.completions.with_raw_response.create(
            model="mock", messages=messages, extra_body={"chain_id": extra["chain_id"]}
        )
        assert raw.headers["x-sparsejax-chain-status"] == "resumed"
        second = raw.parse()
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        assert second.usage.prompt_tokens_details.cached_tokens == extra["chain"]["processed_tokens"]
        stream = client.chat.completions.create(
            model="mock",
            messages=[{"role": "user", "content": "say:appended"}],
            stream=True,
            extra_body={"chain_id": extra["chain_id"], "chain_append": True},
        )
        chunks = list(stream)
        assert all((chunk.model_extra or {})["chain_status"] == "resumed" for chunk in chunks)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "appended"
        shared.client.delete(f"{CHAINS}/{extra['chain_id']}")
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(
                model="mock",
                messages=[{"role": "user", "content": "x"}],
                extra_body={"chain_id": extra["chain_id"], "chain_append": True},
            )
        assert (caught.value.status_code, caught.value.code) == (410, "chain_gone")
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["recovery"] == "resend_full"


def test_metrics_of_chains(servers: Servers) -> None:
    server = servers.start(settings=EngineSettings(prefix_cache=False))
    first = chat(server, "counted")
    second = chat(server, "counted", "again", chain_id=first["chain_id"])
    server.post(f"{CHAINS}/{first['chain_id']}/demote")
    chat(server, "counted", "again", "third", chain_id=first["chain_id"])
    server.client.delete(f"{CHAINS}/{first['chain_id']}")
    chat(server, "counted", "again", "third", "fourth", chain_id=first["chain_id"])
    server.wait_quiet()

    def value(name: str, **labels: str) -> float:
        lines = [
            line for line in server.get("/metrics").text.splitlines() if line.startswith(f"sparsejax:{name}" + "{")
        ]
        found = [line for line in lines if all(f'{k}="{v}"' in line for k, v in labels.items())]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    assert value("chain_turns_total", status="created") == 1
    assert value("chain_turns_total", status="resumed") == 2
    assert value("chain_turns_total", status="recreated") == 1
    assert value("prefix_cache_misses_total", reason="deleted") == 1
    assert value("chain_tokens_saved_total") >= second["chain"]["reused_tokens"]
    assert value("chain_tokens_recomputed_total", reason="deleted") > 0
    assert value("chain_restore_seconds_count", tier="device") == 1
    assert value("chain_restore_seconds_count", tier="host") == 1
    assert value("chain_events_total", event="demoted") == 1
    assert value("chain_events_total", event="gone_deleted") == 1
    assert value("chain_entries", state="idle_device") == 1
    assert value("chain_entries", state="idle_host") == 0
    assert value("kv_cache_usage_perc") == 0, "pages of idle chains are free when they are needed"


def test_one_line_per_admission(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    server = servers.start()
    with caplog.at_level("INFO", logger="sparsejax.chains"):
        chat(server, "quiet")
        assert [r for r in caplog.records if r.name == "sparsejax.chains"] == []
        first = chat(server, "logged", chain_ttl_s=60)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "sparsejax.chains"]
    fields = dict(part.split("=", 1) for part in line.split())
    assert fields["chain"] == first["chain_id"]
    assert (fields["status"], fields["reused"]) == ("created", "0")
    assert int(fields["prefill"]) == first["usage"]["prompt_tokens"]


def test_answers_are_plain_json(shared: LiveServer) -> None:
    """No field holds what JSON can't, also without a key or with an odd one."""
    for body in ({"messages": say("plain")}, {"messages": say("plain", "json"), "chain_compat": True}):
        response = shared.post(CHAT, body)
        assert json.loads(response.text) == response.json()
