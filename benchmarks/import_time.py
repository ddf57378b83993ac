"""What `import sparsejax` costs beside `import jax`: python -m benchmarks.import_time [--save-result FILE]

Both are imported in fresh interpreters, in turn, so that whatever else the machine does hits both alike. `import
sparsejax` alone loads no JAX, so the fair number imports JAX first: what sparsejax adds. The public names are resolved
as well (`from sparsejax import LLM, SamplingParams`), which is what a program does first.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
STATEMENTS = {
    "jax": "import jax",
    "jax + sparsejax": "import jax, sparsejax",
    "sparsejax": "import sparsejax",
    "names": "import jax; from sparsejax import LLM, SamplingParams",
}


def seconds(statement: str) -> float:
    """Wall-clock seconds of one fresh interpreter that runs `statement`, its start included."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], cwd=ROOT, check=True)
    return time.perf_counter() - began


def main() -> int:
    """Prints medians and the ratio to `import jax`; exits 1 if sparsejax adds more than 10%."""
    parser = argparse.ArgumentParser(description="Cost of importing sparsejax.")
    parser.add_argument("--repeats", type=int, default=15, help="interpreters per statement")
    parser.add_argument("--save-result", type=pathlib.Path, metavar="FILE", help="write JSON")
    arguments = parser.parse_args()
    for statement in STATEMENTS.values():
        seconds(statement)  # bytecode caches
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(arguments.repeats):
        for name, statement in STATEMENTS.items():
            times[name].append(seconds(statement))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        spread = f"{min(times[name]):.3f} to {max(times[name]):.3f}"
        print(f"{name:<16} {median:.3f} s  ({spread}, x {median / medians['jax']:.3f} of jax)")
    if arguments.save_result:
        result = {
            "benchmark": "import_time",
            "command": "python -m benchmarks.import_time",
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "repeats": arguments.repeats,
            "median_s": {name: round(median, 4) for name, median in medians.items()},
            "ratio_to_jax": round(medians["jax + sparsejax"] / medians["jax"], 4),
        }
        arguments.save_result.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    return int(medians["jax + sparsejax"] > 1.1 * medians["jax"])


if __name__ == "__main__":
    sys.exit(main())
