"""Many agents that share a system prompt and tools, in a cache for a tenth of them, with and without chains.

    python -m benchmarks.agents --json       # 100 agents, 20 turns each, about a quarter of an hour on two cores
    python -m benchmarks.agents --quick      # random weights, a minute: does it run?

Every agent sends its next turn when its last one is answered and a place is free; --concurrency are under way at once.
All of them live through the whole run, while the cache holds --share of what they would take uncompressed: idle
conversations leave the device and come back. The turns are cut in --parts; after each part the same server answers some
of the same requests without chains (--sample of each part, drawn by the seed, at the same concurrency), so that what
else the machine does hits both sides. Throughput is requests over seconds, of equally many parts on both sides.

Errors, lost chains and prefill are counted by the server's own answers: a chain is lost if a turn after the first does
not go on from where the one before ended. What must be computed at least are the tokens that no earlier turn of the
agent had and, in first turns, those behind the shared prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks import common, quiet
from benchmarks.conversation import Script, script, system_prompt
from benchmarks.load import client, metrics
from benchmarks.served import PATH, Conversation, Server, model_of, quick_server, tokens_of, without_opening

LEAST_RATIO = 3.0
"""Goal: requests per second over those of the same server without chains."""
_TEMPLATE_TOKENS = 6
"""A guess of what a chat template puts around a message; only sizes the cache."""
QUICK: dict[str, Any] = {
    "agents": 6,
    "turns": 4,
    "concurrency": 3,
    "parts": 2,
    "sample": 3,
    "budget": 64,
    "share": 0.5,
    "result_tokens": 130,
    "output_tokens": 3,
}


@dataclasses.dataclass(frozen=True)
class Done:
    """One request: agent and turn, and what came back."""

    agent: int
    turn: int
    outcome: client.Answer | client.Failure

    @property
    def answer(self) -> client.Answer | None:
        return self.outcome if isinstance(self.outcome, client.Answer) else None


# Numbers


def status_of(answer: client.Answer) -> str:
    return (answer.chain or {}).get("status") or "none"


def origin_of(answer: client.Answer) -> str:
    """The tier that a chain came back from."""
    return (answer.chain or {}).get("restored_from") or "device"


def shared_tokens(firsts: Sequence[client.Answer]) -> int:
    """Tokens that first turns took over from others: the most that one of them did."""
    return max((answer.cached_tokens or 0 for answer in firsts), default=0)


def needed(done: Mapping[tuple[int, int], client.Answer]) -> int:
    """Prompt tokens that no earlier turn of the agent had; of first turns those behind the shared prompt.

    The last token that a turn samples has no row yet, so it belongs to the next one.
    """
    shared = shared_tokens([answer for (_, turn), answer in done.items() if turn == 1])
    total = 0
    for (agent, turn), answer in done.items():
        before = done.get((agent, turn - 1))
        known = before.prompt_tokens + before.output_tokens - 1 if before is not None else shared if turn == 1 else 0
        total += answer.prompt_tokens - known
    return total


def chains(done: Sequence[Done]) -> dict[str, Any]:
    """What the side with chains says of its turns."""
    answers = {(one.agent, one.turn): one.answer for one in done if one.answer is not None}
    firsts = [answer for (_, turn), answer in answers.items() if turn == 1]
    lost = 0
    for (agent, turn), answer in answers.items():
        before = answers.get((agent, turn - 1))
        if turn > 1 and before is not None:
            lost += (answer.cached_tokens or 0) < before.prompt_tokens + before.output_tokens - 1
    prompt = sum(answer.prompt_tokens for answer in answers.values())
    cached = sum(answer.cached_tokens or 0 for answer in answers.values())
    least = needed(answers)
    return {
        "turns": len(answers),
        "lost_chains": lost,
        "status": dict(collections.Counter(map(status_of, answers.values()))),
        "restored_from": dict(collections.Counter(origin_of(answer) for answer in answers.values())),
        "first_turns_with_reuse": sum(bool(answer.cached_tokens) for answer in firsts),
        "first_turns": len(firsts),
        "first_turn_reused_tokens": sum(answer.cached_tokens or 0 for answer in firsts),
        "prompt_tokens": prompt,
        "prefilled_tokens": prompt - cached,
        "needed_tokens": least,
        "prefilled_over_needed": (prompt - cached) / least if least else 0.0,
        "longest_context": max((a.prompt_tokens + a.output_tokens for a in answers.values()), default=0),
    }


def side_of(done: Sequence[Done], seconds: Sequence[float]) -> dict[str, Any]:
    """Throughput and failures of one side; `seconds` by part."""
    answers = [one.answer for one in done if one.answer is not None]
    failures = [one.outcome for one in done if isinstance(one.outcome, client.Failure)]
    total = sum(seconds)
    return {
        "requests": len(done),
        "failed_requests": len(failures),
        "failures": dict(collections.Counter(failure.kind for failure in failures)),
        "failure_examples": {failure.kind: failure.detail for failure in reversed(failures)},
        "seconds_by_part": list(seconds),
        "requests_per_s": len(answers) / total,
        "output_tokens_per_s": sum(answer.output_tokens for answer in answers) / total,
        "prefilled_tokens": sum(a.prompt_tokens - (a.cached_tokens or 0) for a in answers),
        "peak_concurrency": metrics.peak([one.outcome for one in done]) if done else 0,
        "ms": {
            name: metrics.latencies(values, [50.0, 95.0, 99.0])
            for name, values in metrics.samples_ms(answers).items()
            if values and name in ("ttft", "e2el")
        },
    }


def over(chained: Sequence[Sequence[Done]], plain: Sequence[Sequence[Done]], seconds: Sequence[Sequence[float]]) -> Any:
    """Requests per second with chains over those without, part by part: the ratio, and the least and largest part."""
    rates = [
        [sum(one.answer is not None for one in part) / time_s for part, time_s in zip(parts, times, strict=True)]
        for parts, times in zip((chained, plain), seconds, strict=True)
    ]
    if not all(rates[1]):
        return None
    pairs = [a / b for a, b in zip(*rates, strict=True)]
    totals = [
        sum(one.answer is not None for part in parts for one in part) / sum(times)
        for parts, times in zip((chained, plain), seconds, strict=True)
    ]
    return {"ratio": totals[0] / totals[1], "least_part": min(pairs), "largest_part": max(pairs)}


def reasons(result: Mapping[str, Any], agents: int, turns: int) -> list[str]:
    """Why a run is invalid; nothing if it is valid."""
    found = [
        f"{result[name]['failed_requests']} of {result[name]['requests']} requests failed, {name.replace('_', ' ')}"
        for name in ("chains", "no_chains")
        if result[name]["failed_requests"]
    ]
    if (done := result["chains"]["turns"]) < agents * turns:
        found.append(f"{done} of {agents * turns} turns were answered")
    if result["no_chains"]["cached_tokens"]:
        found.append(f"{result['no_chains']['cached_tokens']} tokens were taken over without chains")
    resumed = result["chains"]["status"].get("resumed", 0)
    if turns > 1 and not resumed:
        found.append("no turn resumed a chain")
    return found


def goals(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was to be shown, what was found, and whether that is enough."""
    found, ratio = result["chains"], result["over"]
    return [
        {"goal": "no failed request", "found": found["failed_requests"], "met": not found["failed_requests"]},
        {"goal": "no lost chain", "found": found["lost_chains"], "met": not found["lost_chains"]},
        {
            "goal": "first turns reuse the shared prompt",
            "found": f"{found['first_turns_with_reuse']} of {found['first_turns']}",
            "met": found["first_turns_with_reuse"] > 0,
        },
        {
            "goal": f"requests per second at least {LEAST_RATIO:g}x without chains",
            "found": ratio["ratio"] if ratio else None,
            "met": bool(ratio) and ratio["ratio"] >= LEAST_RATIO,
        },
    ]


