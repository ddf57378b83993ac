"""Compiles TPU kernels and whole steps for TPUs on a machine without one, and watches what they cost.

    python -m benchmarks.tpu_aot            # compile everything and print
    python -m benchmarks.tpu_aot --json --force
    python -m benchmarks.tpu_aot --check    # fail where bytes or peak memory grew, or a program is missing

Needs libtpu (`pip install 'sparsejax[tpu]'` in an environment of its own). The programs really go through Mosaic and
XLA for each chip; nothing is allocated and nothing runs, so no speed follows from this. "Bytes accessed" is XLA's
estimate: of a kernel it knows only what the kernel says of itself, at full tables.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import common
from benchmarks.tpu_kernels import kernel_programs
from benchmarks.tpu_programs import Program, step_programs

CHIPS = {"v5e": ("v5e:2x2x1", "v5litepod-4"), "v6e": ("v6e:2x2x1", "v6e-4")}
"""Topology and accelerator type; every program is compiled for one device of it."""
WATCHED = ("bytes_accessed", "peak_memory_bytes")
COMPILERS = ("jax", "libtpu")
MOST_GROWTH = 0.05


def compile_for(program: Program) -> dict[str, Any]:
    """Compiles a program and returns what it costs."""
    jitted, arguments, static = program.build()
    compiled = jitted.trace(*arguments, **static).lower().compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return {
        "flops": int(cost.get("flops", 0)),
        "bytes_accessed": int(cost.get("bytes accessed", 0)),
        "peak_memory_bytes": int(memory.peak_memory_in_bytes),
        "argument_bytes": int(memory.argument_size_in_bytes),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "copied_bytes": copied_bytes(compiled.as_text()),
        **program.facts,
    }


def copied_bytes(text: str) -> int:
    """Bytes of the arrays of at least 1 MiB that a compiled program copies to change how they lie in HBM."""
    total = 0
    for dtype, sizes in re.findall(r" = (\w+)\[([\d,]+)\]\S* copy\(", text):
        bits = int((re.search(r"\d+", dtype) or ["8"])[0])
        size = bits // 8
        for length in sizes.split(","):
            size *= int(length)
        total += size if size >= 2**20 else 0
    return total


def device_of(chip: str) -> Any:
    """A device of the chip's topology. The first call loads libtpu."""
    from jax.experimental import topologies

    topology, accelerator = CHIPS[chip]
    os.environ["TPU_ACCELERATOR_TYPE"] = accelerator
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def compile_all(only: str) -> dict[str, dict[str, Any]]:
    """Every program whose name contains `only`, for every chip."""
    import jax

    found = {}
    for chip in CHIPS:
        device = device_of(chip)
        sharding = jax.sharding.SingleDeviceSharding(device)
        with jax.default_device(device):
            for program in (*kernel_programs(sharding), *step_programs(sharding)):
                name = f"{chip}/{program.name}"
                if only not in name:
                    continue
                start = time.perf_counter()
                record = found[name] = compile_for(program)
                shown = ", ".join(f"{key} {record[key] / 1e6:,.1f}M" for key in ("flops", *WATCHED, "copied_bytes"))
                print(f"{name}: {shown} ({time.perf_counter() - start:.1f} s)", flush=True)
    return found


def problems(found: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """What got worse, and what is only in one of the two."""
    reasons = [f"{name} is recorded but was not compiled" for name in sorted(set(recorded) - set(found))]
    reasons += [f"{name} has no record: run with --json --force" for name in sorted(set(found) - set(recorded))]
    for name in sorted(set(found) & set(recorded)):
        for key in WATCHED:
            now, before = found[name][key], recorded[name][key]
            if now > before * (1 + MOST_GROWTH):
                reasons.append(f"{name}: {key} grew from {before:,} to {now:,}, by more than {MOST_GROWTH:.0%}")
    return reasons


def main() -> None:
    parser = common.parser("tpu_aot", "Compiles kernels and steps for TPUs, without one.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only programs whose name contains it")
    parser.add_argument("--check", action="store_true", help="compare with the recorded result and fail if it is worse")
    arguments = parser.parse_args()
    if arguments.only and arguments.json:
        parser.error("--json records all programs, not --only some")
    # Set before JAX is imported: libtpu must neither look for a TPU nor ask a cloud about one.
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no TPU is taken, so others may compile meanwhile
    run = common.Run("tpu_aot", arguments)
    versions = run.manifest["versions"]
    versions["libtpu"] = importlib.metadata.version("libtpu")
    recorded: dict[str, Any] = {}
    if arguments.check:
        record = json.loads((common.RESULTS / "tpu_aot.json").read_text("utf-8"))
        recorded = {name: entry for name, entry in record["result"].items() if arguments.only in name}
        for name in COMPILERS:
            if versions[name] != (before := record["manifest"]["versions"][name]):
                raise SystemExit(f"recorded with {name} {before}, this is {versions[name]}: costs can't be compared")
    start = time.perf_counter()
    found = compile_all(arguments.only)
    print(f"{len(found)} programs in {time.perf_counter() - start:.0f} s")
    if arguments.check:
        if reasons := problems(found, recorded):
            raise SystemExit("\n".join(reasons))
        print("no program needs more than recorded")
    run.finish(found)


if __name__ == "__main__":
    main()
