"""Whole decode steps (weights, attention, logits, greedy sampling) of a model shape, against the bytes they must read.

    python -m benchmarks.decode_step --json
    python -m benchmarks.decode_step --only "dense B=1 *" --kernels    # where the time of one step goes

Random weights; the KV state is filled directly (`benchmarks.filled_state`), as a prompt of that length leaves it under
each method. Steps are submitted as the engine's scheduler does: step n+1 before the small outputs of step n are read.
Cases of one context share a pool and take turns, in the program of their largest batch (smaller ones are padded, as in
the engine). The floor is the time to read, once, all weights that a step needs (the head but not the embedding table),
the KV rows that the method reads, and the page summaries of layers that select; at the bandwidth of a device copy
measured in the same run (on a CPU: of sums), and at the nominal one of the card.
"""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import bars, common, kernels, quiet, step_timing
from benchmarks.decode_attention import kilo
from benchmarks.step_timing import MODELS, Filled, Model, composition

PROFILED_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """`method` is for people, `composition` for the registry. `context` is in tokens."""

    method: str
    composition: str
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.method} B={self.batch} L={kilo(self.context)}"


def default_cases(model: Model) -> list[Case]:
    read, kept = 2048 // model.shrink, 8192 // model.shrink
    quest = f"quest {kilo(read)}", composition("quest", read, model)
    snapkv = f"snapkv {kilo(kept)}", composition("snapkv", kept, model)
    dense = "dense", "dense"
    cases = [(dense, 1, 2048), (dense, 64, 2048), (dense, 4, 32768)]
    cases += [(method, batch, 131072) for batch in (3, 5) for method in (dense, quest)]
    cases += [(snapkv, 5, 131072)]
    return [Case(*method, batch, context // model.shrink) for method, batch, context in cases]


def groups(cases: Sequence[Case], exact: bool = False) -> list[list[Case]]:
    """Cases that share a runner: of one context, with batches close enough for one bucket, or (`exact`) the same."""
    found: list[list[Case]] = []
    for case in sorted(cases, key=lambda case: (case.context, case.batch)):
        last = found[-1] if found else None
        most = last[0].batch * (1 if exact else 2) if last else 0
        if last and last[0].context == case.context and case.batch <= most:
            last.append(case)
        else:
            found.append([case])
    return found


def profile(filled: Filled, case: Case, keep: pathlib.Path | None, show: bool) -> dict[str, Any]:
    """Traces `PROFILED_STEPS` steps into a folder of their own below `keep`; prints their kernels if `show`."""
    filled.rewind(case.method, case.batch)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep or pathlib.Path(temporary)) / re.sub(r"[^a-z0-9]+", "_", str(case).lower())
        with kernels.profiled(folder):
            step_timing.take_steps(filled.runner, case.method, case.batch, PROFILED_STEPS - 1)
        if not show:
            return {}
        print(f"\n{case}: a step of {PROFILED_STEPS} traced ones")
        report, text = kernels.report_of(folder, PROFILED_STEPS)
        print(text, flush=True)
    return {} if report is None else {"device": kernels.facts(report)}


def measure(group: list[Case], spec: Any, weights: Any, arguments: Any, bandwidths: dict) -> dict[str, Any]:
    """Results by case, for cases that share a runner."""
    batch = max(case.batch for case in group)
    compositions = {case.method: case.composition for case in group}
    page_size = MODELS[arguments.model].page_size
    filled = Filled(spec, weights, compositions, batch, group[0].context, page_size, arguments.implementation)
    compile_s: dict[str, float] = {}
    for case in group:
        before = filled.compile_s
        filled.round(case.method, case.batch, 2)
        compile_s.setdefault(case.method, filled.compile_s - before)
    sides = {str(case): lambda case=case: filled.round(case.method, case.batch, arguments.steps) for case in group}
    rounds = quiet.alternate(sides, arguments.rounds, patience_s=arguments.patience_s)
    result = {}
    for case in group:
        found, dense = rounds.found[str(case)], rounds.found.get(str(Case("dense", "dense", case.batch, case.context)))
        entry = step_timing.judge(case.batch, found, filled.floor(case.method, case.batch), bandwidths)
        entry |= {**filled.facts(case.method), "bucket": batch, "compile_s": compile_s[case.method]}
        entry["quiet"] = rounds.facts
        if dense is not None and dense is not found:
            entry["faster_than_dense"] = common.ratio(step_timing.seconds(dense), step_timing.seconds(found))
        print(step_timing.line(str(case), entry), flush=True)
        if arguments.profile or arguments.kernels:
            entry |= profile(filled, case, arguments.profile, arguments.kernels)
        result[str(case)] = entry
    return result


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("decode_step", __doc__.splitlines()[0])
    step_timing.add_options(parser)
    parser.add_argument("--profile", type=pathlib.Path, metavar="DIR", help=f"keep a trace of {PROFILED_STEPS} steps")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a step and the gaps between them")
    parser.add_argument("--exact-batch", action="store_true", help="a program for every batch: nothing is padded")
    arguments = parser.parse_args(argv)
    step_timing.prepare(arguments)
    model = MODELS[arguments.model]
    cases = step_timing.matching(default_cases(model), arguments.only)
    run = common.Run("decode_step", arguments)
    start = time.perf_counter()
    bandwidths = step_timing.device_bandwidths(arguments.nominal)
    spec, weights = step_timing.load(arguments)
    found: dict[str, Any] = {}
    for group in groups(cases, arguments.exact_batch):
        found |= measure(group, spec, weights, arguments, bandwidths)
        gc.collect()  # the next pool needs the memory
    print(common.table(step_timing.HEADER, [step_timing.cells(name, entry) for name, entry in found.items()]))
    print(f"{time.perf_counter() - start:.0f} s in all")
    if arguments.plot:
        series = {
            "step": [entry["step_s"]["median"] * 1e3 for entry in found.values()],
            "floor": [entry["floor_s"]["measured"] * 1e3 for entry in found.values()],
        }
        bars.write(arguments.plot, f"Decode step, {model.config}, {spec.dtype}", list(found), series, "ms")
    run.finish({"bytes_per_s": bandwidths, "cases": found}, **step_timing.facts(spec, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
