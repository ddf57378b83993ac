"""How long the programs of a server take to compile, one by one and together, without weights.

    python -m benchmarks.warm_up                                   # Qwen3-8B shape: empty cache, then full
    python -m benchmarks.warm_up --model smollm2-135m --workers 1  # one after another
    python -m benchmarks.warm_up --only "decode*" --skip-warm

Each start is a process of its own that describes the server's programs (weights and state as shapes; nothing is loaded)
and compiles them as the server does: lowered one after another, compiled several at once. Cold has an empty folder of
compiled programs, warm the folder that the cold one left. What is counted is the time from the first program to the
last; the interpreter, imports and the device come before it and are shown apart. Times of programs that are compiled at
once overlap, so they add up to more than the whole.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import common

KV_BYTES = 60 << 30  # never allocated: as much as an 8B model leaves of a large card
GOAL_S = {"cold": 60.0, "warm": 10.0}


def describe(arguments: argparse.Namespace) -> tuple[Any, list[Any]]:
    """A runner without weights or pages, and the programs it would compile."""
    import jax

    from sparsejax import capacity
    from sparsejax.arrays import is_spec
    from sparsejax.config import EngineConfig
    from sparsejax.models.load import dummy, resolve_dtype
    from sparsejax.models.registry import get_architecture
    from sparsejax.runner import DeviceRunner
    from sparsejax.state import StateSize, state_specs

    def abstract(specs: Any) -> Any:
        return jax.tree.map(lambda spec: spec.abstract(), specs, is_leaf=is_spec)

    spec = dummy.dummy_spec(arguments.model, resolve_dtype(arguments.dtype))
    config = EngineConfig(
        sparse_method=arguments.sparse_method,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        kv_cache_memory_bytes=KV_BYTES,
    )
    plan = capacity.plan(config, spec, capacity.checkpoint_id(arguments.model))
    runner = DeviceRunner(
        spec,
        abstract(get_architecture(spec.architecture).weight_specs(spec)),
        plan.geometry,
        plan.methods,
        plan.storage,
        num_rows=plan.num_rows,
        num_sequence_pages=1,
        decode_buckets=plan.decode_buckets,
        prefill_buckets=plan.prefill_buckets,
        implementation=arguments.implementation,
    )
    size = StateSize(plan.num_rows, plan.num_sequence_pages, spec.vocab_size)
    runner.state = abstract(state_specs(plan.geometry, size, tuple(plan.methods.values()), plan.storage))
    programs = [p for p in runner.programs() if any(fnmatch.fnmatchcase(p.label, only) for only in arguments.only)]
    if not programs:
        raise SystemExit("--only matches none of: " + "; ".join(p.label for p in runner.programs()))
    return runner, programs


def temp_bytes(compiled: Any) -> int | None:
    """Memory that a `Compiled` program needs beside its arguments and results; None if XLA does not say."""
    return getattr(compiled.call.memory_analysis(), "temp_size_in_bytes", None)


def compile_here(arguments: argparse.Namespace) -> dict[str, Any]:
    """Describes and compiles everything in this process."""
    from sparsejax.programs import compile_workers

    begin = time.perf_counter()
    runner, programs = describe(arguments)
    workers = arguments.workers or compile_workers()
    start = time.perf_counter()
    found = {}
    for compiled in runner.compile(programs, workers):
        found[compiled.program.label] = {
            "lower_s": compiled.lower_s,
            "compile_s": compiled.compile_s,
            "done_s": time.perf_counter() - start,
            "temp_bytes": temp_bytes(compiled),
        }
    end = time.perf_counter()
    return {
        "seconds": end - start,
        "prepare_s": start - begin,
        "workers": workers,
        "programs": found,
        "device": common.device_facts(),
    }


def start_process(arguments: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """`compile_here` in a fresh interpreter whose compiled programs are kept in `folder`."""
    env = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    result = folder / "result.json"
    command = [sys.executable, "-m", "benchmarks.warm_up", *sys.argv[1:], "--in-process", str(result)]
    subprocess.run(command, cwd=common.ROOT, env=env, check=True, timeout=arguments.timeout_s)
    return json.loads(result.read_text("utf-8"))


def table(starts: dict[str, dict[str, Any]]) -> str:
    """Seconds of every program in every start, the slowest first."""
    first, *_ = starts.values()
    order = sorted(first["programs"], key=lambda name: -first["programs"][name]["compile_s"])
    header = ["program", *(f"{name} {part}" for name in starts for part in ("lower s", "compile s")), "temporary MiB"]
    rows = []
    for label in order:
        entries = [start["programs"][label] for start in starts.values()]
        temporary = entries[0]["temp_bytes"]
        cells = [f"{entry[part]:.2f}" for entry in entries for part in ("lower_s", "compile_s")]
        rows.append([label, *cells, "-" if temporary is None else f"{temporary / 2**20:,.1f}"])
    sums = [
        f"{sum(entry[part] for entry in start['programs'].values()):.2f}"
        for start in starts.values()
        for part in ("lower_s", "compile_s")
    ]
    rows.append([f"sum of {len(order)}", *sums, ""])
    return common.table(header, rows)


def main() -> int:
    parser = common.parser("warm_up", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help="built-in config, or a config.json")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32, or auto: by device")
    parser.add_argument("--sparse-method", default="dense", help="as for the server")
    parser.add_argument("--max-model-len", type=int, help="as for the server")
    parser.add_argument("--max-num-seqs", type=int, help="as for the server")
    parser.add_argument("--implementation", help="of the kernels; chosen if not given")
    parser.add_argument("--workers", type=int, help="compilations at once; by cores if not given")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="programs whose label matches one")
    parser.add_argument("--skip-warm", action="store_true", help="the cold start only")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of a start")
    parser.add_argument("--in-process", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        arguments.in_process.write_text(json.dumps(compile_here(arguments)), "utf-8")
        return 0
    run = common.Run("warm_up", arguments)
    starts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="sparsejax-warm-up-") as folder:
        for name in ("cold",) if arguments.skip_warm else ("cold", "warm"):
            begin = time.perf_counter()
            found = starts[name] = start_process(arguments, pathlib.Path(folder))
            found["process_s"] = time.perf_counter() - begin
            print(
                f"{name}: {len(found['programs'])} programs in {found['seconds']:.1f} s with {found['workers']} workers"
                f" (goal for an 8B model on an H200: {GOAL_S[name]:g} s); the whole process {found['process_s']:.1f} s",
                flush=True,
            )
    print(table(starts))
    device = starts["cold"].pop("device")
    for start in starts.values():
        start.pop("device", None)
    run.finish(starts, **device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
