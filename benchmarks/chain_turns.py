"""What a turn of a long conversation costs with the Chain Cache, and whether a killed server goes on with it.

    python -m benchmarks.chain_turns --json                      # 30 turns, above 6,000 tokens; starts its own servers
    python -m benchmarks.chain_turns --skip-restart --rounds 1
    python -m benchmarks.chain_turns --quick                     # random weights, a minute: does it run?

Agents with tools talk to a server of ours over HTTP (`benchmarks.conversation`). All sides, methods with chains and
dense attention with and without, are served by one process and take turns, turn by turn, so that what else the machine
does hits all alike. In each of the last turns every side also answers the same message in a short conversation of its
own (--context tokens): the ratio of both times to the first token is what a turn's history costs. Times are those of
the client's socket. The side without chains only answers the turns of --baseline-turns, with the transcript of dense
attention with chains. The prefix cache is off: it would spare that side most of its prompts.

Then the conversation of the first round is held again on a server with --chain-dir, which is killed (SIGKILL) while it
answers; the next one, with the same folder, must go on with what was processed, and say the same.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks import common, lines, quiet
from benchmarks.conversation import Script, script
from benchmarks.load import client
from benchmarks.served import PATH, Conversation, Model, Server, forget, model_of, quick_server, without_opening
from benchmarks.turn_rows import Row, Side, by_turn, goals, late, plot, reasons, row_of, same

LEAST_TOKENS = 6000
_NO_CHAINS = "dense, no chains"
QUICK: dict[str, Any] = {
    "turns": 6,
    "budget": 128,
    "rounds": 1,
    "late": 2,
    "baseline_turns": [1, 6],
    "result_tokens": 150,
    "output_tokens": 4,
    "context": 1500,
    "kill_after": 3,
    "go_on": 2,
    "settle_s": 0.5,
    "cut_s": 0.0,
}


def sides_of(methods: Sequence[str], budget: int) -> list[Side]:
    """The methods at a budget, and dense with and without chains. Imports the registry, and so JAX."""
    from sparsejax import registry

    found = [Side(f"{name} {budget}", registry.sized(name, budget).replace(" ", "")) for name in methods]
    return [*found, Side("dense", "dense"), Side(_NO_CHAINS, "dense", chained=False)]


class Bench:
    """Asks a running server.

    Args:
      arguments: of the command line.
      model: what the server serves.
      sides: what is compared.
    """

    def __init__(self, arguments: argparse.Namespace, model: Model, sides: Sequence[Side]) -> None:
        self.arguments, self.model, self.sides = arguments, model, list(sides)
        self.count = without_opening(model.counter.count)
        self.rows: list[Row] = []
        self.talks: list[Conversation] = []
        self.failures: list[dict[str, Any]] = []

    def script(self, number: int) -> Script:
        options = self.arguments
        return script(self.count, options.turns, options.result_tokens, options.seed + number)

    def short_script(self, of: Script, number: int, turn: int) -> Script:
        """Two turns; the second one's message is that of turn `turn` of a long script."""
        options = self.arguments
        goal = options.context - options.output_tokens - self.count(of.system) - 20  # what the template adds
        own = script(self.count, 1, options.result_tokens, 1000 * (options.seed + number + 1) + turn, goal)
        return dataclasses.replace(own, results=(of.results[turn - 2],))

    def conversation(self, side: Side, of: Script) -> Conversation:
        length = self.arguments.output_tokens
        fields = {"model": self.model.name, "sparse_method": side.spec, "temperature": 0.0}
        # An answer's end would make turns differ: as many tokens as asked for, and none that the text does not show.
        fields |= {"max_tokens": length, "min_tokens": length, **self.arguments.extra_body}
        self.talks.append(Conversation(of, fields, {} if side.chained else None))
        return self.talks[-1]

    async def ask(
        self, sender: client.Client, side: Side, talk: Conversation, number: int, turn: int, short: bool
    ) -> Row | None:
        """One turn, added to the rows; None if it failed. The conversation goes on only if it is the next one."""
        answer = client.read(await sender.send(talk.ask(turn)))
        if isinstance(answer, client.Failure):
            fact = {"side": side.name, "round": number, "turn": turn, "short": short}
            self.failures.append(fact | {"kind": answer.kind, "detail": answer.detail})
            return None
        row = row_of(side.name, number, turn, short, answer)
        if turn == talk.turn + 1:
            talk.take(answer.text, answer.chain)
        return row

    async def short(self, sender: client.Client, side: Side, of: Script, number: int, turn: int) -> None:
        """The message of a long turn in a short conversation of its own."""
        talk = self.conversation(side, self.short_script(of, number, turn))
        if await self.ask(sender, side, talk, number, 1, True) is None:
            return
        row = await self.ask(sender, side, talk, number, 2, True)
        if row is not None:
            self.rows.append(dataclasses.replace(row, turn=turn))

    async def round(self, sender: client.Client, number: int) -> None:
        """One long conversation of each side."""
        options, of = self.arguments, self.script(number)
        talks = {side.name: self.conversation(side, of) for side in self.sides}
        source = talks[next(side.name for side in self.sides if side.chained and side.spec == "dense")]
        for turn in range(1, options.turns + 1):
            shift = (turn + number) % len(self.sides)
            for place, side in enumerate(self.sides[shift:] + self.sides[:shift]):
                if not side.chained and turn not in options.baseline_turns:
                    continue
                talk = talks[side.name]
                if side.chained and talk.turn != turn - 1:
                    continue  # it has failed before
                if not side.chained:
                    talk.messages, talk.turn = source.messages, turn - 1
                pair = turn > options.turns - options.late and turn > 1
                if pair and (place + turn) % 2:
                    await self.short(sender, side, of, number, turn)
                row = await self.ask(sender, side, talk, number, turn, False)
                if row is not None:
                    self.rows.append(row)
                if pair and not (place + turn) % 2:
                    await self.short(sender, side, of, number, turn)
            shown = [f"{row.ttft_s:.2f} {row.side}" for row in self.rows if (row.round, row.turn) == (number, turn)]
            print(f"round {number + 1}, turn {turn}: {', '.join(shown)}", flush=True)

    async def warm_up(self, sender: client.Client) -> None:
        for side in self.sides:
            await self.short(sender, side, self.script(-1), -1, 2)
        self.rows.clear()

    def forget(self, http: httpx.Client, root: str) -> None:
        """Ends all chains so far."""
        forget(http, root, self.talks)
        self.talks.clear()


