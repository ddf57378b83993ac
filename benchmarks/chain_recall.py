"""Whether a fact that a method dropped comes back when it is asked for: the Chain Cache's recall, case by case.

    python -m benchmarks.chain_recall --json     # 50 cases, an hour on two cores; --workers 7: 9 minutes on 16
    python -m benchmarks.chain_recall --quick    # random weights: does it run?

A conversation of --turns turns through public-domain prose. Turn 2 states a password, later ones state others, and the
last turn asks for the first: the rank and the log-probability of the answer's token, with the answer up to it given.
Every turn is a turn of a chain, in this process; what the assistant says is the same for all sides, so all see the same
tokens. Methods keep --budget rows, with recall off and with recall "host" of at most --recall-budget rows, for each of
these; dense attention keeps all, so it reads the last turn's whole context at once. Only cases count in which dense
attention ranks the answer first.

Whether the fact was dropped is read from the cache after turn --look-after: the share of its rows that are still there,
averaged over layers and heads. A case is back within 5% of dense if its answer is ranked first and has at least 0.95
times the probability that dense gives it. `taken_back` is the share of the log-probability which the method loses
without recall that recall gives back, of all cases together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import common, quiet
from benchmarks.quality import scores, tasks
from benchmarks.recall_cases import Case, make_case
from benchmarks.served import QUICK_MODEL

CLOSE = 0.95
"""Share of dense's probability from which an answer counts as back."""
MOST_RANKED = 20
DENSE = "dense"
QUICK: dict[str, Any] = {
    "load_format": "dummy",
    "cases": 2,
    "most_tried": 2,
    "turns": 5,
    "look_after": 3,
    "turn_tokens": 120,
    "budget": 64,
    "recall_budget": [64],
}


@dataclasses.dataclass(frozen=True)
class Side:
    """A method, as users write it, and its recall."""

    name: str
    spec: str
    recall: str = "off"
    recall_budget: int | str = 0


@dataclasses.dataclass(frozen=True)
class Found:
    """The answer's token in the last turn. `rank` counts from 1; beyond `MOST_RANKED` it is one more than that."""

    logprob: float
    rank: int
    held: float | None = None
    recall: Mapping[str, Any] | None = None


# Numbers


def close(found: Found, dense: Found) -> bool:
    """Back within 5% of dense."""
    return found.rank <= dense.rank and found.logprob >= dense.logprob + math.log(CLOSE)


def compare(found: Sequence[Found], dense: Sequence[Found]) -> dict[str, Any]:
    """One side against dense, case by case. `probability_over_dense` is the geometric mean of the ratios."""
    differences = [a.logprob - b.logprob for a, b in zip(found, dense, strict=True)]
    count = len(found)
    return {
        "cases": count,
        "logprob": statistics.fmean(one.logprob for one in found),
        "logprob_over_dense": statistics.fmean(differences),
        "probability_over_dense": math.exp(statistics.fmean(differences)),
        "worst_logprob_over_dense": min(differences),
        "ranked_first": scores.wilson(sum(one.rank == 1 for one in found), count),
        "median_rank": statistics.median(one.rank for one in found),
        "within_5_percent": scores.wilson(sum(close(a, b) for a, b in zip(found, dense, strict=True)), count),
    }


