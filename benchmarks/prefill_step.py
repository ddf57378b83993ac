"""Whole dense prefills (all layers, chunk by chunk through the runner) of a model shape, against their products.

    python -m benchmarks.prefill_step --json --plot prefill_step.svg
    python -m benchmarks.prefill_step --only "32K in 4K" --kernels    # where the time of one chunk goes

Random weights and tokens, batch 1. Chunks are submitted one after the other without waiting, as the scheduler may, each
with the pages it needs; the time ends when the sampled token has reached the host. All cases share a page table as wide
as the longest context. The floor counts, as is usual, the products of every layer with all tokens, the head's with the
last one, and attention of every query with the keys that it sees; at the speed of a bf16 product of two square matrices
measured in the same run (on a CPU, a smaller one in the model's dtype). Of the last layer a prefill needs only keys and
values, but for the last token, and the runner computes no more (but for the last of each chunk): "needed" leaves the
rest out, so a prefill may pass the floor, but not that. TFLOP/s are of what is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import bars, common, kernels, quiet, step_timing
from benchmarks.decode_attention import kilo
from benchmarks.prefill_attention import MATMUL, matmul_flops_per_s
from benchmarks.step_timing import MODELS, Model
from benchmarks.warm_up import temp_bytes

METHOD = "dense"
CPU_MATMUL = 512
PROFILED_CHUNKS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """Both in tokens."""

    context: int
    chunk: int

    def __str__(self) -> str:
        return f"{kilo(self.context)} in {kilo(self.chunk)}"

    @property
    def num_chunks(self) -> int:
        return -(-self.context // self.chunk)


def cases_of(model: Model, contexts: Sequence[int], chunks: Sequence[int]) -> list[Case]:
    """Every context in chunks of every size, shortest context first."""
    sizes = sorted({context // model.shrink for context in contexts})
    pairs = ((context, min(chunk // model.shrink, context)) for context in sizes for chunk in chunks)
    return [Case(*pair) for pair in dict.fromkeys(pairs)]


@dataclasses.dataclass(frozen=True)
class Floor:
    """Floating point operations of a prefill, and how many of them nothing depends on."""

    matmul_flops: int
    attention_flops: int
    idle_flops: int

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.attention_flops

    @property
    def needed_flops(self) -> int:
        return self.flops - self.idle_flops


def floor(spec: Any, context: int) -> Floor:
    """What a causal prefill of `context` tokens multiplies and adds."""
    group = spec.num_q_heads // spec.num_kv_heads
    qkv = spec.hidden_size * spec.num_kv_heads * (group + 2) * spec.head_dim
    out = spec.num_q_heads * spec.head_dim * spec.hidden_size
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    head = spec.hidden_size * spec.vocab_size
    pair = 4 * spec.head_dim * spec.num_q_heads
    before_last = (context - 1) * context // 2
    return Floor(
        matmul_flops=2 * spec.num_layers * (qkv + out + mlp) * context + 2 * head,
        attention_flops=pair * (before_last + context) * spec.num_layers,
        idle_flops=2 * (out + mlp) * (context - 1) + pair * before_last,
    )


@dataclasses.dataclass(frozen=True)
class Timed:
    """One prefill: until its token was on the host, and the host's time inside `prefill`, of all chunks."""

    seconds: float
    host_s: float