async def measure_turns(arguments: argparse.Namespace, sides: Sequence[Side]) -> tuple[dict[str, Any], Bench]:
    with Server(server_options(arguments, sides)) as server, httpx.Client(timeout=60, trust_env=False) as http:
        bench = Bench(arguments, model_of(http, server.root), sides)
        async with client.Client(server.root, PATH, None, arguments.timeout_s) as sender:
            await bench.warm_up(sender)
            bench.forget(http, server.root)
            others = []
            for number in range(arguments.rounds):
                before = quiet.usage([server.pid])
                await bench.round(sender, number)
                others.append(quiet.others_share(before, quiet.usage([server.pid])))
                bench.forget(http, server.root)
    result: dict[str, Any] = {"sides": {}, "others_cpu_share": others, "failures": bench.failures}
    for side in sides:
        own = [row for row in bench.rows if row.side == side.name]
        facts = {"spec": side.spec, "chained": side.chained, "turns": by_turn(own)}
        facts |= {"last": late(own, arguments.turns), "late": late(own)}
        result["sides"][side.name] = facts
    return result, bench


async def measure_restart(
    arguments: argparse.Namespace, sides: Sequence[Side], unkilled: Sequence[Row]
) -> dict[str, Any]:
    """The first round's conversations again; the server is killed while it answers, and another one goes on."""
    chained, killed = [side for side in sides if side.chained], arguments.kill_after
    wanted = {(row.side, row.turn): row for row in unkilled if row.round == 0 and not row.short}
    result: dict[str, Any] = {"killed_in_turn": killed + 1, "sides": {}}
    with tempfile.TemporaryDirectory(prefix="sparsejax-chains-") as folder:
        options = [*server_options(arguments, sides), "--chain-dir", folder]
        with Server(options) as server:
            with httpx.Client(timeout=60, trust_env=False) as http:
                bench = Bench(arguments, model_of(http, server.root), sides)
                of = bench.script(0)  # counts at the server
            talks = {side.name: bench.conversation(side, of) for side in chained}
            before: dict[str, list[bool]] = {side.name: [] for side in chained}
            async with client.Client(server.root, PATH, None, arguments.timeout_s) as sender:
                for turn in range(1, killed + 1):
                    for side in chained:
                        row = await bench.ask(sender, side, talks[side.name], 0, turn, False)
                        before[side.name].append(same(row, wanted.get((side.name, turn))))
                await asyncio.sleep(arguments.settle_s)
                tasks = [asyncio.create_task(sender.send(talk.ask())) for talk in talks.values()]
                await asyncio.sleep(arguments.cut_s)
                server.kill()
                records = [await task for task in tasks]
            result["cut_requests"] = sum(record.failure is not None for record in records)
            files = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
            result["disk_bytes"] = sum(path.stat().st_size for path in files)
            begun = time.perf_counter()
            server.start()
            result["start_s"] = time.perf_counter() - begun
            async with client.Client(server.root, PATH, None, arguments.timeout_s) as sender:
                after: dict[str, list[Row | None]] = {side.name: [] for side in chained}
                for turn in range(killed + 1, killed + 1 + arguments.go_on):
                    for side in chained:
                        if talks[side.name].turn == turn - 1:
                            after[side.name].append(await bench.ask(sender, side, talks[side.name], 0, turn, False))
    for side in chained:
        first, reference = next(iter(after[side.name]), None), wanted.get((side.name, killed + 1))
        pairs = zip(range(killed + 1, killed + 1 + arguments.go_on), after[side.name], strict=False)
        result["sides"][side.name] = {
            "cached_tokens": first.cached_tokens if first else 0,
            "unkilled_cached_tokens": reference.cached_tokens if reference else None,
            "status": first.status if first else None,
            "ttft_s": first.ttft_s if first else None,
            "same_text_before": sum(before[side.name]),
            "same_text": [same(row, wanted.get((side.name, turn))) for turn, row in pairs],
        }
    result["failures"] = bench.failures
    return result