# Measuring


class Fleet:
    """The agents and their server.

    Args:
      arguments: of the command line.
      scripts: one for each agent.
      fields: of every request: model and method.
      shared: tokens that all first prompts begin with.
    """

    def __init__(
        self, arguments: argparse.Namespace, scripts: Sequence[Script], fields: Mapping[str, Any], shared: int
    ) -> None:
        self.arguments = arguments
        length = arguments.output_tokens
        every = {**fields, "temperature": 0.0, "max_tokens": length, "min_tokens": length, **arguments.extra_body}
        self.talks = [Conversation(one, every, {"chain_shared_tokens": shared}) for one in scripts]

    async def live(self, sender: client.Client, last: int) -> list[Done]:
        """All agents up to a turn; each sends its next one when it has its answer and there is a place."""
        places = asyncio.Semaphore(self.arguments.concurrency)
        rng = random.Random(self.arguments.seed + last)

        async def one(agent: int, talk: Conversation) -> list[Done]:
            found = []
            while talk.turn < last:
                # Semaphores wake who has waited longest, so agents take turns.
                async with places:
                    outcome = client.read(await sender.send(talk.ask()))
                found.append(Done(agent, talk.turn + 1, outcome))
                if isinstance(outcome, client.Failure):
                    break
                talk.take(outcome.text, outcome.chain)
                if self.arguments.think_s:
                    await asyncio.sleep(rng.uniform(0, 2 * self.arguments.think_s))
            return found

        parts = await asyncio.gather(*(one(agent, talk) for agent, talk in enumerate(self.talks)))
        return [done for part in parts for done in part]

    async def again(self, sender: client.Client, some: Sequence[tuple[int, int]]) -> list[Done]:
        """Turns that were answered before, without chains; every request has its whole context."""
        places = asyncio.Semaphore(self.arguments.concurrency)

        async def one(agent: int, turn: int) -> Done:
            talk = self.talks[agent]
            plain = Conversation(talk.script, talk.fields)
            plain.messages, plain.turn = talk.messages, talk.turn
            async with places:
                return Done(agent, turn, client.read(await sender.send(plain.ask(turn))))

        return list(await asyncio.gather(*(one(agent, turn) for agent, turn in some)))


