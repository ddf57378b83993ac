"""What a shared prefix costs once, and what pruning tool results saves and loses: the prefix cache over HTTP.

    python -m benchmarks.prefix_prune --json     # starts its own server; about twenty minutes on two cores
    python -m benchmarks.prefix_prune --quick    # random weights, a minute: does it run?

Three parts, against one server of ours:

sharing   --requests requests at once that begin with the same --prefix-tokens tokens: how many prompt tokens were
          computed (the server's usage). Then one request at a time, in turn with one whose cache_salt nobody shares,
          which computes its whole prompt as without a prefix cache: times to the first token.
pruning   a conversation of tool results, --context tokens. The oldest results go until --share of their tokens are
          gone; then the next turn is asked for. Beside it: the same turn of a client that takes the results out of its
          messages itself ("edited"), with nothing pruned, and with nothing cached ("whole"). "path" is a turn without a
          chain, "chain" one of the conversation's chain.
quality   --cases conversations with passwords in tool results. Some results are pruned, then one that was kept is asked
          for, and one that was not: rank and log-probability of the answer's token, against the same text computed
          whole. Only cases count in which that ranks the answer from what is kept first.

Times are those of the client's socket.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks import common, quiet
from benchmarks.conversation import Message, script, system_prompt
from benchmarks.load import client
from benchmarks.prune_cases import (
    Case,
    Found,
    Question,
    answers,
    goals,
    make_case,
    oldest,
    sharing,
    transcript,
    without,
)
from benchmarks.quality import tasks
from benchmarks.served import PATH, Model, Server, model_of, quick_server, without_opening
from sparsejax.serving.client import Client

PARTS = ("sharing", "pruning", "quality")
PRUNED = ("path", "chain")
SIDES = (*PRUNED, "edited", "unpruned", "whole")
MOST_RANKED = 20
LEAST_CONTEXT = 5500
QUICK: dict[str, Any] = {
    "requests": 6,
    "prefix_tokens": 1200,
    "pairs": 2,
    "rounds": 1,
    "context": 2200,
    "result_tokens": 150,
    "cases": 2,
    "most_tried": 2,
    "results": 6,
    "result_words": 30,
}


class Bench:
    """Asks a running server.

    Args:
      arguments: of the command line.
      http, root: of the server.
      model: what it serves.
      sender: for answers whose time counts.
    """

    def __init__(
        self, arguments: argparse.Namespace, http: httpx.Client, root: str, model: Model, sender: client.Client
    ) -> None:
        self.arguments, self.http, self.root, self.model, self.sender = arguments, http, root, model, sender
        self.client = Client(root, model=model.name, http=http)
        self.count = without_opening(model.counter.count)
        self.failures: list[dict[str, Any]] = []
        self._salts = itertools.count()
        self.fields = {"model": model.name, "temperature": 0.0, **arguments.extra_body}

    def salt(self, what: str = "own") -> str:
        """One that no other request has."""
        return f"{what}-{next(self._salts)}"

    async def ask(self, messages: Sequence[Message], **fields: Any) -> tuple[client.Answer, dict[str, Any]]:
        """One streamed answer of --output-tokens tokens, and its usage. SystemExit if it fails."""
        length = self.arguments.output_tokens
        body = {**self.fields, "messages": list(messages), "max_tokens": length, "min_tokens": length, "chain": False}
        body |= {"stream": True, "stream_options": {"include_usage": True}} | fields
        record = await self.sender.send(client.Ask(json.dumps(body).encode(), None, length))
        answer = client.read(record)
        if isinstance(answer, client.Failure):
            raise SystemExit(f"a request failed: {answer.kind} {answer.detail}")
        usage = next((u for _, line in reversed(record.lines) if b"usage" in line and (u := _usage(line))), {})
        return answer, usage["prompt_tokens_details"] | {"prompt_tokens": usage["prompt_tokens"]}

    def ids(self, messages: Sequence[Message], **fields: Any) -> list[int]:
        body = {"model": self.model.name, "messages": list(messages), **fields}
        return self.http.post(f"{self.root}/tokenize", json=body).raise_for_status().json()["tokens"]

    def prune(
        self, messages: Sequence[Message], indexes: Sequence[int], keep: float, policy: str, **fields: Any
    ) -> int:
        """Prunes messages and waits. Returns the rows that went."""
        wanted = [{"message": index, "keep": keep} for index in indexes]
        return self.client.prune(messages, wanted, policy=policy, **fields).freed_tokens

    # Parts

    async def sharing(self) -> dict[str, Any]:
        options = self.arguments
        goal = options.prefix_tokens - self.count(system_prompt()) - 30  # what the template adds
        own = script(self.count, 1, options.result_tokens, options.seed, goal)
        begun = [*own.opening(), {"role": "assistant", "content": "I have read it."}]
        names = tasks.NAMES

        def conversation(number: int) -> list[Message]:
            ask = f"Question {number} of {names[number % len(names)]}: what is said about it on page {number * 7}?"
            return [*begun, {"role": "user", "content": ask}]

        some = [self.ids(conversation(number)) for number in (1, 2, 37)]
        shared = min(_common(a, b) for a, b in itertools.combinations(some, 2))
        salt = self.salt("shared")
        asks = (self.ask(conversation(number), cache_salt=salt) for number in range(options.requests))
        burst = await asyncio.gather(*asks)
        block = self.client.match(conversation(0), cache_salt=salt).block_size
        found = sharing(shared, block, [(usage["prompt_tokens"], usage["cached_tokens"]) for _, usage in burst])
        found |= {"ttft_s": common.summary([answer.ttft_s for answer, _ in burst])}
        found["all_s"] = max(answer.end_s for answer, _ in burst) - min(answer.sent_s for answer, _ in burst)
        times: dict[bool, list[float]] = {True: [], False: []}
        for pair in range(options.pairs):
            for hit in (True, False) if pair % 2 else (False, True):
                number = options.requests + pair
                answer, usage = await self.ask(conversation(number), cache_salt=salt if hit else self.salt())
                if (usage["cached_tokens"] > 0) != hit:
                    raise SystemExit(
                        f"{usage['cached_tokens']} tokens were cached where {'some' if hit else 'none'} are"
                    )
                times[hit].append(answer.ttft_s)
        found |= {"hit_ttft_s": common.summary(times[True]), "no_cache_ttft_s": common.summary(times[False])}
        return found | {"ttft_over": common.ratio(times[False], times[True])}

    async def pruning(self) -> dict[str, Any]:
        options = self.arguments
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
        for number in range(options.rounds):
            turns = 4 + round(options.context / (options.result_tokens + 40))
            whole = transcript(script(self.count, turns, options.result_tokens, options.seed + number))
            # The same conversation goes on in three ways, so that no turn finds what another one has computed.
            history, new = whole[:-6], whole[-5::2]
            found = await self.round(history, new)
            for name, row in found.items():
                rows[name].append(row)
            shown = [f"{name} {row['ttft_s']:.2f} s, {row['cached_tokens']} cached" for name, row in found.items()]
            print(f"round {number + 1}, {found['path']['history_tokens']} tokens: {'; '.join(shown)}", flush=True)
        sides = {name: {key: [row[key] for row in own] for key in own[0]} for name, own in rows.items()}
        others = [name for name in SIDES if name not in PRUNED]
        ratios = {
            name: {other: common.ratio(sides[other]["ttft_s"], sides[name]["ttft_s"]) for other in others}
            for name in PRUNED
        }
        return {"sides": sides, "over": ratios}

    async def round(self, history: list[Message], new: Sequence[Message]) -> dict[str, dict[str, Any]]:
        """One conversation: the next turn of every side."""
        salt = self.salt("round")
        first, before = await self.ask(history, cache_salt=salt)
        chained, _ = await self.ask(history, cache_salt=salt, chain=True)  # takes over what the first one computed
        chain_id = (chained.chain or {})["id"]
        said = {"role": "assistant", "content": first.text}
        results = {i: self.count(m["content"]) for i, m in enumerate(history) if m["role"] == "tool"}
        gone = oldest(results, self.arguments.share)
        facts = {"history_tokens": before["prompt_tokens"], "freed_tokens": 0}
        facts["deleted_share"] = sum(results[i] for i in gone) / sum(results.values())
        edited = without([*history, said, new[0]], gone)
        cut = _common(self.ids(history), self.ids(edited))
        found = {"unpruned": await self.turn([*history, said, new[0]], facts, cache_salt=salt)}
        found["edited"] = await self.turn(edited, facts, cache_salt=salt)
        found["edited"]["cached_behind_cut"] = max(0, found["edited"]["cached_tokens"] - cut)
        found["whole"] = await self.turn([*history, said, new[1]], facts, cache_salt=self.salt("whole"))
        facts["freed_tokens"] = self.prune(history, gone, 0, "drop", cache_salt=salt, chain_id=chain_id)
        found["path"] = await self.turn([*history, said, new[1]], facts, cache_salt=salt)
        said = {"role": "assistant", "content": chained.text}
        named = {"cache_salt": salt, "chain": True, "chain_id": chain_id}
        found["chain"] = await self.turn([*history, said, new[2]], facts, **named)
        self.client.drop_chain(chain_id)
        return {name: found[name] for name in SIDES}

    async def turn(self, messages: list[Message], facts: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        answer, usage = await self.ask(messages, **fields)
        history, missing = facts["history_tokens"], usage["cached_tokens"] - usage["resident_tokens"]
        kept = (min(history, usage["cached_tokens"]) - missing) / (history - facts["freed_tokens"])
        return {**facts, **usage, "ttft_s": answer.ttft_s, "kept_share": kept}

    async def quality(self) -> dict[str, Any]:
        options = self.arguments
        vocabulary = tasks.Vocabulary.of(lambda text: self._plain_ids(text), common.prose())
        sides = ["full", "edited", "drop", *(f"{policy} {options.keep:g}" for policy in options.policies)]
        found: dict[str, list[tuple[Found, Found]]] = {side: [] for side in sides}
        tried = 0
        while len(found["full"]) < options.cases and tried < options.most_tried:
            case = make_case(vocabulary, options.results, options.result_words, options.share, options.seed + tried)
            tried += 1
            full = await self.answers("full", case, vocabulary)
            if full[0].rank > 1 and not options.quick:
                print(f"case {tried}: the whole text ranks the answer {full[0].rank}, so it does not count", flush=True)
                continue
            found["full"].append(full)
            for side in sides[1:]:
                found[side].append(await self.answers(side, case, vocabulary))
            last = {side: own[-1] for side, own in found.items()}
            shown = [f"{side} {kept.logprob:.2f} ({kept.rank}; {gone.rank})" for side, (kept, gone) in last.items()]
            print(f"case {len(found['full'])}: {', '.join(shown)}", flush=True)
        if not found["full"]:
            raise SystemExit(f"the whole text answers none of {tried} cases")
        return {"tried": tried, "sides": answers(found)}

    async def answers(self, side: str, case: Case, vocabulary: tasks.Vocabulary) -> tuple[Found, Found]:
        """What is said of a result that stays and of one that goes, after what one side does to the history."""
        salt = self.salt(side.split()[0])
        history = case.edited if side == "edited" else list(case.history)
        if side not in ("full", "edited"):
            policy, _, keep = side.partition(" ")
            await self.ask(history, cache_salt=salt, max_tokens=1, min_tokens=1)
            if not self.prune(history, case.pruned, float(keep or 0), policy, cache_salt=salt):
                raise SystemExit(f"{side}: no row went")
        return self.answer(history, case.kept, vocabulary, salt), self.answer(history, case.gone, vocabulary, salt)

    def answer(self, history: Sequence[Message], question: Question, vocabulary: tasks.Vocabulary, salt: str) -> Found:
        """The answer's token, forced."""
        messages = [*history, *question.messages]
        ids = [*self.ids(messages, add_generation_prompt=False, continue_final_message=True), *vocabulary.glue]
        word = vocabulary.first[question.word]
        body = {"model": self.model.name, "prompt_token_ids": ids, "max_tokens": 1, "temperature": 0.0}
        body |= {"logit_bias": {str(word): 100}, "logprobs": True, "top_logprobs": MOST_RANKED}
        body |= {"ignore_eos": True, "chain": False, "cache_salt": salt}
        answer = self.http.post(self.root + PATH, json=body, timeout=self.arguments.timeout_s)
        if answer.status_code != 200:
            raise SystemExit(f"a question failed: {answer.text[:500]}")
        usage, (token,) = answer.json()["usage"], answer.json()["choices"][0]["logprobs"]["content"]
        better = sum(one["logprob"] > token["logprob"] for one in token["top_logprobs"])
        details = usage["prompt_tokens_details"]
        return Found(token["logprob"], 1 + better, details["cached_tokens"], details["resident_tokens"])

    def _plain_ids(self, text: str) -> list[int]:
        body = {"model": self.model.name, "prompt": text, "add_special_tokens": False}
        return self.http.post(f"{self.root}/tokenize", json=body).raise_for_status().json()["tokens"]


