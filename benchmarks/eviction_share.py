"""What a method that evicts costs, as a share of a long dense prefill and of dense decode steps of the same run.

    python -m benchmarks.eviction_share --json
    python -m benchmarks.eviction_share --methods "snapkv(head_mode=per_kv_head)" --kernels

By default every member of the registry that evicts, at its defaults, which suit 32K tokens; once more where it evicts
while decoding only if told to. Random weights; the KV state is filled directly. Measured are a prompt chunk without
history and the last one of the prompt, compactions after a chunk, the prompt and a token, from and to the lengths that
the method's host arithmetic says, and decode steps at the length that is left; chunks and steps beside dense ones of
the same length, in turn: the difference is what the method's hooks add. A prompt that is read once more is read once
more. What happens once in a prompt counts with the prefill, even where it is the first compaction of the answer.
Between the two measured histories a chunk's time is a straight line. Programs have `--layers` layers and times are
scaled up to the model's, but the dense prefill and the dense steps that shares are of, which have all layers.

A compaction's "moving" is the same program with rows chosen for nothing; the rest is scores and choice. Its floor is
the kept rows read and written at the bandwidth of a device copy; "key read" is the time to read all keys once.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import common, eviction_plan, kernels, quiet, step_timing
from benchmarks.decode_attention import kilo
from benchmarks.step_timing import MODELS

DENSE = "dense"
ONCE = ("chunk", "prompt", "answer")
"""Compactions that a prompt costs; those after a token are shared out over tokens."""
ANSWER_SHARE = 8
"""Plans follow an answer of this part of the prompt."""


def encode(text: str, vocab_size: int) -> list[int]:
    """Some token id for every word: for methods that want those of a text."""
    return [zlib.crc32(word.encode()) % vocab_size for word in text.split() or [text]]


def named(compositions: Sequence[str]) -> dict[str, str]:
    """Compositions by their text without knobs, or with them where that says more than one."""
    short = [re.sub(r"\([^)]*\)", "", text).strip() for text in compositions]
    return {text if short.count(name) > 1 else name: text for name, text in zip(short, compositions, strict=True)}


def methods_of(compositions: dict[str, str], spec: Any, shape: Any) -> tuple[dict[str, Any], Any, dict[str, str]]:
    """Methods by name, the storage that all share, and why others are left out."""
    from benchmarks.eviction_programs import geometry_of
    from sparsejax import combine, registry
    from sparsejax.errors import MethodError

    dense, storage = registry.resolve(DENSE)
    found, refused = {DENSE: dense}, {}
    for name, text in compositions.items():
        try:
            method, stored = registry.resolve(text)
        except MethodError as error:
            refused[name] = str(error)
            continue
        method = combine.bound(method, lambda words: encode(words, spec.vocab_size))
        reasons = method.check(method.params, geometry_of(spec, shape, {name: method}))
        if method.count_rows is not None:
            reasons = [*reasons, "the device counts the rows of its heads, which no plan foresees"]
        if method.page_size(method.params) not in (None, shape.page):
            reasons = [*reasons, f"it wants pages of {method.page_size(method.params)} tokens"]
        if stored != storage:
            reasons = [*reasons, f"it is stored as {stored.name}"]
        if reasons:
            refused[name] = "; ".join(reasons)
            continue
        found[name] = method
    return found, storage, refused


# Numbers


def extra(samples: Sequence[float], dense: Sequence[float], scale: float) -> dict[str, float]:
    """What a method adds to dense: median, least and largest difference of the rounds, times `scale`."""
    differences = [(a - b) * scale for a, b in zip(samples, dense, strict=True)]
    return {"median": statistics.median(differences), "min": min(differences), "max": max(differences)}


def along(histories: Sequence[float], ends: tuple[int, int], values: tuple[float, float]) -> float:
    """Sum over histories of what lies on the straight line through two measured ones."""
    slope = (values[1] - values[0]) / (ends[1] - ends[0])
    return sum(values[0] + slope * (history - ends[0]) for history in histories)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Seconds by round, of programs with `layers` layers; `scale` is all layers over those."""

    chunks: dict[str, dict[int, list[float]]]
    steps: dict[str, dict[int, list[float]]]
    dense_steps: dict[str, dict[int, list[float]]]
    compactions: dict[str, dict[tuple[str, str], list[float]]]
    scale: float
    replays: dict[str, list[float]] = dataclasses.field(default_factory=dict)


