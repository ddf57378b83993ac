"""Tokens per second of the engine on a full batch, over windows of consecutive decode steps, by method and context.

    python -m benchmarks.decode_window --json
    python -m benchmarks.decode_window --methods dense "snapkv+quest" --contexts 32768 --batches 3 --prefill

Each repetition admits its requests, decodes 32 warm-up steps with all of them and measures 256 more; see
`benchmarks.engine_window` for what counts and what makes a window invalid. One repetition per case is discarded, three
are pooled: all tokens by all seconds. A case with an invalid window is marked so and has no result. Unlike
`benchmarks.decode_step`, which times the programs of a step alone, everything that the engine does is inside.

Random weights; prompts are taken as read (their pages hold random rows and the method evicts from them), or prefilled
with --prefill. The share of the floor is the time to read weights, rows and page summaries once (as in
`benchmarks.decode_step`, averaged over the window as rows grow) by the time that a step took.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from typing import Any

from benchmarks import bars, common, filled_state, quiet, step_timing
from benchmarks.decode_attention import kilo
from benchmarks.decode_step import Case
from benchmarks.step_timing import MODELS, Model, composition

BATCHES = {8192: 16, 32768: 8, 131072: 4}
MEMBERS = ("dense", "streamingllm", "snapkv", "quest", "fp8_kv")
_BUDGETED = {"streamingllm": "keep", "snapkv": "keep", "quest": "read"}


def cases(model: Model, arguments: Any) -> list[Case]:
    """Of all methods at all contexts; dense first, since others are compared with it."""
    batches = arguments.batches or [BATCHES.get(context, 4) for context in arguments.contexts]
    if len(batches) == 1:
        batches = batches * len(arguments.contexts)
    if len(batches) != len(arguments.contexts):
        raise SystemExit(f"{len(batches)} --batches for {len(arguments.contexts)} --contexts")
    budgets = {"keep": arguments.keep // model.shrink, "read": arguments.read // model.shrink}
    found = []
    for context, batch in zip(arguments.contexts, batches, strict=True):
        tokens = context // model.shrink
        for method in sorted(arguments.methods, key=lambda name: name != "dense"):
            if method not in _BUDGETED:
                found.append(Case(method, method, batch, tokens))
                continue
            budget = budgets[_BUDGETED[method]]
            if budget < tokens:
                found.append(Case(f"{method} {kilo(budget)}", composition(method, budget, model), batch, tokens))
            else:
                print(f"{method} {kilo(budget)} is left out at {kilo(tokens)}: nothing to leave out there", flush=True)
    return found


def groups(found: list[Case]) -> list[list[Case]]:
    """Cases that share a runner: of one context, batch and storage."""
    from sparsejax import registry

    made: dict[tuple, list[Case]] = {}
    for case in found:
        _, storage = registry.resolve(case.composition)
        made.setdefault((case.context, case.batch, storage.name), []).append(case)
    return list(made.values())


def pages_needed(method: Any, geometry: Any, batch: int, context: int, more: int) -> int:
    """Sequence pages for `batch` rows prefilled in turn that decode `more` tokens each, the null page included."""
    import numpy as np

    from sparsejax.cost import row_cost

    peak = row_cost(method, geometry, context).peak_head_pages
    width = geometry.head_pages_per_sequence_page
    kept = int(method.kept_after("prompt", _lengths(context)).max())  # of any layer
    rest = geometry.pages(int(method.peak_rows(np.array([[kept]]), 0, more).max()))
    # A compaction needs fresh pages beside those of its row, one row at a time.
    spare = geometry.pages(kept) if method.evicts else 0
    return 1 + (batch - 1) * rest + max(-(-peak // width), rest) + spare + 1


def _lengths(tokens: int) -> Any:
    import numpy as np

    return np.asarray([tokens], np.int32)


class Engine:
    """What one group of cases runs on: a pool with room for each of them, full of random rows unless prefilled.

    Attributes:
      compile_s: seconds that the programs of each method took; several may have been compiled at once.
    """

    def __init__(self, group: list[Case], spec: Any, weights: Any, arguments: Any) -> None:
        from benchmarks import engine_window
        from sparsejax import registry
        from sparsejax.runner import DeviceRunner
        from sparsejax.settings import EngineSettings

        page_size = MODELS[arguments.model].page_size
        resolved = {case.method: registry.resolve(case.composition) for case in group}
        self.methods = {name: method for name, (method, _) in resolved.items()}
        self.storage = next(iter(resolved.values()))[1]
        self.spec, self.arguments = spec, arguments
        context, batch = group[0].context, group[0].batch
        whole = -(-context // page_size) * page_size
        chunk = min(arguments.chunk, whole) if arguments.prefill else whole
        waiting = engine_window.admission_steps(batch, context, chunk)
        more = arguments.warm_up + arguments.steps + waiting + 1
        self.geometry = spec.geometry(page_size, -(-(context + more) // page_size) * page_size)
        sizes = [pages_needed(method, self.geometry, batch, context, more) for method in self.methods.values()]
        self.compile_s = dict.fromkeys(self.methods, 0.0)
        self.runner = (DeviceRunner if arguments.prefill else engine_window.FilledRunner)(
            spec,
            weights,
            self.geometry,
            self.methods,
            self.storage,
            num_rows=batch,
            num_sequence_pages=max(sizes),
            decode_buckets=(batch,),
            prefill_buckets=((1, chunk),),
            implementation=arguments.implementation,
        )
        self._compile()
        if not arguments.prefill:
            filled_state.fill_pages(self.runner, self.storage)
            engine_window.fill_row_aux(self.runner)
        self.settings = EngineSettings(max_num_batched_tokens=chunk)

    def _compile(self) -> None:
        """Compiles what windows need, several programs at once; a whole prompt's program only if it will run."""
        from sparsejax.programs import compile_workers

        names = {"decode", "maintain", "sample", "setup_row"} | ({"prefill"} if self.arguments.prefill else set())
        wanted = [program for program in self.runner.programs() if program.name in names]
        for compiled in self.runner.compile(wanted, compile_workers()):
            key = compiled.program.key  # such as ("decode", method, rows)
            if isinstance(key, tuple) and key[1] in self.compile_s:
                self.compile_s[key[1]] += compiled.lower_s + compiled.compile_s

    def window(self, case: Case, seed: int) -> Any:
        from benchmarks.engine_window import FullBatch

        rows = FullBatch(self.runner, self.settings, case.method, case.batch, case.context)
        return rows.window(self.arguments.warm_up, self.arguments.steps, seed)


