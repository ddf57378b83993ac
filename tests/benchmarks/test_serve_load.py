"""Load on a scripted server, and what its numbers mean on answers made by hand."""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import math
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from benchmarks import serve_load
from benchmarks.load import client, metrics, prompts
from tests.conftest import ROOT


class Scripted(http.server.BaseHTTPRequestHandler):
    """Gives all tokens that are asked for, one word each; `server.mode` makes it worse."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _send(self, status: int, kind: str, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        found = {"/v1/models": {"data": [{"id": "scripted"}]}, "/version": {"version": "7"}}.get(self.path)
        self._send(200 if found else 404, "application/json", json.dumps(found))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._send(200, "application/json", json.dumps({"tokens": body["prompt"].split()}))
            return
        self.server.bodies.append(body)
        mode = self.server.mode
        with self.server.lock:
            self.server.active += 1
            self.server.peak = max(self.server.peak, self.server.active)
            number = len(self.server.bodies)
        time.sleep(0.01)
        with self.server.lock:
            self.server.active -= 1
        if mode == "refuse" and number == 4:
            self._send(503, "application/json", '{"error": {"message": "no room"}}')
            return
        tokens = body["max_tokens"] - (mode == "short")
        chunks = [{"choices": [{"text": text}]} for text in ("", *[" a"] * tokens)]
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": tokens}
        usage["prompt_tokens_details"] = {"cached_tokens": 8 if mode == "cached" else 0}
        cost = {"method": "snapkv", "seen_tokens": 40, "resident_tokens": 30, "read_tokens": 20, "preemptions": 1}
        chunks.append({"choices": [], "usage": usage, "sparsejax": cost})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        if mode != "cut":
            lines.append("data: [DONE]\n\n")
        self._send(200, "text/event-stream", ": comment\n\n" + "".join(lines))


@pytest.fixture
def scripted():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        server.mode, server.bodies, server.lock, server.active, server.peak = "", [], threading.Lock(), 0, 0
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


SIZE = ("--random-input-len", "20", "--random-output-len", "5", "--ignore-eos", "--num-prompts", "6")


def test_two_servers_take_turns(scripted, tmp_path):
    path = tmp_path / "load.json"
    servers = (f"one={scripted.url}", f"two={scripted.url}/v1/")
    options = ("--max-concurrency", "1", "3", "--rounds", "2", "--save-detailed", "--goodput", "ttft:60000")
    command = [
        sys.executable,
        "-m",
        "benchmarks.serve_load",
        "--base-url",
        *servers,
        *SIZE,
        *options,
        "--json",
        str(path),
    ]
    env = {**os.environ, "SPARSEJAX_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert record["manifest"]["servers"]["two"] == {
        "model": "scripted",
        "version": "7",
        "tokens_counted_by": "/tokenize",
    }
    assert set(record["result"]["loads"]) == {"1", "3"}
    for concurrency, load in record["result"]["loads"].items():
        one, two = load["servers"].values()
        assert one["valid"]
        assert one["invalid_because"] == []
        assert (one["successful_requests"], one["failed_requests"]) == (12, 0)
        assert (one["prompt_tokens"], one["output_tokens"]) == (12 * 20, 12 * 5)
        assert one["peak_concurrency"] <= int(concurrency)
        assert one["prompt_hashes"] == two["prompt_hashes"]
        assert len(set(one["prompt_hashes"])) == 2, "a round repeats the prompts of another"
        assert one["ms"]["itl"]["samples"] == 12 * 4
        assert one["goodput_per_s"] == one["requests_per_s"]
        assert [len(turn) for turn in one["requests"]] == [6, 6]
        assert load["ratios"]["two / one"]["output_tokens_per_s"]["ratio"] > 0
        assert (one["mean_resident_tokens"], one["preemptions"], one["methods"]) == (30, 12, ["snapkv"])
    # 2 loads x 2 rounds x 2 servers, each with 2 warm-ups.
    assert len(scripted.bodies) == 2 * 2 * 2 * (6 + 2)
    assert scripted.peak == 3
    body = scripted.bodies[0]
    assert (body["max_tokens"], body["ignore_eos"], body["stream_options"]) == (5, True, {"include_usage": True})
    assert "Mean TTFT (ms):" in done.stdout
    assert "P99 E2EL (ms):" in done.stdout
    again = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode != 0
    assert "--force" in again.stderr


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("refuse", "1 of 6 requests failed"),
        ("cut", "6 of 6 requests failed"),
        ("short", "6 answers have not as many tokens"),
        ("cached", "48 of 120 prompt tokens came from a cache"),
    ],
)
def test_what_is_wrong_makes_a_run_invalid(scripted, mode, reason, tmp_path, capsys):
    scripted.mode = mode
    options = ("--base-url", scripted.url, "--max-concurrency", "2", "--num-warmups", "0")
    assert serve_load.main([*options, *SIZE, "--json", str(tmp_path / "load.json")]) == 1
    [result] = json.loads((tmp_path / "load.json").read_text())["result"]["loads"]["2"]["servers"].values()
    assert not result["valid"]
    assert [why.startswith(reason) for why in result["invalid_because"]] == [True]
    printed = capsys.readouterr().out
    assert f"INVALID: {reason}" in printed
    if mode == "refuse":
        assert result["failures"] == {"HTTP 503": 1}
        assert "1 failed: HTTP 503" in printed
        assert "no room" in printed


def test_a_server_that_is_not_there(capsys):
    with pytest.raises(SystemExit, match="names no model"):
        serve_load.main(["--base-url", "http://127.0.0.1:9"])
    ask = client.Ask(b"{}", None, 1)

    async def send() -> client.Record:
        async with client.Client("http://127.0.0.1:9", "/v1/completions", None, 5.0) as sender:
            return await sender.send(ask)

    assert client.read(asyncio.run(send())).kind == "no connection"


# Bytes and times


def test_a_line_has_the_time_of_its_first_byte():
    lines = client.Lines()
    lines.feed(b": comment\n\nda", 1.0)
    lines.feed(b'ta: {"a"', 2.0)
    lines.feed(b": 1}\r\n\r\ndata: x\n\n", 3.0)
    lines.feed(b"data: [DONE]", 4.0)
    lines.close()
    assert lines.data == [(1.0, b'{"a": 1}'), (3.0, b"x"), (4.0, b"[DONE]")]


def record(*lines, output_tokens=4, **more) -> client.Record:
    encoded = tuple((time_s, x if isinstance(x, bytes) else json.dumps(x).encode()) for time_s, x in lines)
    return client.Record(client.Ask(b"", 7, output_tokens), 0.5, 1.0, 9.0, encoded, **more)


def piece(text, finish=None):
    return {"choices": [{"text": text, "finish_reason": finish}]}


def chat(**delta):
    return {"choices": [{"delta": delta}]}


DONE = b"[DONE]"


def test_times_of_an_answer():
    opening = chat(role="assistant", content="")
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
    lines = (
        (1.5, opening),
        (2.0, chat(reasoning_content="a")),
        (3.0, chat(content="b")),
        (6.0, chat(content="c")),
        (7.0, chat()),
        (8.0, usage),
        (8.0, DONE),
    )
    found = client.read(record(*lines))
    assert (found.ttft_s, found.e2el_s, found.gaps_s) == (1.0, 5.0, [1.0, 3.0])
    assert found.tpot_s == 4.0 / 4
    assert (found.prompt_tokens, found.output_tokens, found.counted_by) == (9, 5, "usage")


def test_who_counts_tokens():
    pieces = (2.0, piece("a b")), (3.0, piece(" c"))
    full = client.read(record(*pieces, (4.0, piece("", "length")), (4.0, DONE)))
    assert (full.output_tokens, full.counted_by, full.prompt_tokens) == (4, "finish_reason", 7)
    stopped = record(*pieces, (4.0, piece("", "stop")), (4.0, DONE))
    counted, guessed = client.read(stopped, lambda text: len(text.split())), client.read(stopped)
    assert (counted.output_tokens, counted.counted_by) == (3, "tokenizer")
    assert (guessed.output_tokens, guessed.counted_by) == (2, "pieces")
    one = client.read(record((2.0, piece("a", "length")), (2.0, DONE), output_tokens=1))
    assert one.tpot_s is None


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([(2.0, piece("a"))], "cut short"),
        ([(2.0, piece("", "stop")), (2.0, DONE)], "no text"),
        ([(2.0, piece("a")), (3.0, {"error": {"message": "broke"}})], "error in the stream"),
        ([(2.0, b"{")], "not JSON"),
    ],
)
def test_kinds_of_failures(lines, kind):
    assert client.read(record(*lines)).kind == kind


def test_a_failed_request_is_a_failure():
    found = client.read(record((2.0, piece("a")), (3.0, DONE), failure="timeout", detail="slow"))
    assert found == client.Failure("timeout", "slow", 1.0, 9.0)


class Sleeper:
    """Takes its time for each request."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def send(self, ask: client.Ask, due_s: float) -> client.Record:
        sent_s = time.perf_counter()
        await asyncio.sleep(self.seconds)
        return client.Record(ask, due_s, sent_s, time.perf_counter())