def server_options(arguments: argparse.Namespace, sides: Sequence[Side]) -> list[str]:
    specs = list(dict.fromkeys(side.spec for side in sides))
    options = ["--sparse-method", specs[0]]
    for spec in specs[1:]:
        options += ["--request-methods", spec]
    return [*options, "--no-prefix-cache", *arguments.server_options]


def table(result: Mapping[str, Any]) -> str:
    """Medians of the last turn."""
    rows = []
    for name, side in result["sides"].items():
        pairs = side["last"]
        if pairs is not None:
            times = [f"{1e3 * pairs[key]['median']:.0f}" for key in ("ttft_s", "short_ttft_s")]
            ratio = pairs["over_short"]
            span = f"{ratio['least_pair']:.2f} to {ratio['largest_pair']:.2f}"
            sizes = [f"{pairs[key]:g}" for key in ("prompt_tokens", "prefilled_tokens")]
            rows.append([name, *sizes, *times, f"{ratio['ratio']:.2f}", span])
    header = ("side", "prompt", "computed", "TTFT ms", "short, ms", "ratio", "of rounds")
    return common.table(header, rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    many: dict[str, Any] = {"nargs": "+"}
    parser.add_argument("--methods", **many, default=["snapkv", "h2o", "streamingllm"], help="beside dense")
    parser.add_argument("--budget", type=int, default=512, help="rows that methods keep")
    parser.add_argument("--skip-restart", action="store_true", help="kill no server")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2, help="conversations of each side, with other texts")
    parser.add_argument("--late", type=int, default=3, help="last turns that have a short conversation beside them")
    parser.add_argument("--baseline-turns", type=int, **many, default=[1, 10, 20, 30])
    parser.add_argument("--result-tokens", type=int, default=195, help="of each tool's result")
    parser.add_argument("--output-tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--context", type=int, default=500, help="tokens before the last turn of short conversations")
    parser.add_argument("--kill-after", type=int, default=8, help="turns before the one in which the server is killed")
    parser.add_argument("--go-on", type=int, default=3, help="turns after that")
    parser.add_argument("--settle-s", type=float, default=2.0, help="pause before the turn in which it is killed")
    parser.add_argument("--cut-s", type=float, default=0.5, help="from sending that turn to the kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for a whole answer")
    parser.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="fields to add to requests")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.svg")
    parser.add_argument("--quick", action="store_true", help="small random model and few turns: a smoke test")
    default = ["--max-num-seqs", "4", "--kv-cache-memory-bytes", "1536MiB"]
    parser.add_argument("--server-options", nargs=argparse.REMAINDER, default=default, help="must come last")


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("chain_turns", __doc__.splitlines()[0])
    add_options(parser)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sparsejax-quick-") as folder:
        if arguments.quick:
            vars(arguments).update(QUICK, **quick_server(pathlib.Path(folder)))
        run = common.Run("chain_turns", arguments)
        result = asyncio.run(measure(arguments, run))
    print(table(result))
    common.show_verdict(result)
    if arguments.plot:
        lines.write(arguments.plot, plot(result))
    run.finish(result, model=result.pop("model"))
    return int(not result["valid"])


async def measure(arguments: argparse.Namespace, run: common.Run) -> dict[str, Any]:
    sides = sides_of(arguments.methods, arguments.budget)
    result, bench = await measure_turns(arguments, sides)
    result["model"] = bench.model.name
    run.keep(result)
    if not arguments.skip_restart:
        result["restart"] = await measure_restart(arguments, sides, bench.rows)
    least = 0 if arguments.quick else LEAST_TOKENS
    failures = [*bench.failures, *result.get("restart", {}).get("failures", [])]
    result["invalid_because"] = reasons(sides, bench.rows, failures, arguments.turns, least)
    result["valid"] = not result["invalid_because"]
    result["goals"] = goals(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