def goals(sides: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """With recall the answer's rank, its probability and its log-probability are back; without it they are not."""
    found = []
    for name, side in sides.items():
        if name == DENSE:
            continue
        wanted = side["recall"] != "off"
        than = f"{'at least' if wanted else 'below'} {CLOSE:g}"
        numbers = {
            f"share of cases that rank the answer first {than}": side["ranked_first"][0],
            f"probability of the answer {than} of dense's": side["probability_over_dense"],
        }
        if wanted:
            numbers[f"share of the lost log-probability taken back {than}"] = side["taken_back"]
        found += [
            {"goal": f"{name}: {goal}", "found": value, "met": (value >= CLOSE) == wanted}
            for goal, value in numbers.items()
        ]
    return found


def taken_back(sides: Mapping[str, Mapping[str, Any]], side: Mapping[str, Any]) -> float:
    """Share of what the side's method loses without recall."""
    (off,) = (one for one in sides.values() if one["spec"] == side["spec"] and one["recall"] == "off")
    return 1 - side["logprob_over_dense"] / off["logprob_over_dense"]


def reasons(result: Mapping[str, Any], wanted: int) -> list[str]:
    """Why a run is invalid; nothing if it is valid."""
    found = []
    if result["cases"] < wanted:
        found.append(f"{result['cases']} cases that dense solves, fewer than {wanted}")
    for name, side in result["sides"].items():
        held = side.get("fact_rows_held")
        if held is not None and held > 0.5:
            found.append(f"{name} still held {held:.0%} of the fact's rows: it was not dropped")
    return found


# Measuring


def sides_of(methods: Sequence[str], budget: int, recall_budgets: Sequence[int | str]) -> list[Side]:
    from sparsejax import registry

    found = [Side(DENSE, DENSE)]
    for name in methods:
        spec = registry.sized(name, budget).replace(" ", "")
        found += [Side(f"{name} {budget}, off", spec)]
        found += [Side(f"{name} {budget}, recall {most}", spec, "host", most) for most in recall_budgets]
    return found


class Bench:
    """Turns of chains on an engine in this process."""

    def __init__(self, built: Any) -> None:
        self.built = built
        self._number = 0

    def turn(self, side: Side, ids: Sequence[int], chain_id: str | None, answer: int | None = None) -> tuple[Any, Any]:
        """(first token with its log-probabilities, report of the chain) of one turn; `answer` is forced."""
        from sparsejax.request import ChainOptions, Request, SamplingParams

        self._number += 1
        bias = () if answer is None else ((answer, 100.0),)
        count = None if answer is None else MOST_RANKED
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logit_bias=bias, logprobs=count)
        recall: dict[str, Any] = {} if side.recall == "off" else {"recall_budget": side.recall_budget}
        options = ChainOptions(chain_id, lookup=False, on_miss="error", recall=side.recall, **recall)
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        request = Request(f"recall-{self._number}", tuple(ids), params, side.spec, chain=options)
        self.built.engine.submit(request, events.put)
        first = None
        while True:
            event = events.get(timeout=600)
            first = event if event.token_ids else first
            if event.finish_reason == "error":
                raise SystemExit(f"{side.name}: {event.error}")
            if event.finish_reason is not None:
                return first, event.chain

    def held(self, chain_id: str, positions: range) -> float:
        """Share of the rows of some positions that a chain still has, averaged over layers and heads."""
        return self.built.engine.ask(lambda chains: held_rows(chains, self.built.runner, chain_id, positions)).result()

    def case(self, side: Side, case: Case, look_after: int) -> Found:
        chain_id, held = None, None
        turns = case.contexts if side.spec != DENSE else case.contexts[-1:]
        for number, ids in enumerate(turns, 1):
            last = number == len(turns)
            event, report = self.turn(side, ids, chain_id, case.answer if last else None)
            chain_id = report.chain_id
            if number > 1 and not report.reused_tokens:
                raise SystemExit(f"{side.name}: turn {number} took nothing over: {report.reason}")
            if number == look_after and side.recall == "off":
                held = self.held(chain_id, case.fact)
        (logprob,) = event.logprobs
        ranked = [token for token, _ in sorted(logprob.top, key=lambda pair: -pair[1])]
        rank = ranked.index(case.answer) + 1 if case.answer in ranked else MOST_RANKED + 1
        recall = None if report.recall is None else dataclasses.asdict(report.recall)
        self.built.engine.ask(lambda chains: chains.index.drop(chains.index.chains[chain_id], "deleted")).result()
        return Found(logprob.logprob, rank, held, recall)


def held_rows(chains: Any, runner: Any, chain_id: str, positions: range) -> float:
    """For the engine's thread: reads the positions of a chain's rows from the pool."""
    import numpy as np

    rows, geometry = chains.index.chains[chain_id].payload, runner.limits.geometry
    pages, stored = rows.pages, np.asarray(runner.state.pools["positions"])
    parts, wanted, found = geometry.head_pages_per_page(pages.granularity), set(positions), []
    for layer in range(geometry.num_layers):
        for head in range(geometry.num_kv_heads):
            l, h = min(layer, pages.columns.shape[0] - 1), min(head, pages.columns.shape[1] - 1)
            part = 0 if parts == 1 else head if parts == geometry.num_kv_heads else layer * geometry.num_kv_heads + head
            ids = pages.table[l, h][: int(pages.columns[l, h])] * parts + part
            kept = stored[ids].reshape(-1)[: int(pages.lengths[l, h])].tolist()
            found.append(len(wanted.intersection(kept)) / len(wanted))
    return statistics.fmean(found)