def asks(count):
    return [client.Ask(b"%d" % i, None, 1) for i in range(count)]


def test_an_open_loop_sends_when_due():
    arrivals = [0.0, 0.05, 0.3]
    records, seconds = asyncio.run(client.drive(Sleeper(0.1), asks(3), arrivals, None))
    assert [r.ask.body for r in records] == [b"0", b"1", b"2"]
    due = [r.due_s - records[0].due_s for r in records]
    assert due == pytest.approx(arrivals)
    assert all(r.sent_s >= r.due_s for r in records)
    assert records[1].sent_s < records[0].end_s, "the second waited for the first"
    assert seconds == pytest.approx(records[2].end_s - records[0].due_s)


def test_a_closed_loop_waits_for_a_place():
    records, _ = asyncio.run(client.drive(Sleeper(0.02), asks(6), [0.0] * 6, 2))
    assert metrics.peak([client.Failure("", "", r.sent_s, r.end_s) for r in records]) == 2
    assert records[5].sent_s >= records[3].end_s - 0.01


# Numbers


def answer(times, tokens, *, sent=0.0, prompt=10, end=None, **more) -> client.Answer:
    return client.Answer(sent, times[-1] if end is None else end, tuple(times), prompt, tokens, "usage", **more)


FAST = answer([1.0, 1.5, 3.0], 3)
SHORT = answer([2.5], 1, sent=2.0, prompt=6)
BOOM = client.Failure("HTTP 503", "no room", 0.0, 0.5)


