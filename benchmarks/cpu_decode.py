"""Decode speed on a CPU: one request against transformers and torch, and many requests against one.

    python -m benchmarks.cpu_decode --peer-python ~/torch-env/bin/python

Ours goes the whole way of a streamed answer: prompt ids into the engine, tokens out of it one by one, text made of
them. The peer is `generate` of transformers with its KV cache, on the same weights (the default model, dequantised to
float32) and the same prompt ids, in its own process. Decode speed is tokens after the first over the time they took.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import queue
import sys
import time
from typing import Any

from benchmarks import common, quiet
from benchmarks.peers import TransformersPeer


@dataclasses.dataclass(frozen=True)
class Streamed:
    """When the tokens of each request arrived, in seconds since all were submitted, and what they were."""

    times_s: list[list[float]]
    token_ids: list[list[int]]

    @property
    def wall_s(self) -> float:
        return max(times[-1] for times in self.times_s)

    @property
    def tokens_per_s(self) -> float:
        """All tokens over the whole time, prompts included."""
        return sum(map(len, self.times_s)) / self.wall_s

    @property
    def decode_tokens_per_s(self) -> float:
        return decode_rate(self.times_s)


def decode_rate(times_s: list[list[float]]) -> float:
    """Tokens per second while all requests decode: from when the last one got its first token to the first end."""
    start, end = max(times[0] for times in times_s), min(times[-1] for times in times_s)
    if end <= start:
        raise ValueError("the requests never decoded together; ask for more tokens")
    return sum(sum(start < t <= end for t in times) for times in times_s) / (end - start)


def stream(llm: Any, prompts: list[list[int]], new_tokens: int) -> Streamed:
    """Greedy answers of exactly `new_tokens` tokens, detokenised as they come."""
    from sparsejax import SamplingParams
    from sparsejax.detokenize import Choice
    from sparsejax.request import Request

    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    events: queue.SimpleQueue = queue.SimpleQueue()
    requests = [Request(f"benchmark-{i}", tuple(ids), params) for i, ids in enumerate(prompts)]
    choices = [Choice(llm.tokenizer, params, 0, ids[-16:]) for ids in prompts]
    number = {request.request_id: i for i, request in enumerate(requests)}
    times: list[list[float]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    unfinished = len(requests)
    start = time.perf_counter()
    for request in requests:
        llm.built.engine.submit(request, events.put)
    while unfinished:
        event = events.get()
        i = number[event.request_id]
        choices[i].feed(event)
        times[i] += [time.perf_counter() - start] * len(event.token_ids)
        tokens[i] += event.token_ids
        if event.finish_reason is not None:
            if event.finish_reason != "length":
                raise RuntimeError(f"request {i} ended with {event.finish_reason}: {event.error}")
            unfinished -= 1
    return Streamed(times, tokens)


def measure_peer(peer: TransformersPeer, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    found = peer.ask("generate", prompts=prompts, new_tokens=new_tokens)
    found["tokens_per_s"] = len(prompts) * new_tokens / found["wall_s"]
    if found["first_token_s"] is not None:
        found["decode_tokens_per_s"] = (new_tokens - 1) / (found["wall_s"] - found["first_token_s"])
    return found


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("cpu_decode", __doc__.splitlines()[0])
    parser.add_argument("--model", help="as for sparsejax; the peer needs a GGUF file")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--peer-python", type=pathlib.Path, help="interpreter with torch, transformers and gguf")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=16, help="concurrent requests")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-batch", action="store_true", help="also the peer with all prompts as one batch")
    arguments = parser.parse_args(argv)
    run = common.Run("cpu_decode", arguments)
    result, facts = measure(arguments)
    run.finish(result, **facts)
    return 0


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    from sparsejax import LLM

    new_tokens, count = arguments.new_tokens, arguments.requests
    length = arguments.prompt_tokens + new_tokens
    llm = LLM(
        arguments.model,
        load_format=arguments.load_format,
        dtype="float32",
        max_model_len=length,
        max_num_seqs=count,
        generation_config="none",
        prefix_cache=False,  # the same prompts again and again
    )
    with llm:
        ids = llm.tokenizer.encode(common.prose())
        prompts = common.windows(ids, count, arguments.prompt_tokens)
        sides: dict[str, Any] = {
            "one": lambda: stream(llm, prompts[:1], new_tokens),
            "many": lambda: stream(llm, prompts, new_tokens),
        }
        peer = None
        try:
            if arguments.peer_python:
                peer = TransformersPeer(arguments.peer_python, pathlib.Path(llm.built.model_path))
                sides["peer"] = lambda: measure_peer(peer, prompts[:1], new_tokens)
                if arguments.peer_batch:
                    sides["peer many"] = lambda: measure_peer(peer, prompts, new_tokens)
            for side in sides.values():
                side()  # warm
            pids = [peer.pid] if peer else []
            rounds = quiet.alternate(sides, arguments.rounds, patience_s=arguments.patience_s, pids=pids)
        finally:
            if peer is not None:
                peer.__exit__()
    result = judge(rounds.found, peer.facts if peer else None, count)
    facts = {
        **common.device_facts(),
        **rounds.facts,
        "model": llm.built.model_name,
        "dtype": "float32",
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": new_tokens,
    }
    return result, facts


def judge(found: dict[str, list[Any]], peer_facts: dict[str, Any] | None, count: int) -> dict[str, Any]:
    """Medians, ratios and the printed table."""
    decode = {name: [x.decode_tokens_per_s for x in found[name]] for name in ("one", "many")}
    whole = {name: [x.tokens_per_s for x in found[name]] for name in ("one", "many")}
    first = [x.times_s[0][0] for x in found["one"]]
    result: dict[str, Any] = {
        "one": {
            "decode_tokens_per_s": common.summary(decode["one"]),
            "tokens_per_s": common.summary(whole["one"]),
            "first_token_s": common.summary(first),
        },
        "many": {
            "requests": count,
            "decode_tokens_per_s": common.summary(decode["many"]),
            "tokens_per_s": common.summary(whole["many"]),
        },
        "many_over_one": {
            "decode": common.ratio(decode["many"], decode["one"]),
            "whole": common.ratio(whole["many"], whole["one"]),
        },
    }
    rows = [_row("sparsejax, 1 request", decode["one"], whole["one"])]
    rows.append(_row(f"sparsejax, {count} requests", decode["many"], whole["many"]))
    lines = []
    if peer_facts is not None:
        decode["peer"] = [x["decode_tokens_per_s"] for x in found["peer"]]
        whole["peer"] = [x["tokens_per_s"] for x in found["peer"]]
        ours, theirs = found["one"][0].token_ids[0], found["peer"][0]["token_ids"][0]
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        result["peer"] = {
            **peer_facts,
            "decode_tokens_per_s": common.summary(decode["peer"]),
            "tokens_per_s": common.summary(whole["peer"]),
            "first_token_s": common.summary([x["first_token_s"] for x in found["peer"]]),
            "same_first_tokens": same,
        }
        result["one_over_peer"] = {
            "decode": common.ratio(decode["one"], decode["peer"]),
            "whole": common.ratio(whole["one"], whole["peer"]),
        }
        rows.append(_row("transformers, 1 request", decode["peer"], whole["peer"]))
        lines.append(_verdict("one request over transformers, decode", result["one_over_peer"]["decode"], 2.5))
        lines.append(_verdict("one request over transformers, whole", result["one_over_peer"]["whole"]))
        if "peer many" in found:
            whole["peer many"] = [x["tokens_per_s"] for x in found["peer many"]]
            result["peer"]["batch_tokens_per_s"] = common.summary(whole["peer many"])
            result["many_over_peer_batch"] = common.ratio(whole["many"], whole["peer many"])
            rows.append(_row(f"transformers, batch of {count}", None, whole["peer many"]))
            lines.append(_verdict(f"{count} requests over transformers' batch, whole", result["many_over_peer_batch"]))
        lines.append(f"the first {same} of {len(ours)} greedy tokens are the same")
    lines.insert(0, _verdict(f"{count} requests over one, whole", result["many_over_one"]["whole"]))
    lines.insert(0, _verdict(f"{count} requests over one, decode", result["many_over_one"]["decode"], 5.0))
    header = ("tokens/s, median", "decode", "spread", "with prompt", "spread")
    print(common.table(header, rows), *lines, sep="\n")
    return result


def _row(name: str, decode: list[float] | None, whole: list[float]) -> list[str]:
    cells = []
    for values in (decode, whole):
        if values is None:
            cells += ["-", "-"]
        else:
            found = common.summary(values)
            cells += [f"{found['median']:.1f}", f"{found['spread']:.0%}"]
    return [name, *cells]


def _verdict(name: str, found: dict[str, float], goal: float | None = None) -> str:
    wanted = "" if goal is None else f"  goal {goal:g}: {'met' if found['ratio'] >= goal else 'missed'}"
    return f"{name}: x {found['ratio']:.2f} (pairs {found['least_pair']:.2f} to {found['largest_pair']:.2f}){wanted}"


if __name__ == "__main__":
    sys.exit(main())