def drawn(rng: random.Random, done: Sequence[Done], number: int) -> list[tuple[int, int]]:
    """So many of the answered turns, spread evenly over the numbers of turns, in an order that is drawn."""
    turns = sorted({one.turn for one in done})
    by_turn = {turn: [one.agent for one in done if one.turn == turn and one.answer is not None] for turn in turns}
    found: list[tuple[int, int]] = []
    while len(found) < min(number, sum(map(len, by_turn.values())) + len(found)):
        for turn in rng.sample(turns, len(turns)):
            if by_turn[turn] and len(found) < number:
                agent = by_turn[turn].pop(rng.randrange(len(by_turn[turn])))
                found.append((agent, turn))
    rng.shuffle(found)
    return found


def cache_bytes(arguments: argparse.Namespace, spec: str, dense_tokens: int) -> int:
    """The share of the agents' uncompressed rows, in bytes of the server's storage; imports jax."""
    from sparsejax import registry
    from sparsejax.models.load import load_spec

    options = dict(zip(arguments.server_options[::2], arguments.server_options[1::2], strict=False))
    model = load_spec(options.get("--model"), options.get("--load-format", "auto"), options.get("--dtype", "auto"))
    _, storage = registry.resolve(spec)
    per_token = storage.bytes_per_token(model.geometry(16, model.max_model_len))
    return int(arguments.share * dense_tokens * per_token)