def judge(turns, goals=None, **rules):
    return metrics.judge(turns, [99.0], goals or {}, **{"forced": False, "counted": False, "distinct": False} | rules)


def test_turns_are_pooled():
    turns = [metrics.Turn([(10, 3), (6, 1)], [FAST, SHORT], 4.0), metrics.Turn([(10, 3)], [FAST], 1.0)]
    found = judge(turns)
    assert found["valid"]
    assert found["output_tokens_per_s"] == 7 / 5.0
    assert found["total_tokens_per_s"] == (7 + 26) / 5.0
    assert found["output_tokens_per_s_by_turn"] == [1.0, 3.0]
    assert found["ms"]["ttft"]["median"] == 1000.0
    assert found["ms"]["ttft"]["mean"] == pytest.approx(2500 / 3)
    assert (found["ms"]["tpot"]["median"], found["ms"]["tpot"]["samples"]) == (1000.0, 2)
    assert (found["ms"]["itl"]["samples"], found["ms"]["itl"]["p99"]) == (4, 1500.0)
    assert found["ms"]["e2el"]["p99"] == pytest.approx(3000.0)
    assert found["peak_concurrency"] == 2
    text = metrics.block(found, ["ttft", "e2el"])
    assert "Output token throughput (tok/s):         1.40" in text
    assert "P99 TTFT (ms):" in text
    assert "TPOT" not in text
    assert max(map(len, text.splitlines())) == 50


