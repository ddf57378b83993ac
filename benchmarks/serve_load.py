"""Load on a running OpenAI-compatible server: concurrent streaming clients, latencies and throughput.

    python -m benchmarks.serve_load --url http://127.0.0.1:8000 --requests 64 --concurrency 16

Works against any server that streams `/v1/completions`. Prompts are pieces of real text, cut by characters, since only
the server knows its tokenizer; token counts are the server's own (`stream_options.include_usage`).
TTFT is the time to the first piece of text, ITL the time between pieces, TPOT (end - first) / (tokens - 1).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import http.client
import itertools
import json
import sys
import time
import urllib.parse
from typing import Any

from benchmarks import common


@dataclasses.dataclass(frozen=True)
class Answer:
    """One streamed answer. Times in seconds; `gaps_s` lie between pieces of text."""

    start_s: float
    end_s: float
    ttft_s: float
    gaps_s: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None where there is no second one."""
        if self.completion_tokens < 2:
            return None
        return (self.end_s - self.start_s - self.ttft_s) / (self.completion_tokens - 1)


class Client:
    """Requests to one server."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SystemExit(f"--url must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def _send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = self._connection(*self._address, timeout=self._timeout_s)
        connection.request(method, self._root + path, None if body is None else json.dumps(body), self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {response.read(500).decode(errors='replace')}")
        return response

    def model(self) -> str:
        """The first model that the server names."""
        return json.loads(self._send("GET", "/v1/models").read())["data"][0]["id"]

    def complete(self, body: dict[str, Any]) -> Answer:
        """One streamed completion."""
        start = time.perf_counter()
        response = self._send("POST", "/v1/completions", body)
        times: list[float] = []
        usage: dict[str, int] = {}
        done = False
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                break
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(f"the stream broke: {chunk['error']}")
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                times.append(time.perf_counter())
            usage = chunk.get("usage") or usage
        end = time.perf_counter()
        response.close()
        if not done or not times:
            raise RuntimeError("the stream ended early" if not done else "the answer has no text")
        gaps = tuple(b - a for a, b in itertools.pairwise(times))
        tokens = usage.get("completion_tokens", len(times))
        return Answer(start, end, times[0] - start, gaps, usage.get("prompt_tokens", 0), tokens)


def prompts(count: int, characters: int) -> list[str]:
    """Distinct pieces of the test text, so that no cached prefix helps."""
    text = common.prose()
    step = max(1, (len(text) - characters) // max(1, count))
    return [text[(i * step) % max(1, len(text) - characters) :][:characters] for i in range(count)]


def run_load(client: Client, bodies: list[dict[str, Any]], concurrency: int) -> tuple[list[Answer], list[str], float]:
    """Keeps `concurrency` requests under way; returns answers, errors and seconds."""
    answers, errors = [], []
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        for future in concurrent.futures.as_completed([pool.submit(client.complete, body) for body in bodies]):
            try:
                answers.append(future.result())
            except (RuntimeError, OSError, ValueError) as error:
                errors.append(str(error))
    return answers, errors, time.perf_counter() - start


def judge(answers: list[Answer], errors: list[str], seconds: float) -> dict[str, Any]:
    """Latencies in milliseconds and throughput."""
    if not answers:
        raise SystemExit(f"every request failed; the first error: {errors[0] if errors else 'none was sent'}")
    output, prompt = sum(a.completion_tokens for a in answers), sum(a.prompt_tokens for a in answers)
    samples = {
        "ttft": [a.ttft_s for a in answers],
        "tpot": [a.tpot_s for a in answers if a.tpot_s is not None],
        "itl": [gap for a in answers for gap in a.gaps_s],
    }
    return {
        "successful_requests": len(answers),
        "failed_requests": len(errors),
        "errors": sorted(set(errors))[:5],
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(answers) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + prompt) / seconds,
        "ms": {name: common.summary([1e3 * x for x in values]) for name, values in samples.items() if values},
    }


_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
}


def block(result: dict[str, Any]) -> str:
    """The summary in the shape that `vllm bench serve` made familiar."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]
    for name, label, form in (
        ("successful_requests", "Successful requests:", "d"),
        ("failed_requests", "Failed requests:", "d"),
        ("seconds", "Benchmark duration (s):", ".2f"),
        ("prompt_tokens", "Total input tokens:", "d"),
        ("output_tokens", "Total generated tokens:", "d"),
        ("requests_per_s", "Request throughput (req/s):", ".2f"),
        ("output_tokens_per_s", "Output token throughput (tok/s):", ".2f"),
        ("total_tokens_per_s", "Total token throughput (tok/s):", ".2f"),
    ):
        lines.append(f"{label:<40}{result[name]:<10{form}}".rstrip())
    for name, values in result["ms"].items():
        lines.append(f"{_TITLES[name]:-^50}")
        for key, label in (("mean", "Mean"), ("median", "Median"), ("p99", "P99")):
            title = f"{label} {name.upper()} (ms):"
            lines.append(f"{title:<40}{values[key]:<10.2f}".rstrip())
    return "\n".join([*lines, "=" * 50, *result["errors"]])


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("serve_load", __doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--model", help="default: the first one the server names")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-characters", type=int, default=500, help="about 4.5 characters are a token")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=1, help="requests before the clock starts")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--extra-body", type=json.loads, default={}, help='JSON, e.g. {"ignore_eos": true}')
    arguments = parser.parse_args(argv)
    run = common.Run("serve_load", arguments)
    run.manifest["arguments"]["api_key"] = bool(arguments.api_key)
    result, facts = measure(arguments)
    print(block(result))
    run.finish(result, **facts)
    return int(result["failed_requests"] > 0)


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    client = Client(arguments.url, arguments.api_key, arguments.timeout_s)
    model = arguments.model or client.model()
    bodies = [
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": arguments.new_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **arguments.extra_body,
        }
        for prompt in prompts(arguments.requests + arguments.warmup, arguments.prompt_characters)
    ]
    for body in bodies[: arguments.warmup]:
        client.complete(body)
    answers, errors, seconds = run_load(client, bodies[arguments.warmup :], arguments.concurrency)
    return judge(answers, errors, seconds), {"model": model}


if __name__ == "__main__":
    sys.exit(main())
