"""Load on running OpenAI-compatible servers, open or closed loop, with the printout of `vllm bench serve`.

    python -m benchmarks.serve_load --base-url http://127.0.0.1:8000 --max-concurrency 16
    python -m benchmarks.serve_load --base-url ours=http://127.0.0.1:8000 peer=http://127.0.0.1:8001 \\
        --max-concurrency 1 4 16 --random-input-len 128 --random-output-len 64 --ignore-eos --rounds 3 --json

Several servers take turns, each round with new prompts that are the same for all of one tokenizer, and are compared
with the first. Times are those of the client's socket: TTFT ends with the first byte of the first piece of text; E2EL
with the first byte of the last one; TPOT is the time between the two by the tokens after the first; ITL the time
between pieces. Output tokens are the server's `usage`; a server that gives none is believed when it says that it
stopped for length. A run is invalid, marked so and compared with nothing, if a request failed, if random prompts or
(with --ignore-eos) answers have not as many tokens as asked for, if tokens were guessed, or if random prompts were
cached.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import pathlib
import re
import sys
from typing import Any

import httpx
import numpy as np

from benchmarks import common, quiet
from benchmarks.load import client, metrics, prompts

_DATASETS = {"prefix_repetition": "prefix-repetition", "custom": "jsonl"}
_ENDPOINTS = {path: name for name, path in client.ENDPOINTS.items()}


@dataclasses.dataclass(frozen=True)
class Target:
    """One server: how it is called here and by itself, and who counts its tokens."""

    name: str
    root: str
    model: str
    counter: prompts.Counter
    extra: dict[str, Any]
    version: str | None


def named(text: str) -> tuple[str | None, str]:
    """`NAME=REST` in two; (None, text) without a name, which is letters, digits, dots, dashes and underlines."""
    match = re.fullmatch(r"([\w.-]+)=(.*)", text, re.DOTALL)
    return (match[1], match[2]) if match else (None, text)


def goals(texts: list[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` in milliseconds, as a dict."""
    found = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            raise SystemExit(f"--goodput takes NAME:MILLISECONDS, got {text!r}") from None
        if name not in ("ttft", "tpot", "e2el") or not found[name] > 0:
            raise SystemExit(f"--goodput takes ttft, tpot and e2el in milliseconds above 0, got {text!r}")
    return found