Solved = tuple[int, dict[str, Found] | None]
"""A seed and what every side found; None: dense attention does not rank the answer first."""
Cases = Generator[Solved, None, None]


def cases(arguments: argparse.Namespace, seeds: Iterable[int], show: Callable[[str], None]) -> Cases:
    """Case by case in this process."""
    from sparsejax.build import build_engine
    from sparsejax.config import EngineConfig

    sides = sides_of(arguments.methods, arguments.budget, arguments.recall_budget)
    specs = list(dict.fromkeys(side.spec for side in sides))
    common.use_compilation_cache()
    window = 256 * -(-(arguments.turns * (2 * arguments.turn_tokens + 40) + 128) // 256)
    config = EngineConfig(
        model=arguments.model,
        load_format=arguments.load_format,
        sparse_method=specs[0],
        request_methods=tuple(specs[1:]),
        max_num_seqs=4,
        max_model_len=None if arguments.model else window,
        recall_host_bytes=8 << 30,
        precompile="none",
    )
    built = build_engine(config, None)
    try:
        bench = Bench(built)
        vocabulary = tasks.Vocabulary.of(
            lambda text: built.tokenizer.encode(text, add_special_tokens=False), common.prose()
        )
        for seed in seeds:
            case = make_case(built.tokenizer, vocabulary, arguments.turns, arguments.turn_tokens, seed)
            dense = bench.case(sides[0], case, arguments.look_after)
            if dense.rank > 1 and not arguments.quick:
                show(f"seed {seed}: dense ranks the answer {dense.rank}, so it does not count")
                yield seed, None
                continue
            found = {side.name: bench.case(side, case, arguments.look_after) for side in sides[1:]}
            found = {DENSE: dense, **found}
            shown = [f"{name} {own.logprob:.2f} ({own.rank})" for name, own in found.items()]
            show(f"seed {seed}, {len(case.contexts[-1])} tokens: {', '.join(shown)}")
            yield seed, found
    finally:
        built.engine.close()


def cases_of_workers(arguments: argparse.Namespace, show: Callable[[str], None]) -> Cases:
    """The same from several processes, each with its share of the seeds and of the processors, as they finish."""
    done: queue.SimpleQueue[Solved | int] = queue.SimpleQueue()
    command = [sys.executable, "-m", "benchmarks.chain_recall", *sys.argv[1:]]
    workers = [
        subprocess.Popen([*command, "--worker", str(i)], stdout=subprocess.PIPE, text=True, cwd=common.ROOT)
        for i in range(arguments.workers)
    ]

    def read(worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith("{"):
                record = json.loads(line)
                own = record["found"]
                done.put((record["seed"], own and {name: Found(**found) for name, found in own.items()}))
            else:
                show(line.rstrip())
        done.put(worker.wait())

    threads = [threading.Thread(target=read, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        left = len(workers)
        while left:
            one = done.get()
            if not isinstance(one, int):
                yield one
                continue
            left -= 1
            if one:
                raise SystemExit(f"a worker ended with status {one}")
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


def work(arguments: argparse.Namespace) -> None:
    """One of several workers: a line for each seed."""
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        share = max(1, len(processors) // arguments.workers)
        first = arguments.worker * share % len(processors)
        os.sched_setaffinity(0, processors[first : first + share])
    stop = arguments.seed + arguments.most_tried
    for seed, found in cases(arguments, range(arguments.seed + arguments.worker, stop, arguments.workers), print):
        own = found and {name: dataclasses.asdict(one) for name, one in found.items()}
        print(json.dumps({"seed": seed, "found": own}), flush=True)


def measure(arguments: argparse.Namespace, run: common.Run, show: Callable[[str], None]) -> dict[str, Any]:
    """Numbers of as many cases as are wanted, in the order of their seeds."""
    sides = sides_of(arguments.methods, arguments.budget, arguments.recall_budget)
    if arguments.workers > 1:
        all_cases = cases_of_workers(arguments, show)
    else:
        all_cases = cases(arguments, range(arguments.seed, arguments.seed + arguments.most_tried), show)
    solved: dict[int, dict[str, Found]] = {}
    result: dict[str, Any] = {}
    usage, tried = quiet.usage(), 0
    for seed, one in all_cases:
        tried += 1
        if one is None:
            continue
        solved[seed] = one
        found = {side.name: [solved[s][side.name] for s in sorted(solved)] for side in sides}
        result = summed(sides, found, tried, 0 if arguments.quick else arguments.cases) | {"seeds": sorted(solved)}
        run.keep(result)
        if len(solved) == arguments.cases:
            break
    all_cases.close()
    if not result:
        raise SystemExit(f"dense attention solves none of {tried} cases")
    result["others_cpu_share"] = quiet.others_share(usage, quiet.usage()) if arguments.workers == 1 else None
    return result


def summed(sides: Sequence[Side], found: Mapping[str, Sequence[Found]], tried: int, wanted: int) -> dict[str, Any]:
    """Numbers of all sides so far; `wanted` cases are needed."""
    result: dict[str, Any] = {"cases": len(found[DENSE]), "tried": tried, "sides": {}}
    for side in sides:
        own = found[side.name]
        facts = {"spec": side.spec, "recall": side.recall, **compare(own, found[DENSE])}
        held = [one.held for one in own if one.held is not None]
        lent = [one.recall for one in own if one.recall is not None]
        if held:
            facts["fact_rows_held"] = statistics.fmean(held)
        if lent:
            keys = ("evicted_rows", "lent_rows", "bytes_moved", "seconds", "stored_bytes")
            facts["recall_means"] = {key: statistics.fmean(one[key] for one in lent) for key in keys}
        facts["logprobs"] = [one.logprob for one in own]
        facts["ranks"] = [one.rank for one in own]
        result["sides"][side.name] = facts
    for facts in result["sides"].values():
        if facts["recall"] != "off":
            facts["taken_back"] = taken_back(result["sides"], facts)
    result["invalid_because"] = reasons(result, wanted)
    result["valid"] = not result["invalid_because"]
    result["goals"] = goals(result["sides"])
    return result


def table(result: Mapping[str, Any]) -> str:
    rows = []
    for name, side in result["sides"].items():
        cells = [f"{side['logprob']:.3f}", f"{side['probability_over_dense']:.3f}"]
        cells += [f"{side[key][0]:.0%}" for key in ("ranked_first", "within_5_percent")]
        cells.append(f"{side['taken_back']:.1%}" if "taken_back" in side else "-")
        cells.append(f"{side['fact_rows_held']:.0%}" if "fact_rows_held" in side else "-")
        cells.append(f"{side['recall_means']['lent_rows']:.0f}" if "recall_means" in side else "-")
        rows.append([name, *cells])
    header = ("side", "logprob", "p / dense", "first", "within 5%", "taken back", "fact rows held", "rows lent")
    return common.table(header, rows)


def budget(text: str) -> int | str:
    """Rows, or all."""
    if text == "all":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'a number of rows or "all", not {text!r}')
    return int(text)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("chain_recall", __doc__.splitlines()[0])
    parser.add_argument("--model", help="as for sparsejax")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--methods", nargs="+", default=["snapkv", "h2o", "streamingllm"], help="beside dense")
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--most-tried", type=int, default=200, help="seeds, if dense does not solve all")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--look-after", type=int, default=8, help="turn after which the cache is looked at")
    parser.add_argument("--turn-tokens", type=int, default=80, help="of prose in each turn, about")
    parser.add_argument("--budget", type=int, default=128, help="rows that methods keep")
    parser.add_argument(
        "--recall-budget", type=budget, nargs="+", default=[256, 512], help='rows lent to a turn at most, or "all"'
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the seeds and the processors")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="small random model: a smoke test")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        vars(arguments).update(QUICK)
    if not 2 < arguments.look_after < arguments.turns:
        raise SystemExit("--look-after must be between turn 2 and the last one")
    with tempfile.TemporaryDirectory(prefix="sparsejax-quick-") as folder:
        if arguments.quick:
            path = pathlib.Path(folder) / "tiny.json"
            path.write_text(json.dumps(QUICK_MODEL), "utf-8")
            arguments.model = str(path)
        if arguments.worker is not None:
            work(arguments)
            return 0
        run = common.Run("chain_recall", arguments)
        result = measure(arguments, run, lambda text: print(text, flush=True))
    from sparsejax.models.load.default_model import NAME

    print(table(result))
    common.show_verdict(result)
    run.finish(result, **common.device_facts(), model=pathlib.PurePath(arguments.model or NAME).name)
    return int(not result["valid"])


if __name__ == "__main__":
    sys.exit(main())