def test_failures_are_counted_and_never_averaged():
    found = judge([metrics.Turn([(10, 3), (10, 3)], [FAST, BOOM], 4.0)])
    assert (found["successful_requests"], found["failed_requests"]) == (1, 1)
    assert found["failures"] == {"HTTP 503": 1}
    assert found["invalid_because"] == ["1 of 2 requests failed"]
    nothing = judge([metrics.Turn([(10, 3)], [BOOM], 1.0)])
    assert not nothing["valid"]
    assert nothing["ms"] == {}
    assert "INVALID: 1 of 1 requests failed" in metrics.block(nothing, ["ttft"])


def test_answers_that_met_all_goals():
    turn = metrics.Turn([(10, 3), (6, 1)], [FAST, SHORT], 4.0)
    assert judge([turn], {"ttft": 600.0})["goodput_per_s"] == 1 / 4.0
    assert judge([turn], {"ttft": 1000.0, "tpot": 1000.0})["goodput_per_s"] == 2 / 4.0
    assert judge([turn], {"e2el": 499.0})["goodput_per_s"] == 0.0


def test_the_rules_of_a_valid_run():
    cached = answer([1.0, 2.0], 3, cached_tokens=1)
    guessed = client.Answer(0.0, 1.0, (1.0,), 10, 3, "pieces")
    turn = metrics.Turn([(10, 4), (11, 3), (None, 3)], [FAST, cached, guessed], 1.0)
    assert metrics.reasons([turn], forced=True, counted=True, distinct=True) == [
        "1 answers have not as many tokens as asked for",
        "1 prompts have not as many tokens as asked for",
        "1 answers' tokens are a guess: pieces of the stream were counted",
        "1 of 30 prompt tokens came from a cache that was to be cold",
    ]
    fine = metrics.Turn([(10, 3)], [FAST], 1.0)
    assert metrics.reasons([fine], forced=True, counted=True, distinct=True) == []


def test_servers_are_compared_turn_by_turn():
    slow = answer([2.0, 3.0, 6.0], 3)
    base = [metrics.Turn([(10, 3)], [FAST], 3.0), metrics.Turn([(10, 3)], [FAST], 6.0)]
    other = [metrics.Turn([(10, 3)], [slow], 6.0), metrics.Turn([(10, 3)], [slow], 6.0)]
    found = metrics.compare(base, other)
    assert found["output_tokens_per_s"] == pytest.approx({"ratio": 0.5 / 0.75, "least_pair": 0.5, "largest_pair": 1.0})
    assert found["ttft_median"]["ratio"] == 2.0
    assert found["tpot_median"]["ratio"] == 2.0


# Prompts