class Prefills:
    """A `DeviceRunner` with one row, and prompts for it.

    Attributes:
      compile_s: seconds spent on compiling, by chunk size.
      temp_bytes: what each program needs beside its arguments and results, by chunk size; None if XLA does not say.
    """

    def __init__(self, spec: Any, weights: Any, cases: Sequence[Case], page_size: int, implementation: str | None):
        import numpy as np

        from sparsejax import registry
        from sparsejax.programs import compile_workers
        from sparsejax.runner import DeviceRunner

        longest = max(case.context for case in cases)
        self.chunks = sorted({case.chunk for case in cases})
        self.geometry = spec.geometry(page_size, step_timing.window(longest, page_size))
        method, storage = registry.resolve(METHOD)
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, spec.vocab_size, longest).astype(np.int32)
        self.pages = 1 + rng.permutation(self.geometry.pages(longest)).astype(np.int32)
        self.runner = DeviceRunner(
            spec,
            weights,
            self.geometry,
            {METHOD: method},
            storage,
            num_rows=1,
            num_sequence_pages=1 + len(self.pages),
            decode_buckets=(1,),
            prefill_buckets=tuple((1, chunk) for chunk in self.chunks),
            implementation=implementation,
        )
        wanted = [program for program in self.runner.programs() if program.name == "prefill"]
        self.compile_s: dict[int, float] = {}
        self.temp_bytes: dict[int, int | None] = {}
        chunk_of = {program.key: chunk for program, chunk in zip(wanted, self.chunks, strict=True)}
        for compiled in self.runner.compile(wanted, min(len(wanted), compile_workers())):
            chunk = chunk_of[compiled.program.key]
            self.compile_s[chunk] = compiled.lower_s + compiled.compile_s
            self.temp_bytes[chunk] = nbytes = temp_bytes(compiled)
            memory = "" if nbytes is None else f", {nbytes / 2**20:,.0f} MiB of temporary memory"
            print(f"{compiled.program.label} compiled in {self.compile_s[chunk]:.1f} s{memory}", flush=True)

    def submit(self, start: int, end: int, sample: bool) -> Any:
        """Tokens `start` to `end` of the prompt; at 0 the row begins anew."""
        import numpy as np

        from sparsejax.plans import PrefillRow, SamplingRow

        columns = np.arange(self.geometry.pages(start), self.geometry.pages(end))
        updates = np.zeros((len(columns), 4), np.int32)
        updates[:, 2], updates[:, 3] = columns, self.pages[columns]
        row = PrefillRow(1, self.tokens[start:end], start == 0, sample, SamplingRow(), updates)
        return self.runner.prefill(METHOD, [row])

    def prompt(self, case: Case, first: int = 0, last: int | None = None) -> Timed:
        """Chunks `first` to `last` (exclusive; to the end if None) of a prompt.

        Raises:
          RuntimeError: logits were not finite.
        """
        last = case.num_chunks if last is None else last
        host, tickets = 0.0, []
        start = time.perf_counter()
        for i in range(first, last):
            begin, end = i * case.chunk, min((i + 1) * case.chunk, case.context)
            before = time.perf_counter()
            tickets.append(self.submit(begin, end, end == case.context))
            host += time.perf_counter() - before
        results = [tickets[-1].result()]
        seconds = time.perf_counter() - start
        results += [ticket.result() for ticket in tickets[:-1]]
        if not all(result.ok.all() for result in results):
            raise RuntimeError(f"{case}: logits are not finite")
        return Timed(seconds, host)


def judge(case: Case, found: Sequence[Timed], limit: Floor, rate: float) -> dict[str, Any]:
    """Rounds of one case against its floor; `rate` in FLOP per second."""
    seconds = common.summary([timed.seconds for timed in found])
    return {
        "seconds": seconds,
        "tokens_per_s": case.context / seconds["median"],
        "flops_per_s": limit.needed_flops / seconds["median"],
        "host_s": common.summary([timed.host_s for timed in found]),
        "floor_flops": dataclasses.asdict(limit),
        "floor_s": limit.flops / rate,
        "over_floor": seconds["median"] * rate / limit.flops,
        "needed_s": limit.needed_flops / rate,
        "over_needed": seconds["median"] * rate / limit.needed_flops,
    }


HEADER = ("case", "s", "spread", "tokens/s", "TFLOP/s", "floor s", "over floor", "over needed", "host ms", "compile s")


def cells(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{entry['seconds']['median']:.3f}",
        f"{entry['seconds']['spread']:.1%}",
        f"{entry['tokens_per_s']:,.0f}",
        f"{entry['flops_per_s'] / 1e12:.3g}",
        f"{entry['floor_s']:.3f}",
        f"{entry['over_floor']:.3f}",
        f"{entry['over_needed']:.3f}",
        f"{entry['host_s']['median'] * 1e3:.1f}",
        f"{entry['compile_s']:.1f}",
    )


def profile(prefills: Prefills, case: Case, keep: pathlib.Path | None) -> dict[str, Any]:
    """Traces the last chunks of a prompt and prints the kernels of one; the first traced one waits for its launch."""
    traced = min(PROFILED_CHUNKS, case.num_chunks)
    first = case.num_chunks - traced
    if first:
        prefills.prompt(case, 0, first)
    with contextlib.ExitStack() as stack:
        folder = keep or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder / re.sub(r"[^a-z0-9]+", "_", str(case).lower())
        with kernels.profiled(folder):
            prefills.prompt(case, first)
        print(f"\n{case}: a chunk of the last {traced}, ending at {case.context} tokens")
        report, text = kernels.report_of(folder, traced)
    print(text, flush=True)
    return {} if report is None else {"device": kernels.facts(report)}