async def measure(arguments: argparse.Namespace, run: common.Run) -> dict[str, Any]:
    from sparsejax import registry

    spec = registry.sized(arguments.method, arguments.budget).replace(" ", "")
    tokens = dense_tokens(arguments)
    size = cache_bytes(arguments, spec, tokens * arguments.agents)
    window = 256 * -(-(tokens + 256) // 256)
    options = ["--sparse-method", spec, "--kv-cache-memory-bytes", str(size), "--max-model-len", str(window)]
    options += ["--max-num-seqs", str(arguments.concurrency), "--max-waiting", str(4 * arguments.agents)]
    result: dict[str, Any] = {"spec": spec, "cache_bytes": size, "dense_tokens_per_agent": tokens, "window": window}
    with Server([*arguments.server_options, *options]) as server, httpx.Client(timeout=60, trust_env=False) as http:
        model = model_of(http, server.root)
        count = without_opening(model.counter.count)
        seeds = range(arguments.seed, arguments.seed + arguments.agents + 1)
        *scripts, extra = [script(count, arguments.turns, arguments.result_tokens, seed) for seed in seeds]
        fields = {"model": model.name, "sparse_method": spec}
        shared = result["shared_tokens"] = tokens_of(http, server.root, model.name, scripts[0].opening()[:1])
        fleet = Fleet(arguments, scripts, fields, shared)
        parts: tuple[list[list[Done]], list[list[Done]]] = ([], [])
        seconds: tuple[list[float], list[float]] = ([], [])
        others = []
        rng = random.Random(arguments.seed)
        async with client.Client(server.root, PATH, None, arguments.timeout_s) as sender:
            # One more agent comes before the others, with chains and without; nothing is measured of it.
            await Fleet(arguments, [extra], fields, shared).live(sender, 2)
            for number in range(1, arguments.parts + 1):
                before, last = quiet.usage([server.pid]), arguments.turns * number // arguments.parts
                for i in range(2):
                    begun = time.perf_counter()
                    if i == 0:
                        parts[i].append(await fleet.live(sender, last))
                    else:
                        parts[i].append(await fleet.again(sender, drawn(rng, parts[0][-1], arguments.sample)))
                    seconds[i].append(time.perf_counter() - begun)
                others.append(quiet.others_share(before, quiet.usage([server.pid])))
                shown = [f"{len(p[-1])} requests in {s[-1]:.1f} s" for p, s in zip(parts, seconds, strict=True)]
                print(f"to turn {last}: with chains {shown[0]}, without {shown[1]}", flush=True)
                result |= summed(parts, seconds, others, arguments.agents, last)
                run.keep(result, model=model.name)
    result["model"] = model.name
    return result


def summed(
    parts: Sequence[Sequence[Sequence[Done]]],
    seconds: Sequence[Sequence[float]],
    others: Sequence[float | None],
    agents: int,
    turns: int,
) -> dict[str, Any]:
    """Numbers of both sides, with chains first, after so many turns of all agents; by part."""
    chained, plain = ([one for part in side for one in part] for side in parts)
    cached = sum(one.answer.cached_tokens or 0 for one in plain if one.answer is not None)
    result = {
        "answered_turns": turns,
        "chains": side_of(chained, seconds[0]) | chains(chained),
        "no_chains": side_of(plain, seconds[1]) | {"cached_tokens": cached},
        "over": over(*parts, seconds),
        "others_cpu_share": list(others),
    }
    result["invalid_because"] = reasons(result, agents, turns)
    result["valid"] = not result["invalid_because"]
    result["goals"] = goals(result)
    return result


def dense_tokens(arguments: argparse.Namespace) -> int:
    """About what an agent's whole conversation has; counted by the tokenizer of the default model, or by bytes."""
    from benchmarks.load import prompts

    counter = None if arguments.quick else prompts.local_counter()
    count = len if counter is None else counter.count
    talk = script(count, 1, arguments.result_tokens, arguments.seed)
    turn = arguments.result_tokens + arguments.output_tokens + 2 * _TEMPLATE_TOKENS
    opening = count(system_prompt()) + count(talk.goal) + 3 * _TEMPLATE_TOKENS + arguments.output_tokens
    return opening + (arguments.turns - 1) * turn


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=16, help="requests under way at once")
    parser.add_argument("--method", default="snapkv")
    parser.add_argument("--budget", type=int, default=128, help="rows that the method keeps of a conversation")
    parser.add_argument("--share", type=float, default=0.1, help="of the agents' uncompressed rows, for the cache")
    parser.add_argument("--result-tokens", type=int, default=40, help="of each tool's result, at most")
    parser.add_argument("--output-tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--think-s", type=float, default=0.0, help="mean pause of an agent after an answer")
    parser.add_argument("--parts", type=int, default=4, help="that the turns are cut in")
    parser.add_argument("--sample", type=int, default=32, help="requests without chains after each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for a whole answer")
    parser.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="fields to add to requests")
    parser.add_argument("--quick", action="store_true", help="small random model and few agents: a smoke test")
    parser.add_argument("--server-options", nargs=argparse.REMAINDER, default=[], help="must come last")


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("agents", __doc__.splitlines()[0])
    add_options(parser)
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.parts <= arguments.turns:
        raise SystemExit("--parts must be from 1 to --turns")
    with tempfile.TemporaryDirectory(prefix="sparsejax-quick-") as folder:
        if arguments.quick:
            vars(arguments).update(QUICK, **quick_server(pathlib.Path(folder)))
        run = common.Run("agents", arguments)
        result = asyncio.run(measure(arguments, run))
    for name in ("chains", "no_chains"):
        found = result[name]
        print(f"{name}: {found['requests_per_s']:.2f} requests/s, {found['prefilled_tokens']:,} tokens computed")
    common.show_verdict(result)
    run.finish(result, model=result.pop("model"))
    return int(not result["valid"])


if __name__ == "__main__":
    sys.exit(main())