def _usage(line: bytes) -> dict[str, Any]:
    return {} if line == b"[DONE]" else json.loads(line).get("usage") or {}


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


async def measure(arguments: argparse.Namespace, run: common.Run) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with Server(arguments.server_options) as server, httpx.Client(timeout=600, trust_env=False) as http:
        model = model_of(http, server.root)
        before = quiet.usage([server.pid])
        async with client.Client(server.root, PATH, None, arguments.timeout_s) as sender:
            bench = Bench(arguments, http, server.root, model, sender)
            for _ in range(2):  # the shapes of the programs that follow
                await bench.ask([{"role": "user", "content": "Hello."}], cache_salt=bench.salt("warm"))
            for part in arguments.parts:
                result[part] = await getattr(bench, part)()
                run.keep(result, model=model.name)
        result["others_cpu_share"] = quiet.others_share(before, quiet.usage([server.pid]))
    result["invalid_because"] = reasons(result, arguments)
    result["valid"] = not result["invalid_because"]
    result["goals"] = goals(result)
    return result | {"model": model.name}


def reasons(result: Mapping[str, Any], arguments: argparse.Namespace) -> list[str]:
    """Why a run is invalid; nothing if it is valid."""
    found = []
    if "pruning" in result:
        sides = result["pruning"]["sides"]
        least = min(sides["path"]["history_tokens"])
        if least < LEAST_CONTEXT and not arguments.quick:
            found.append(f"a conversation has {least} tokens, fewer than {LEAST_CONTEXT:,}")
        if not all(freed for name in PRUNED for freed in sides[name]["freed_tokens"]):
            found.append("nothing was pruned")
        if max(sides["whole"]["cached_tokens"]):
            found.append("tokens were cached where none should be")
    if "quality" in result:
        full, sides = result["quality"]["sides"]["full"], result["quality"]["sides"]
        if full["cases"] < arguments.cases:
            found.append(f"{full['cases']} cases that the whole text answers, fewer than {arguments.cases}")
        for name, side in sides.items():
            pruned = name not in ("full", "edited")
            if pruned and not side["resident_tokens"] < side["cached_tokens"]:
                found.append(f"{name}: answers did not come from pruned rows")
    return found