def measure(prefills: Prefills, spec: Any, cases: Sequence[Case], arguments: Any, rate: float) -> dict[str, Any]:
    """Results by case, for cases of one context, which take turns."""
    limit = floor(spec, cases[0].context)
    # A prompt of 128K tokens takes 11 s, and its time hardly varies.
    rounds = max(1, min(arguments.rounds, int(arguments.limit_s / (limit.flops / rate))))
    for case in cases:
        prefills.prompt(case, 0, 1)
    sides = {str(case): lambda case=case: prefills.prompt(case) for case in cases}
    measured = quiet.alternate(sides, rounds, patience_s=arguments.patience_s)
    result = {}
    for case in cases:
        entry = judge(case, measured.found[str(case)], limit, rate)
        facts = {"compile_s": prefills.compile_s[case.chunk], "temp_bytes": prefills.temp_bytes[case.chunk]}
        entry |= {**facts, "quiet": measured.facts}
        shown = zip(HEADER[1:], cells(str(case), entry)[1:], strict=True)
        print(f"{case}: " + ", ".join(f"{title} {cell}" for title, cell in shown), flush=True)
        if arguments.kernels or arguments.profile:
            entry |= profile(prefills, case, arguments.profile)
        result[str(case)] = entry
    return result


def matmul_rate(dtype: str) -> float:
    """FLOP per second of the product that the floor is reckoned with. Prints it."""
    import jax

    cpu = jax.default_backend() == "cpu"
    size, dtype = (CPU_MATMUL, dtype) if cpu else (MATMUL, "bfloat16")
    rate = matmul_flops_per_s(size, dtype)
    print(f"product of {size}^3, {dtype}: {rate / 1e12:.4g} TFLOP/s", flush=True)
    return rate


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("prefill_step", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="qwen3-8b", help="shape; small ones shrink tokens")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32, or auto: by device")
    parser.add_argument("--implementation", help="of the kernels; chosen if not given")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 131072], metavar="TOKENS")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4096, 8192], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5, help="of each case; fewer where they pass --limit-s")
    parser.add_argument("--limit-s", type=float, default=20.0, help="time for the rounds of a case, by its floor")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases whose name matches one")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a chunk and the gaps between them")
    parser.add_argument("--profile", type=pathlib.Path, metavar="DIR", help="the same, and keep the traces")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.svg", help="draw the result")
    arguments = parser.parse_args(argv)
    check(arguments)
    model = MODELS[arguments.model]
    cases = step_timing.matching(cases_of(model, arguments.contexts, arguments.chunks), arguments.only)
    run = common.Run("prefill_step", arguments)
    start = time.perf_counter()
    spec, weights = step_timing.load(arguments)
    rate = matmul_rate(spec.dtype)
    prefills = Prefills(spec, weights, cases, model.page_size, arguments.implementation)
    found: dict[str, Any] = {}
    for context in dict.fromkeys(case.context for case in cases):
        found |= measure(prefills, spec, [case for case in cases if case.context == context], arguments, rate)
    print(common.table(HEADER, [cells(name, entry) for name, entry in found.items()]))
    print(f"{time.perf_counter() - start:.0f} s in all")
    if arguments.plot:
        series = {
            "prefill": [entry["seconds"]["median"] for entry in found.values()],
            "floor": [entry["floor_s"] for entry in found.values()],
        }
        bars.write(arguments.plot, f"Dense prefill, {model.config}, {spec.dtype}", list(found), series, "s")
    run.finish({"matmul_flops_per_s": rate, "cases": found}, **step_timing.facts(spec, arguments))
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Refuses before anything is measured, and leaves the device's memory to the benchmark."""
    step_timing.reserve_memory()
    bars.check(arguments.plot)
    model = MODELS[arguments.model]
    for chunk in arguments.chunks:
        if chunk // model.shrink % model.page_size:
            raise SystemExit(f"--chunks: {chunk} tokens, {chunk // model.shrink} here, are not whole pages")


if __name__ == "__main__":
    sys.exit(main())
