"""What benchmarks share: the command line, summaries of samples, tables, and the result file with its manifest.

Both sides of a ratio are measured in the same run and in turn (`benchmarks.quiet.alternate`), so that whatever else the
machine does hits both alike. Imports neither jax nor torch.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TEXTS = ("persuasion.txt", "opticks.txt")
_PACKAGES = ("jax", "jaxlib", "numpy", "transformers")


# Samples


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks, as numpy's default."""
    if not values:
        raise ValueError("no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be in [0, 100], got {percent}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Median and spread of samples: `spread` is (largest - least) / median."""
    median = statistics.median(values)
    return {
        "median": median,
        "min": min(values),
        "max": max(values),
        "mean": statistics.fmean(values),
        "p99": percentile(values, 99),
        "spread": (max(values) - min(values)) / median if median else 0.0,
        "samples": len(values),
    }


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Ratio of two alternating measurements: of their medians, and the least and largest of the rounds."""
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} samples against {len(denominators)}: pairs are needed")
    pairs = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return {
        "ratio": statistics.median(numerators) / statistics.median(denominators),
        "least_pair": min(pairs),
        "largest_pair": max(pairs),
    }


# Command line and results


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    result = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = RESULTS / f"{name}.json"
    result.add_argument(
        "--json",
        nargs="?",
        type=pathlib.Path,
        const=default,
        metavar="FILE",
        help=f"write the result; without FILE to {default.relative_to(ROOT)}",
    )
    result.add_argument("--force", action="store_true", help="overwrite FILE")
    result.add_argument(
        "--patience-s",
        type=float,
        default=0.0,
        help="time to wait for quiet and to repeat rounds that others disturbed",
    )
    return result


def check_output(arguments: argparse.Namespace) -> None:
    """Refuses before anything is measured, not after."""
    path = arguments.json
    if path is not None and path.exists() and not arguments.force:
        raise SystemExit(f"{path} exists; --force overwrites it")
    if path is not None and not path.parent.is_dir():
        raise SystemExit(f"{path.parent} is not a folder")


def load_average() -> float | None:
    """Runnable processes over the last minute, or None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


class Run:
    """One benchmark run: notes the machine at its start and writes the result at its end.

    Args:
      name: the benchmark.
      arguments: parsed command line.
    """

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        check_output(arguments)
        self._arguments = arguments
        self.manifest: dict[str, Any] = {
            "benchmark": name,
            "command": f"python -m benchmarks.{name} " + " ".join(_shown(part) for part in sys.argv[1:]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "git_commit": _git_commit(),
            "cpu": _cpu_name(),
            "cpu_count": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "versions": {name: _version(name) for name in _PACKAGES if _version(name)},
            "arguments": {
                key: _shown(str(value)) if isinstance(value, (str, pathlib.Path)) else value
                for key, value in vars(arguments).items()
                if key not in ("json", "force")
            },
            "load_average": {"start": load_average()},
        }

    def keep(self, result: Mapping[str, Any], **more: Any) -> None:
        """Writes what there is so far, marked "unfinished", so that a run that is stopped loses nothing."""
        self._write({"manifest": self.manifest | more | {"unfinished": True}, "result": dict(result)})

    def finish(self, result: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Manifest (with `more`, such as dtype and shapes) and result; written if --json was given."""
        self.manifest["load_average"]["end"] = load_average()
        self.manifest.update(more)
        record = {"manifest": self.manifest, "result": dict(result)}
        print(f"load average {self.manifest['load_average']['start']} -> {self.manifest['load_average']['end']}")
        self._write(record)
        if self._arguments.json is not None:
            print(f"wrote {self._arguments.json}")
        return record

    def _write(self, record: Mapping[str, Any]) -> None:
        """The whole file or none of it, wherever the process is stopped."""
        path = self._arguments.json
        if path is not None:
            part = path.with_name(f"{path.name}.part")
            part.write_text(json.dumps(_rounded(record), indent=2) + "\n", "utf-8")
            part.replace(path)


def show_verdict(result: Mapping[str, Any]) -> None:
    """Prints `goals` and `invalid_because` of a result."""
    for goal in result["goals"]:
        found = f"{goal['found']:.4g}" if isinstance(goal["found"], float) else goal["found"]
        print(f"{goal['goal']}: {found} ({'met' if goal['met'] else 'missed'})")
    for why in result["invalid_because"]:
        print(f"INVALID: {why}")


def device_facts() -> dict[str, Any]:
    """Device and backend of JAX, for the manifest. Imports jax."""
    import jax

    device = jax.devices()[0]
    return {"device": device.device_kind, "backend": device.platform, "num_devices": jax.device_count()}


def _shown(text: str) -> str:
    """Paths of this machine mean nothing elsewhere: only their last part is kept."""
    return pathlib.Path(text).name if pathlib.PurePath(text).is_absolute() else text


def _rounded(value: Any) -> Any:
    """Five significant digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the checkout, with "+changes" if tracked files differ from it."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _cpu_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# Text


def prose() -> str:
    """About 22,000 tokens of public-domain English (tests/data/README.md)."""
    return "\n\n".join(map(prose_of, TEXTS))


def prose_of(name: str) -> str:
    """One of `TEXTS`."""
    return (ROOT / "tests" / "data" / name).read_text("utf-8").strip()


def windows(ids: Sequence[int], count: int, size: int) -> list[list[int]]:
    """`count` consecutive windows of `size` tokens, from the start again when the text is used up."""
    if size > len(ids):
        raise SystemExit(f"the text has {len(ids)} tokens, fewer than {size}")
    starts = [(i * size) % (len(ids) - size + 1) for i in range(count)]
    return [list(ids[start : start + size]) for start in starts]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Plain text: first column left, the others right."""
    lines = [[str(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    shown = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def use_compilation_cache() -> None:
    """Keeps compiled programs where the server keeps them, unless the environment says otherwise. Imports jax."""
    import jax

    from sparsejax.models.load.default_model import cache_dir

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