def extra_bodies(texts: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """Fields to add to requests, by server: what has no name is for all."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in texts:
        name, rest = named(text)
        try:
            fields = json.loads(rest)
        except ValueError:
            raise SystemExit(f"--extra-body takes [NAME=]JSON, got {text!r}") from None
        if not isinstance(fields, dict) or (name is not None and name not in found):
            raise SystemExit(f"--extra-body takes JSON objects and names of --base-url, got {text!r}")
        for key in names if name is None else [name]:
            found[key] |= fields
    return found


def find_targets(arguments: argparse.Namespace, http: httpx.Client) -> list[Target]:
    """Asks each server for its model and looks for its tokenizer; SystemExit if one does not answer."""
    roots: dict[str, str] = {}
    for text in arguments.base_url:
        name, url = named(text)
        name = name or ("server" if len(arguments.base_url) == 1 else url)
        if name in roots:
            raise SystemExit(f"--base-url has two servers of the name {name}")
        roots[name] = client.root_of(url)
    extra = extra_bodies(arguments.extra_body, list(roots))
    found = []
    for name, root in roots.items():
        try:
            model = arguments.model or http.get(f"{root}/v1/models").raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            raise SystemExit(f"{name}: {root}/v1/models names no model ({error}); name it with --model") from None
        counter = prompts.server_counter(http, root, model) or prompts.local_counter() or prompts.guess()
        found.append(Target(name, root, model, counter, extra[name], version_of(http, root)))
    for target in found:
        exact = "" if target.counter.exact else ", which is a guess for another model"
        print(f"{target.name}: {target.model}, tokens counted by {target.counter.how}{exact}", flush=True)
    return found


def version_of(http: httpx.Client, root: str) -> str | None:
    """What the server says at /version, if anything."""
    try:
        return http.get(f"{root}/version").raise_for_status().json().get("version")
    except (httpx.HTTPError, ValueError, AttributeError):
        return None


def make_prompts(
    arguments: argparse.Namespace, counter: prompts.Counter, rng: np.random.Generator, count: int
) -> list[prompts.Prompt]:
    if arguments.dataset_name == "jsonl":
        chat = arguments.endpoint == "chat"
        found = prompts.file_prompts(arguments.dataset_path, count, arguments.custom_output_len, chat)
        # For servers that do not say how long a prompt was.
        return [p._replace(tokens=counter.count(p.content)) if isinstance(p.content, str) else p for p in found]
    if arguments.dataset_name == "random":
        lengths = arguments.random_input_len, arguments.random_output_len, arguments.random_range_ratio
        return prompts.random_prompts(rng, count, *lengths, counter)
    return prompts.prefix_prompts(
        rng,
        count,
        arguments.prefix_repetition_prefix_len,
        arguments.prefix_repetition_suffix_len,
        arguments.prefix_repetition_num_prefixes,
        arguments.prefix_repetition_output_len,
        counter,
    )


def ask_of(arguments: argparse.Namespace, target: Target, prompt: prompts.Prompt) -> client.Ask:
    body: dict[str, Any] = {"model": target.model}
    if arguments.endpoint == "chat":
        text = isinstance(prompt.content, str)
        body["messages"] = [{"role": "user", "content": prompt.content}] if text else prompt.content
    else:
        body["prompt"] = prompt.content
    body |= {"max_tokens": prompt.output_tokens, "temperature": arguments.temperature, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if arguments.ignore_eos:
        body["ignore_eos"] = True
    return client.Ask(json.dumps(body | target.extra).encode(), prompt.tokens, prompt.output_tokens)


class Load:
    """The same load on every server: `max_concurrency` requests at once, if given. Each turn has new prompts."""

    def __init__(self, arguments: argparse.Namespace, max_concurrency: int | None) -> None:
        self.arguments, self.max_concurrency = arguments, max_concurrency
        self._turns: collections.Counter[str] = collections.Counter()

    def turn(self, target: Target) -> metrics.Turn:
        """One turn of one server. Turns of the same number have the same prompts, if tokenizers agree."""
        options, number = self.arguments, self._turns[target.name]
        self._turns[target.name] += 1
        made, warm, gaps = (
            np.random.default_rng([options.seed, self.max_concurrency or 0, number, part]) for part in range(3)
        )
        asked = make_prompts(options, target.counter, made, options.num_prompts)
        before = make_prompts(options, target.counter, warm, options.num_warmups)
        due = prompts.arrivals(gaps, len(asked), options.request_rate, options.burstiness)
        asks = [[ask_of(options, target, prompt) for prompt in some] for some in (asked, before)]
        records, seconds = asyncio.run(self._drive(target, *asks, due))
        count = target.counter.of_answer if target.counter.exact else None
        turn = metrics.Turn(
            [(prompt.tokens, prompt.output_tokens) for prompt in asked],
            [client.read(record, count) for record in records],
            seconds,
            hashlib.sha256(json.dumps([prompt.content for prompt in asked]).encode()).hexdigest()[:16],
            [] if math.isinf(options.request_rate) else [record.sent_s - record.due_s for record in records],
        )
        shown = f"{target.name}, concurrency {self.max_concurrency or 'any'}, turn {number + 1}"
        print(f"{shown}: {turn.output_tokens_per_s:.2f} tok/s", flush=True)
        return turn

    async def _drive(
        self, target: Target, asks: list[client.Ask], warm: list[client.Ask], due: list[float]
    ) -> tuple[list[client.Record], float]:
        path = client.ENDPOINTS[self.arguments.endpoint]
        async with client.Client(target.root, path, self.arguments.api_key, self.arguments.timeout_s) as sender:
            before, _ = await client.drive(sender, warm, [0.0] * len(warm), self.max_concurrency)
            failed = [record for record in before if record.failure]
            if failed:
                raise SystemExit(f"{target.name}: a warm-up failed: {failed[0].failure}: {failed[0].detail}")
            return await client.drive(sender, asks, due, self.max_concurrency)

    def judge(self, targets: list[Target], rounds: quiet.Rounds) -> dict[str, Any]:
        """Prints and returns every server's numbers and how they compare with the first one's."""
        options, servers = self.arguments, {}
        text = options.endpoint == "completions"  # chat templates add tokens, the same to every prompt
        for target in targets:
            found = metrics.judge(
                rounds.found[target.name],
                options.metric_percentiles,
                options.goodput,
                forced=options.ignore_eos,
                counted=text and target.counter.exact and options.dataset_name != "jsonl",
                distinct=text and options.dataset_name == "random",
            )
            found["max_concurrency"] = self.max_concurrency
            found["request_rate"] = None if math.isinf(options.request_rate) else options.request_rate
            if options.save_detailed:
                found["requests"] = [rows(turn) for turn in rounds.found[target.name]]
            servers[target.name] = found
            print(f"\n{target.name}\n{metrics.block(found, options.percentile_metrics)}", flush=True)
        base = targets[0].name
        ratios = {
            f"{target.name} / {base}": metrics.compare(rounds.found[base], rounds.found[target.name])
            for target in targets[1:]
            if servers[base]["valid"] and servers[target.name]["valid"]
        }
        return {"quiet": rounds.facts, "servers": servers, "ratios": ratios}


def rows(turn: metrics.Turn) -> list[dict[str, Any]]:
    """One object per request; seconds from the turn's first request."""
    first_s = min(outcome.sent_s for outcome in turn.outcomes)
    found = []
    for outcome in turn.outcomes:
        row: dict[str, Any] = {"sent_s": outcome.sent_s - first_s, "end_s": outcome.end_s - first_s}
        if isinstance(outcome, client.Answer):
            row |= {"ttft_s": outcome.ttft_s, "gaps_s": outcome.gaps_s}
            row |= {"prompt_tokens": outcome.prompt_tokens, "output_tokens": outcome.output_tokens}
        else:
            row |= {"failure": outcome.kind, "detail": outcome.detail}
        found.append(row)
    return found


HEADER = ("concurrency", "server", "tok/s", "TTFT ms", "TPOT ms", "E2EL ms", "tok/s ratio", "least", "largest")


def table(found: dict[str, Any]) -> str:
    """Medians of all loads and servers, side by side."""
    lines = []
    for concurrency, load in found.items():
        for name, result in load["servers"].items():
            cells = [
                f"{result['ms'][key]['median']:.1f}" if key in result["ms"] else "-" for key in ("ttft", "tpot", "e2el")
            ]
            ratio = next((r for pair, r in load["ratios"].items() if pair.startswith(f"{name} / ")), None)
            speeds = ratio["output_tokens_per_s"] if ratio else None
            ratios = [f"{speeds[key]:.2f}" if speeds else "-" for key in ("ratio", "least_pair", "largest_pair")]
            speed = f"{result['output_tokens_per_s']:.2f}" if result["valid"] else "INVALID"
            lines.append((concurrency, name, speed, *cells, *ratios))
    return common.table(HEADER, lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    many: dict[str, Any] = {"nargs": "+"}
    parser.add_argument("--base-url", **many, default=["http://127.0.0.1:8000"], metavar="[NAME=]URL")
    parser.add_argument("--model", help="default: the first one that each server names")
    parser.add_argument("--api-key")
    parser.add_argument("--endpoint", type=_endpoint, default="completions", help="completions or chat")
    parser.add_argument("--request-rate", type=float, default=math.inf, help="per second; inf sends as places are free")
    parser.add_argument(
        "--burstiness", type=float, default=1.0, help="shape of the gaps: 1 is Poisson, below in bursts"
    )
    parser.add_argument("--max-concurrency", type=int, **many, default=[None], metavar="N", help="one load for each")
    parser.add_argument("--num-prompts", type=int, default=64, help="requests of a turn")
    parser.add_argument("--num-warmups", type=int, default=2, help="requests before each turn, not counted")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each server")
    parser.add_argument("--dataset-name", type=_dataset, default="random", help="random, prefix-repetition or jsonl")
    parser.add_argument("--dataset-path", type=pathlib.Path, metavar="FILE.jsonl")
    parser.add_argument("--custom-output-len", type=int, default=128, help="of lines without output_tokens")
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", type=int, default=128)
    parser.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="lengths are x (1 - this) to x (1 + this)"
    )
    parser.add_argument("--prefix-repetition-prefix-len", type=int, default=256)
    parser.add_argument("--prefix-repetition-suffix-len", type=int, default=256)
    parser.add_argument("--prefix-repetition-num-prefixes", type=int, default=10)
    parser.add_argument("--prefix-repetition-output-len", type=int, default=128)
    parser.add_argument(
        "--ignore-eos", action="store_true", help="every answer has all its tokens, or the run is invalid"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--extra-body", **many, default=[], metavar="[NAME=]JSON", help="fields to add to requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for a whole answer")
    parser.add_argument(
        "--goodput", **many, default=[], metavar="METRIC:MS", help="count answers with ttft, tpot, e2el below"
    )
    parser.add_argument("--percentile-metrics", type=_metrics, default="ttft,tpot,itl,e2el", help="which to print")
    parser.add_argument("--metric-percentiles", type=_percentiles, default="99", help="such as 50,90,99")
    parser.add_argument("--save-detailed", action="store_true", help="a line for each request in the JSON")
    parser.add_argument("--server-pids", type=int, nargs="+", default=[], help="whose CPU time is no disturbance")


def _endpoint(text: str) -> str:
    name = _ENDPOINTS.get(text, text)
    if name not in client.ENDPOINTS:
        raise argparse.ArgumentTypeError(f"completions or chat, not {text!r}")
    return name


def _dataset(text: str) -> str:
    name = _DATASETS.get(text, text)
    if name not in ("random", "prefix-repetition", "jsonl"):
        raise argparse.ArgumentTypeError(f"random, prefix-repetition or jsonl, not {text!r}")
    return name


def _metrics(text: str) -> list[str]:
    found = text.split(",")
    if unknown := sorted(set(found) - set(metrics.TITLES)):
        raise argparse.ArgumentTypeError(f"{', '.join(metrics.TITLES)}, not {', '.join(unknown)}")
    return found


def _percentiles(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if not all(0 <= percent <= 100 for percent in found):
        raise argparse.ArgumentTypeError("percentiles are from 0 to 100")
    return found


def check(arguments: argparse.Namespace) -> None:
    """Refuses what could not be measured."""
    for name in ("request_rate", "burstiness", "num_prompts", "rounds", "timeout_s"):
        if not getattr(arguments, name) > 0:
            raise SystemExit(f"--{name.replace('_', '-')} must be above 0")
    if not 0 <= arguments.random_range_ratio < 1:
        raise SystemExit("--random-range-ratio must be at least 0 and below 1")
    if any(number is not None and number < 1 for number in arguments.max_concurrency):
        raise SystemExit("--max-concurrency must be at least 1")
    if (arguments.dataset_name == "jsonl") != (arguments.dataset_path is not None):
        raise SystemExit("--dataset-path belongs to --dataset-name jsonl, and is needed there")
    if arguments.goodput and not isinstance(arguments.goodput, dict):
        arguments.goodput = goals(arguments.goodput)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("serve_load", __doc__.splitlines()[0])
    add_options(parser)
    arguments = parser.parse_args(argv)
    check(arguments)
    run = common.Run("serve_load", arguments)
    run.manifest["arguments"]["api_key"] = bool(arguments.api_key)
    found = {}
    headers = client.headers_of(arguments.api_key)
    with httpx.Client(timeout=arguments.timeout_s, headers=headers, trust_env=False) as http:
        targets = find_targets(arguments, http)
        for concurrency in arguments.max_concurrency:
            load = Load(arguments, concurrency)
            sides = {target.name: functools.partial(load.turn, target) for target in targets}
            rounds = quiet.alternate(
                sides, arguments.rounds, patience_s=arguments.patience_s, pids=arguments.server_pids
            )
            found[str(concurrency or "any")] = load.judge(targets, rounds)
    print(table(found))
    facts = {
        "servers": {
            target.name: {
                # Some servers call a model by its path, which means nothing elsewhere.
                "model": pathlib.PurePath(target.model).name if target.model.startswith("/") else target.model,
                "version": target.version,
                "tokens_counted_by": target.counter.how,
            }
            for target in targets
        },
        "client": {"httpx": importlib.metadata.version("httpx")},
    }
    run.finish({"loads": found}, **facts)
    return int(not all(result["valid"] for load in found.values() for result in load["servers"].values()))


if __name__ == "__main__":
    sys.exit(main())