def judge(bench: Any, name: str, rounds: Rounds, reference: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """All costs of one method, of all layers. `reference` holds the dense prefill and steps of all layers."""
    plan, scale = bench.sides[name].plan, rounds.scale
    ends = tuple(rounds.chunks[DENSE])
    added = {h: extra(rounds.chunks[name][h], rounds.chunks[DENSE][h], scale) for h in ends}
    medians = {h: statistics.median(rounds.chunks[DENSE][h]) * scale for h in ends}
    first, last = ends
    in_chunks = along(plan.histories, ends, (added[first]["median"], added[last]["median"]))
    dense_chunks = along(plan.histories, ends, (medians[first], medians[last]))
    full_chunks = along(bench.sides[DENSE].plan.histories, ends, (medians[first], medians[last]))
    compactions = {}
    key_bytes = sum(a.nbytes // a.shape[0] // a.shape[1] for n, a in bench.state.pools.items() if n.startswith("k"))
    for when, compaction in plan.compactions.items():
        whole, moving = (rounds.compactions[name][when, part] for part in ("whole", "moving"))
        floor_s = bench.moved_bytes(name, compaction) * scale / bandwidth
        rows = float(compaction.lengths.mean()) * bench.geometry.head_pages_per_sequence_page
        compactions[when] = {
            "seconds": common.summary([value * scale for value in whole]),
            "moving_s": common.summary([value * scale for value in moving]),
            "choosing_s": statistics.median(a - b for a, b in zip(whole, moving, strict=True)) * scale,
            "floor_s": floor_s,
            "moving_share_of_floor": floor_s / (statistics.median(moving) * scale),
            "key_read_s": rows * key_bytes * scale / bandwidth,
            "rows_before": float(compaction.lengths.mean()),
            "rows_kept": float(compaction.kept.mean()),
            "number": compaction.number,
        }
    cost = {when: entry["seconds"]["median"] * entry["number"] for when, entry in compactions.items()}
    again = {}
    if plan.replays:
        again = common.summary([value * scale for value in rounds.replays[name]])
        again |= {"number": len(plan.replays), "tokens": max(plan.replays)}
    evicting = sum(cost.get(when, 0.0) for when in ONCE) + len(plan.replays) * again.get("median", 0.0)
    prefill_s = reference["prefill_s"]["median"]
    decode = {}
    for batch, samples in rounds.steps[name].items():
        more = extra(samples, rounds.dense_steps[name][batch], scale)
        dense_s = reference["steps"][batch, plan.mean_resident]
        share = (more["median"] + batch * cost.get("token", 0.0)) / dense_s["median"]
        decode[str(batch)] = {"extra_s": more, "dense_step_s": dense_s, "share": share}
    return {
        "resident_tokens": plan.mean_resident,
        "histories": plan.histories,
        "chunk_extra_s": {str(history): value for history, value in added.items()},
        "prompt_extra_s": in_chunks,
        "compactions": compactions,
        "replays": again,
        "prefill_share": (in_chunks + evicting) / prefill_s,
        "prefill_over_dense": 1.0 + (dense_chunks - full_chunks + in_chunks + evicting) / prefill_s,
        "decode": decode,
        "temp_bytes": {" ".join(map(str, key[1:])): n for key, n in bench.temp_bytes.items() if key[0] == name},
    }


HEADER = ("method", "chunk +ms", "prompt +ms", "compactions ms", "replays ms", "prefill share", "prefill/dense")
COMPACTIONS = ("method", "after", "rows", "kept", "number", "ms", "spread", "moving", "choosing", "floor", "key read")
STEPS = ("method", "rows", "batch", "step +ms", "from", "to", "dense ms", "compactions ms", "share")


def print_tables(found: dict[str, Any]) -> None:
    prompts, compactions, decode = [], [], []
    for name, entry in found.items():
        done = entry["compactions"]
        in_prompt = sum(done[p]["seconds"]["median"] * done[p]["number"] for p in ONCE if p in done)
        last = list(entry["chunk_extra_s"].values())[-1]["median"]
        shares = f"{entry['prefill_share']:.2%}", f"{entry['prefill_over_dense']:.3f}"
        again = entry["replays"]["median"] * entry["replays"]["number"] if entry["replays"] else 0.0
        prompts.append((name, _ms(last), _ms(entry["prompt_extra_s"]), _ms(in_prompt), _ms(again), *shares))
        for when, one in done.items():
            numbers = f"{one['rows_before']:,.0f}", f"{one['rows_kept']:,.0f}", f"{one['number']:.4g}"
            times = one["moving_s"]["median"], one["choosing_s"], one["floor_s"], one["key_read_s"]
            seconds = _ms(one["seconds"]["median"]), f"{one['seconds']['spread']:.1%}"
            compactions.append((name, when, *numbers, *seconds, *map(_ms, times)))
        per_token = done["token"]["seconds"]["median"] * done["token"]["number"] if "token" in done else 0.0
        for batch, one in entry["decode"].items():
            more = [_ms(one["extra_s"][key]) for key in ("median", "min", "max")]
            rest = _ms(one["dense_step_s"]["median"]), _ms(per_token * int(batch)), f"{one['share']:.2%}"
            decode.append((name, f"{entry['resident_tokens']:,}", batch, *more, *rest))
    for header, rows in ((HEADER, prompts), (COMPACTIONS, compactions), (STEPS, decode)):
        print("\n" + common.table(header, rows), flush=True)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


# The run


def alternated(sides: dict[Any, Callable[[], float]], arguments: Any, facts: list[Any]) -> dict[Any, list[float]]:
    """Seconds by round of each side, all sides in turn."""
    start = time.perf_counter()
    found = quiet.alternate(sides, arguments.rounds, patience_s=arguments.patience_s)
    print(f"{len(sides)} sides in {time.perf_counter() - start:.1f} s", flush=True)
    facts.append(found.facts)
    return found.found


def reference_of(bench: Any, residents: set[int], arguments: Any, facts: list[Any]) -> dict[str, Any]:
    """The dense prefill and the dense steps of all layers: summaries, steps by (batch, rows)."""
    prompts = alternated({"prompt": bench.prompt(DENSE)}, arguments, facts)["prompt"]
    sides = {
        (batch, rows): bench.step(DENSE, batch, rows) for batch in bench.shape.batches for rows in sorted(residents)
    }
    steps = {case: common.summary(samples) for case, samples in alternated(sides, arguments, facts).items()}
    return {"prefill_s": common.summary(prompts), "steps": steps}


def measure(bench: Any, scale: float, arguments: Any, facts: list[Any]) -> Rounds:
    """Everything but the reference."""
    shape, evicting = bench.shape, [name for name in bench.sides if name != DENSE]
    chunks: dict[str, dict[int, list[float]]] = {name: {} for name in bench.sides}
    for history in (0, shape.context - shape.chunk):
        found = alternated({name: bench.chunk(name, history) for name in bench.sides}, arguments, facts)
        for name, samples in found.items():
            chunks[name][history] = samples
    steps: dict[str, dict[int, list[float]]] = {name: {} for name in evicting}
    dense: dict[str, dict[int, list[float]]] = {name: {} for name in evicting}
    for batch in shape.batches:
        rows = {name: bench.sides[name].plan.mean_resident for name in evicting}
        sides: dict[Any, Any] = {}
        for name in evicting:
            sides.setdefault(rows[name], bench.step(DENSE, batch, rows[name]))
            sides[name] = bench.step(name, batch, bench.sides[name].plan.resident)
        found = alternated(sides, arguments, facts)
        for name in evicting:
            steps[name][batch], dense[name][batch] = found[name], found[rows[name]]
    compactions: dict[str, dict[tuple[str, str], list[float]]] = {name: {} for name in evicting}
    cases = [(name, when) for name in evicting for when in bench.sides[name].plan.compactions]
    parts = [(*case, part) for case in cases for part in ("whole", "moving")]
    if parts:
        for (name, when, part), samples in alternated(
            {case: bench.compaction(*case) for case in parts}, arguments, facts
        ).items():
            compactions[name][when, part] = samples
    again = {name: bench.replay(name) for name in evicting if bench.sides[name].plan.replays}
    replays = alternated(again, arguments, facts) if again else {}
    return Rounds(chunks, steps, dense, compactions, scale, replays)


def show_kernels(bench: Any, name: str) -> None:
    """Traces the last chunk, a step and the compactions of a method, and prints their kernels."""
    shape, plan = bench.shape, bench.sides[name].plan
    batch = shape.batches[0]
    sides = {"chunk": (bench.chunk(name, shape.context - shape.chunk, 1), 1)}
    sides["step"] = bench.step(name, batch, plan.resident), shape.steps
    sides |= {when: (bench.compaction(name, when, "whole", 1), 1) for when in plan.compactions}
    for title, (run, calls) in sides.items():
        with tempfile.TemporaryDirectory() as folder:
            with kernels.profiled(pathlib.Path(folder)):
                run()
            print(f"\n{name}: {title}, {bench.geometry.num_layers} layers")
            print(kernels.report_of(pathlib.Path(folder), calls)[1], flush=True)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    from sparsejax.runner import CUBLAS_ROWS

    parser = common.parser("eviction_share", (__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="qwen3-8b", help="shape; small ones shrink tokens")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32, or auto: by device")
    parser.add_argument("--implementation", help="of the kernels; chosen if not given")
    parser.add_argument("--methods", nargs="+", metavar="COMPOSITION", help="instead of every member that evicts")
    parser.add_argument("--context", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a prompt chunk")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="rows of decode steps")
    parser.add_argument("--layers", type=int, default=9, help="of the programs of methods")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side, in turn")
    parser.add_argument("--kernels", action="store_true", help="also print the kernels of every program")
    arguments = parser.parse_args(argv)
    if max(arguments.batches) >= CUBLAS_ROWS:
        raise SystemExit(f"--batches: from {CUBLAS_ROWS} rows on the runner compiles otherwise")
    if arguments.context % arguments.chunk or arguments.context < 2 * arguments.chunk:
        raise SystemExit("--context must be two or more whole chunks")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    step_timing.reserve_memory()
    run = common.Run("eviction_share", arguments)
    start = time.perf_counter()
    bandwidth = step_timing.device_bandwidths(None)["measured"]
    spec, weights = step_timing.load(arguments)
    from benchmarks.eviction_programs import Bench, Shape

    model = MODELS[arguments.model]
    context, chunk = arguments.context // model.shrink, arguments.chunk // model.shrink
    shape = Shape(model.page_size, context, chunk, context // ANSWER_SHARE, tuple(arguments.batches))
    given = arguments.methods
    compositions = named(given) if given else eviction_plan.default_compositions(model.shrink)
    depth = min(arguments.layers, spec.num_layers)
    shallow = dataclasses.replace(spec, num_layers=depth)
    methods, storage, refused = methods_of(compositions, shallow, shape)
    for name, reason in refused.items():
        print(f"left out: {name}: {reason}", flush=True)
    fewer = {**weights, "layers": weights["layers"][:depth]}
    bench = Bench(shallow, fewer, shape, methods, storage, arguments.implementation)
    whole = bench
    if depth < spec.num_layers:
        only = {DENSE: methods[DENSE]}
        whole = Bench(spec, weights, shape, only, storage, arguments.implementation, bench.resident)
    before = time.perf_counter()
    failed = bench.compile()
    if whole is not bench:
        failed |= whole.compile()
    print(f"compiled in {time.perf_counter() - before:.1f} s, after {before - start:.1f} s", flush=True)
    for name, reason in failed.items():
        print(f"FAILED: {name}: {reason}", flush=True)
    residents = {side.plan.mean_resident for name, side in bench.sides.items() if name != DENSE}
    facts: list[Any] = []
    reference = reference_of(whole, residents, arguments, facts)
    prefill = reference["prefill_s"]
    print(f"dense prefill of {kilo(context)} tokens: {_ms(prefill['median'])} ms, spread {prefill['spread']:.1%}")
    rounds = measure(bench, spec.num_layers / depth, arguments, facts)
    found = {name: judge(bench, name, rounds, reference, bandwidth) for name in bench.sides if name != DENSE}
    print_tables(found)
    for name, fine in (bench.finite() | whole.finite()).items():
        if not fine:
            raise RuntimeError(f"{name}: logits are not finite")
    if arguments.kernels:
        for name in bench.sides:
            show_kernels(bench, name)
    print(f"{time.perf_counter() - start:.0f} s in all")
    shown = {f"B={batch} L={rows}": value for (batch, rows), value in reference["steps"].items()}
    result = {"copy_bytes_per_s": bandwidth, "dense": {"prefill_s": prefill, "steps": shown}, "methods": found}
    result |= {"compositions": compositions, "left_out": refused, "failed": failed, "quiet": facts}
    run.finish(result, **step_timing.facts(spec, arguments), context=context, chunk=chunk, layers=depth)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