def by_fours(text: str) -> int:
    """A start token, and one for every four letters begun."""
    return 1 + sum(-(-len(word) // 4) for word in text.split())


@pytest.mark.parametrize("tokens", [2, 17, 128, 1024])
def test_random_text_has_the_tokens_asked_for(tokens):
    words, rng = prompts.vocabulary(), np.random.default_rng(0)
    text, counted = prompts.text_of(rng, tokens, by_fours, words)
    assert counted == tokens == by_fours(text)


def test_random_prompts_differ_and_repeat_by_seed():
    counter = prompts.Counter("", True, by_fours)

    def made(seed):
        return prompts.random_prompts(np.random.default_rng(seed), 20, 40, 10, 0.5, counter)

    first = made(0)
    assert first == made(0)
    assert len({prompt.content.split()[0] for prompt in first}) > 15
    assert {by_fours(prompt.content) == prompt.tokens for prompt in first} == {True}
    assert all(20 <= prompt.tokens <= 60 and 5 <= prompt.output_tokens <= 15 for prompt in first)
    assert len({prompt.tokens for prompt in first}) > 5
    assert first != made(1)


def test_prefixes_are_shared():
    counter = prompts.Counter("", True, by_fours)
    found = prompts.prefix_prompts(np.random.default_rng(0), 12, 30, 20, 3, 8, counter)
    assert [(prompt.tokens, prompt.output_tokens) for prompt in found] == [(50, 8)] * 12
    starts = [" ".join(prompt.content.split()[:8]) for prompt in found]
    assert sorted(starts.count(start) for start in set(starts)) == [4, 4, 4]
    assert len({prompt.content for prompt in found}) == 12


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "a", "output_tokens": 3}, {"messages": messages, "prompt": "b"}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert prompts.file_prompts(path, 2, 9, chat=False) == [("a", None, 3), ("b", None, 9)]
    assert prompts.file_prompts(path, 2, 9, chat=True)[1].content == messages
    with pytest.raises(SystemExit, match="fewer"):
        prompts.file_prompts(path, 3, 9, chat=False)
    path.write_text('{"text": "a"}')
    with pytest.raises(SystemExit, match="item 1"):
        prompts.file_prompts(path, 1, 9, chat=False)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_arrivals_have_the_rate_and_burstiness_asked_for(burstiness, variation):
    found = prompts.arrivals(np.random.default_rng(0), 20_000, 50.0, burstiness)
    assert found[0] == 0.0
    gaps = np.diff(found)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_an_infinite_rate_sends_all_at_once():
    assert prompts.arrivals(np.random.default_rng(0), 3, math.inf, 1.0) == [0.0] * 3


# Command line


def test_names_and_fields():
    assert serve_load.named("ours=http://a:1") == ("ours", "http://a:1")
    assert serve_load.named("http://a:1/?x=y") == (None, "http://a:1/?x=y")
    assert serve_load.extra_bodies(['{"a": 1}', 'two={"a": 2, "b": 3}'], ["one", "two"]) == {
        "one": {"a": 1},
        "two": {"a": 2, "b": 3},
    }
    with pytest.raises(SystemExit, match="three"):
        serve_load.extra_bodies(["three={}"], ["one"])
    assert serve_load.goals(["ttft:200", "tpot:5.5"]) == {"ttft": 200.0, "tpot": 5.5}
    for wrong in ("itl:5", "ttft", "ttft:0"):
        with pytest.raises(SystemExit, match="--goodput"):
            serve_load.goals([wrong])


@pytest.mark.parametrize(
    "wrong",
    [
        ["--request-rate", "0"],
        ["--max-concurrency", "0"],
        ["--random-range-ratio", "1"],
        ["--dataset-name", "jsonl"],
        ["--base-url", "ftp://a"],
        ["--base-url", "a=http://a:1", "a=http://b:1"],
    ],
)
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises(SystemExit):
        serve_load.main(wrong)


def test_spellings_of_vllm():
    parser = argparse.ArgumentParser()
    serve_load.add_options(parser)
    vllm = ["--endpoint", "/v1/chat/completions", "--dataset-name", "prefix_repetition", "--request-rate", "inf"]
    found = parser.parse_args([*vllm, "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9"])
    assert (found.endpoint, found.dataset_name, found.request_rate) == ("chat", "prefix-repetition", math.inf)
    assert (found.percentile_metrics, found.metric_percentiles) == (["ttft", "e2el"], [50.0, 99.9])
    shown = metrics.latencies([1.0, 3.0], found.metric_percentiles)
    assert (shown["p50"], shown["p99.9"]) == (2.0, pytest.approx(2.998))
    with pytest.raises(SystemExit):
        parser.parse_args(["--percentile-metrics", "speed"])


def test_prompts_of_a_file_are_counted(scripted, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two three", "output_tokens": 2}\n{"prompt": "four"}\n')
    options = ("--dataset-name", "jsonl", "--dataset-path", str(path), "--num-prompts", "2", "--num-warmups", "0")
    assert serve_load.main(["--base-url", scripted.url, *options, "--json", str(tmp_path / "load.json")]) == 0
    [result] = json.loads((tmp_path / "load.json").read_text())["result"]["loads"]["any"]["servers"].values()
    assert (result["prompt_tokens"], result["output_tokens"]) == (4, 2 + 128)