def table(result: Mapping[str, Any]) -> str:
    parts = []
    if "sharing" in result:
        one = result["sharing"]
        hit, miss = (1e3 * one[key]["median"] for key in ("hit_ttft_s", "no_cache_ttft_s"))
        said = f"{one['requests']} requests, {one['shared_tokens']} shared tokens: {one['prefilled_tokens']} of "
        said += f"{one['prompt_tokens']} prompt tokens computed; first token after {hit:.0f} ms, {miss:.0f} without"
        parts.append(said + f" the cache: {one['ttft_over']['ratio']:.1f}x")
    if "pruning" in result:
        keys = ("prompt_tokens", "cached_tokens", "resident_tokens", "freed_tokens")
        rows = []
        for name, side in result["pruning"]["sides"].items():
            cells = [f"{side[key][-1]}" for key in keys]
            rows.append([name, *cells, *(f"{1e3 * value:.0f}" for value in [common.summary(side["ttft_s"])["median"]])])
        parts.append(common.table(("side", "prompt", "cached", "resident", "freed", "TTFT ms"), rows))
    if "quality" in result:
        rows = [
            [name, f"{side['probability_over_full']:.3f}"]
            + [f"{side[key][0]:.0%}" for key in ("ranked_first", "within_5_percent")]
            + [f"{side['gone']['ranked_first'][0]:.0%}"]
            for name, side in result["quality"]["sides"].items()
        ]
        parts.append(common.table(("side", "p / whole text", "first", "within 5%", "gone: first"), rows))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("prefix_prune", __doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--requests", type=int, default=64, help="that begin alike")
    add("--prefix-tokens", type=int, default=3000, help="that they share")
    add("--pairs", type=int, default=8, help="later requests, each beside one that shares nothing")
    add("--rounds", type=int, default=3, help="conversations that are pruned")
    add("--context", type=int, default=6000, help="tokens of such a conversation, about")
    add("--result-tokens", type=int, default=195, help="of each tool's result")
    add("--share", type=float, default=0.6, help="of the results' tokens that goes")
    add("--cases", type=int, default=30, help="questions after pruning")
    add("--most-tried", type=int, default=120, help="seeds, if the whole text does not answer all")
    add("--results", type=int, default=8, help="results in the conversation of a case")
    add("--result-words", type=int, default=60, help="of prose in each")
    add("--policies", nargs="*", default=["kvzip_global"], help="tried beside drop")
    add("--keep", type=float, default=0.2, help="share that these keep")
    add("--output-tokens", type=int, default=4, help="of each answer")
    add("--seed", type=int, default=0)
    add("--timeout-s", type=float, default=1200.0, help="for a whole answer")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="fields to add to requests")
    add("--quick", action="store_true", help="small random model: a smoke test")
    default = ["--max-num-seqs", "8", "--kv-cache-memory-bytes", "2GiB"]
    add("--server-options", nargs=argparse.REMAINDER, default=default, help="must come last")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sparsejax-quick-") as folder:
        if arguments.quick:
            vars(arguments).update(QUICK, **quick_server(pathlib.Path(folder)))
        run = common.Run("prefix_prune", arguments)
        result = asyncio.run(measure(arguments, run))
    print(table(result))
    common.show_verdict(result)
    run.finish(result, model=result.pop("model"))
    return int(not result["valid"])


if __name__ == "__main__":
    sys.exit(main())