def judge(case: Case, windows: list[Any], engine: Engine, bandwidths: dict[str, float]) -> dict[str, Any]:
    """A case's windows, pooled if all are valid."""
    from benchmarks.engine_window import reasons, resident_over

    steps = engine.arguments.steps
    method = engine.methods[case.method]
    entry: dict[str, Any] = {"composition": case.composition, "windows": [shown(window) for window in windows]}
    why = [f"window {i + 1}: {text}" for i, window in enumerate(windows) for text in reasons(window, case.batch, steps)]
    entry |= {"valid": not why, "invalid_because": why}
    if why:
        return entry
    seconds = [window.seconds for window in windows]
    step_s = sum(seconds) / (steps * len(windows))
    resident = sum(resident_over(method, window.lengths, steps) for window in windows) / len(windows)
    limit = step_timing.floor(engine.spec, engine.geometry, method, engine.storage, case.batch, round(resident))
    return entry | {
        "tokens_per_s": sum(window.tokens for window in windows) / sum(seconds),
        "step_s": step_s,
        "spread": (max(seconds) - min(seconds)) / sorted(seconds)[len(seconds) // 2],
        "resident_tokens": resident,
        "read_tokens": method.rows_read(round(resident), engine.geometry),
        "floor_bytes": dataclasses.asdict(limit),
        "share_of_floor": {name: limit.nbytes / rate / step_s for name, rate in bandwidths.items()},
    }


def shown(window: Any) -> dict[str, Any]:
    """A window for the record, without a number for each of its steps."""
    return {
        "seconds": window.seconds,
        "steps": len(window.batches),
        "least_batch": min(window.batches, default=0),
        "calls": window.calls,
        "compilations": window.compilations,
        "delivered": window.delivered,
        "ended": list(window.ended),
        "least_length": min(window.lengths, default=0),
        "most_length": max(window.lengths, default=0),
    }


def measure(group: list[Case], spec: Any, weights: Any, arguments: Any, bandwidths: dict) -> dict[str, Any]:
    """Results by case, for cases that share a runner: one repetition each is discarded, then they take turns."""
    engine = Engine(group, spec, weights, arguments)
    found, able = {}, []
    for case in group:
        try:
            engine.window(case, 0)
            able.append(case)
        except RuntimeError as error:
            found |= failed([case], error)
    if not able:
        return found
    engine.runner.seal()
    counts = dict.fromkeys(able, 0)

    def turn(case: Case) -> Any:
        counts[case] += 1
        return engine.window(case, counts[case])

    sides = {str(case): lambda case=case: turn(case) for case in able}
    rounds = quiet.alternate(sides, arguments.rounds, patience_s=arguments.patience_s)
    for case in able:
        entry = judge(case, rounds.found[str(case)], engine, bandwidths)
        entry |= {"batch": case.batch, "context": case.context, "compile_s": engine.compile_s[case.method]}
        entry["quiet"] = rounds.facts
        found[str(case)] = entry
        print(line(str(case), entry), flush=True)
    return found


def compare(found: dict[str, dict[str, Any]], made: list[Case]) -> None:
    """Adds "over_dense" to valid cases whose valid dense one has the same batch and context."""
    for case in made:
        if str(case) not in found:
            continue  # not measured yet
        entry, dense = found[str(case)], found.get(str(dataclasses.replace(case, method="dense")))
        if dense is not None and dense is not entry and entry["valid"] and dense["valid"]:
            entry["over_dense"] = entry["tokens_per_s"] / dense["tokens_per_s"]


HEADER = ("case", "tokens/s", "x dense", "step ms", "spread", "of floor", "of nominal", "resident", "read", "compile s")


def cells(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    if not entry["valid"]:
        return name, "INVALID", *["-"] * (len(HEADER) - 2)
    share = entry["share_of_floor"]
    return (
        name,
        f"{entry['tokens_per_s']:,.1f}",
        f"{entry['over_dense']:.2f}" if "over_dense" in entry else "-",
        f"{entry['step_s'] * 1e3:.3f}",
        f"{entry['spread']:.1%}",
        f"{share['measured']:.1%}",
        f"{share['nominal']:.1%}" if "nominal" in share else "-",
        f"{entry['resident_tokens']:,.0f}",
        f"{entry['read_tokens']:,}",
        f"{entry['compile_s']:.1f}",
    )


def line(name: str, entry: dict[str, Any]) -> str:
    if not entry["valid"]:
        return f"{name}: INVALID: {'; '.join(entry['invalid_because'])}"
    pairs = zip(HEADER[1:], cells(name, entry)[1:], strict=True)
    return f"{name}: " + ", ".join(f"{title} {cell}" for title, cell in pairs if cell != "-")


def failed(group: list[Case], error: Exception) -> dict[str, Any]:
    """Entries of cases that could not be run at all."""
    why = " ".join(str(error).split())[:300]
    entries = {}
    for case in group:
        entry = {"composition": case.composition, "batch": case.batch, "context": case.context}
        entries[str(case)] = entry | {"valid": False, "invalid_because": [why], "windows": []}
        print(line(str(case), entries[str(case)]), flush=True)
    return entries


def check(arguments: Any) -> None:
    bars.check(arguments.plot)
    for name in ("steps", "warm_up", "rounds", "chunk"):
        if getattr(arguments, name) < 1:
            raise SystemExit(f"--{name.replace('_', '-')} must be at least 1")
    step_timing.reserve_memory()


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("decode_window", __doc__.splitlines()[0])
    step_timing.add_options(parser)
    parser.set_defaults(steps=256, rounds=3)
    parser.add_argument("--methods", nargs="+", default=list(MEMBERS), help="members, or compositions with their knobs")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=list(BATCHES), help="tokens; small models divide them"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="one, or one for each context; by default 16, 8, 4")
    parser.add_argument("--keep", type=int, default=8192, help="tokens that snapkv and streamingllm keep")
    parser.add_argument("--read", type=int, default=2048, help="tokens that quest reads")
    parser.add_argument("--warm-up", type=int, default=32, help="steps of the whole batch before a window")
    parser.add_argument("--prefill", action="store_true", help="prefill prompts instead of taking them as read")
    parser.add_argument("--chunk", type=int, default=8192, help="prompt tokens of a program, with --prefill")
    arguments = parser.parse_args(argv)
    check(arguments)
    made = step_timing.matching(cases(MODELS[arguments.model], arguments), arguments.only)
    run = common.Run("decode_window", arguments)
    start = time.perf_counter()
    bandwidths = step_timing.device_bandwidths(arguments.nominal)
    spec, weights = step_timing.load(arguments)
    found: dict[str, dict[str, Any]] = {}
    result, facts = {"bytes_per_s": bandwidths, "cases": found}, step_timing.facts(spec, arguments)
    for group in groups(made):
        try:
            found |= measure(group, spec, weights, arguments, bandwidths)
        except RuntimeError as error:  # such as JAX's for memory
            found |= failed(group, error)
        compare(found, made)
        run.keep(result, **facts)
        gc.collect()  # the next pool needs the memory
    print(common.table(HEADER, [cells(name, entry) for name, entry in found.items()]))
    print(f"{time.perf_counter() - start:.0f} s in all")
    if arguments.plot:
        speeds = {"tokens/s": [entry.get("tokens_per_s", 0.0) for entry in found.values()]}
        title = f"Full batch in the engine, {MODELS[arguments.model].config}, {spec.dtype}"
        bars.write(arguments.plot, title, list(found), speeds, "tokens/s")
    run.finish(result, **facts)
    return int(not all(entry["valid"] for entry in found.values()))


if __name__ == "__main__":
    sys.exit(main())
