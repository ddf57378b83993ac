"""The kernels of a trace made by jax.profiler, by their time per step, and the gaps between them.

    python -m benchmarks.kernels TRACE --steps 5

TRACE is an .xplane.pb file or a folder that holds one. Only GPU planes have kernels. Kernels are told apart by their
name without the numbers at its end, which count copies in an unrolled program, and by their grid, which differs between
the products of a layer. Kernels inside command buffers are listed one by one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import common

_DEVICE = "/device:GPU:"
_DERIVED = ("XLA ", "Async XLA", "Framework", "TensorFlow", "Step", "Source", "Launch Stats", "Host Offload")
"""Beginnings of the names of lines that retell what the streams did."""
GAP_LIMITS_US = (1.0, 2.0, 5.0, 20.0, 100.0)


class Kernel(NamedTuple):
    """One execution on the device: a kernel, copy or memset. XLA's name of it and the grid are "" if unknown."""

    name: str
    start_ns: float
    end_ns: float
    operation: str = ""
    grid: str = ""

    @property
    def family(self) -> str:
        return family(self.name)

    @property
    def kind(self) -> str:
        """The family with the grid."""
        return f"{self.family} [{self.grid}]" if self.grid else self.family


def load(path: pathlib.Path) -> Any:
    """The `jax.profiler.ProfileData` of a trace file, or of the newest one below a folder.

    Raises:
      FileNotFoundError: the folder holds no trace.
    """
    import jax

    if path.is_dir():
        found = sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise FileNotFoundError(f"{path} holds no .xplane.pb file")
        path = found[-1]
    return jax.profiler.ProfileData.from_file(str(path))


def device_kernels(profile: Any) -> tuple[list[Kernel], list[str]]:
    """What the first GPU of a trace executed, by start, and the names of all planes.

    The list is empty if there is no GPU plane.
    """
    planes = list(profile.planes)
    names = [plane.name for plane in planes]
    devices = sorted((plane for plane in planes if plane.name.startswith(_DEVICE)), key=lambda plane: plane.name)
    if not devices:
        return [], names
    lines = list(devices[0].lines)
    streams = [line for line in lines if line.name.startswith("Stream")]
    streams = streams or [line for line in lines if not line.name.startswith(_DERIVED)]
    found = []
    for line in streams:
        for event in line.events:
            stats = {key: str(value) for key, value in event.stats if key in ("hlo_op", "kernel_details")}
            grid = re.search(r"grid:([\d,]+)", stats.get("kernel_details", ""))
            end_ns = event.start_ns + event.duration_ns
            known = stats.get("hlo_op", ""), grid[1] if grid else ""
            found.append(Kernel(event.name, event.start_ns, end_ns, *known))
    return sorted(found, key=lambda kernel: kernel.start_ns), names


def family(name: str) -> str:
    """A name without the numbers that tell copies apart: "loop_add_fusion_12" and "fusion.3.1" lose theirs."""
    return re.sub(r"([._]\d+)+$", "", name)


def without_first_step(kernels: list[Kernel], steps: int) -> tuple[list[Kernel], int]:
    """Leaves out the first step, which waits for its launch, where all steps are seen to execute equally much.

    Returns the kernels and the number of steps they belong to.
    """
    per_step, rest = divmod(len(kernels), steps)
    return (kernels[per_step:], steps - 1) if steps > 1 and not rest else (kernels, steps)


class Group(NamedTuple):
    """All executions of one kind, per step."""

    name: str
    operations: tuple[str, ...]
    seconds: float
    count: float


class Gap(NamedTuple):
    """Idle time between the end of one family and the start of another, per step."""

    before: str
    after: str
    seconds: float
    count: float


class Report(NamedTuple):
    """A step on the device. Seconds and counts are per step.

    Attributes:
      groups: by time, longest first.
      sum_s: of all executions; more than `busy_s` where streams overlap.
      busy_s: time in which anything ran.
      span_s: from the first start to the last end.
      gaps: by time, longest first.
      gap_sizes: (largest size in us or None, seconds, count) of gaps above the size before.
    """

    groups: list[Group]
    sum_s: float
    busy_s: float
    span_s: float
    gaps: list[Gap]
    gap_sizes: list[tuple[float | None, float, float]]


def analyse(kernels: Sequence[Kernel], steps: int) -> Report:
    """Adds up the kernels of `steps` equal steps. `kernels` are in the order of their starts."""
    if not kernels:
        raise ValueError("no kernels")
    times: dict[str, list[float]] = collections.defaultdict(list)
    operations: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for kernel in kernels:
        times[kernel.kind].append(kernel.end_ns - kernel.start_ns)
        if kernel.operation and family(kernel.operation) != kernel.family:
            operations[kernel.kind][family(kernel.operation)] += 1
    groups = [
        Group(name, tuple(op for op, _ in operations[name].most_common(3)), sum(t) / 1e9 / steps, len(t) / steps)
        for name, t in times.items()
    ]
    idle: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    last, end_ns, busy_ns = kernels[0], kernels[0].start_ns, 0.0
    for kernel in kernels:
        if kernel.start_ns > end_ns:
            idle[last.family, kernel.family].append(kernel.start_ns - end_ns)
        busy_ns += max(0.0, kernel.end_ns - max(end_ns, kernel.start_ns))
        if kernel.end_ns >= end_ns:
            last, end_ns = kernel, kernel.end_ns
    gaps = [Gap(*pair, sum(t) / 1e9 / steps, len(t) / steps) for pair, t in idle.items()]
    return Report(
        sorted(groups, key=lambda group: -group.seconds),
        sum(group.seconds for group in groups),
        busy_ns / 1e9 / steps,
        (end_ns - kernels[0].start_ns) / 1e9 / steps,
        sorted(gaps, key=lambda gap: -gap.seconds),
        _gap_sizes([t for times in idle.values() for t in times], steps),
    )


def _gap_sizes(gaps_ns: Iterable[float], steps: int) -> list[tuple[float | None, float, float]]:
    limits = (*GAP_LIMITS_US, None)
    inside: dict[float | None, list[float]] = {limit: [] for limit in limits}
    for gap in gaps_ns:
        inside[next(limit for limit in limits if limit is None or gap <= limit * 1e3)].append(gap)
    return [(limit, sum(t) / 1e9 / steps, len(t) / steps) for limit, t in inside.items() if t]


def text(report: Report, most: int = 40, most_gaps: int = 12) -> str:
    """Tables for people, microseconds per step."""
    rows = [
        (
            f"{group.name[:72]}{' = ' + ', '.join(group.operations) if group.operations else ''}"[:110],
            f"{group.seconds * 1e6:.1f}",
            f"{group.count:g}",
            f"{group.seconds / group.count * 1e6:.2f}",
            f"{group.seconds / report.sum_s:.1%}",
        )
        for group in report.groups[:most]
    ]
    rest = report.groups[most:]
    if rest:
        seconds, count = sum(group.seconds for group in rest), sum(group.count for group in rest)
        shown = f"{seconds * 1e6:.1f}", f"{count:g}", f"{seconds / count * 1e6:.2f}", f"{seconds / report.sum_s:.1%}"
        rows.append((f"{len(rest)} more", *shown))
    count = sum(group.count for group in report.groups)
    rows.append(("sum", f"{report.sum_s * 1e6:.1f}", f"{count:g}", f"{report.sum_s / count * 1e6:.2f}", "100%"))
    idle = report.span_s - report.busy_s
    lines = [common.table(("kernel", "us/step", "per step", "us each", "share"), rows)]
    lines.append(
        f"device, us/step: span {report.span_s * 1e6:.1f}, busy {report.busy_s * 1e6:.1f}, idle {idle * 1e6:.1f}"
    )
    sizes = [
        (f"up to {limit:g} us" if limit else "longer", f"{seconds * 1e6:.1f}", f"{n:g}")
        for limit, seconds, n in report.gap_sizes
    ]
    if sizes:
        lines.append(common.table(("gaps", "us/step", "per step"), sizes))
        pairs = [
            (f"{gap.before[:50]} -> {gap.after[:50]}", f"{gap.seconds * 1e6:.1f}", f"{gap.count:g}")
            for gap in report.gaps[:most_gaps]
        ]
        lines.append(common.table(("where", "us/step", "per step"), pairs))
    return "\n".join(lines)


def facts(report: Report, most: int = 40) -> dict[str, Any]:
    """The report for a result file."""
    return {
        "kernels": [group._asdict() for group in report.groups[:most]],
        "num_kernels": sum(group.count for group in report.groups),
        "sum_s": report.sum_s,
        "busy_s": report.busy_s,
        "span_s": report.span_s,
        "idle_s": report.span_s - report.busy_s,
        "gap_sizes": [
            {"up_to_us": limit, "seconds": seconds, "count": count} for limit, seconds, count in report.gap_sizes
        ],
    }


def report_of(path: pathlib.Path, steps: int) -> tuple[Report | None, str]:
    """The report of a trace and its text, or None and what the trace holds instead."""
    found, planes = device_kernels(load(path))
    if not found:
        return None, f"the trace has no kernels of a GPU (its planes: {', '.join(planes)})"
    report = analyse(*without_first_step(found, steps))
    return report, text(report)


@contextlib.contextmanager
def profiled(folder: pathlib.Path) -> Iterator[None]:
    """A trace of the device, without the calls of Python functions."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(folder), profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def device_seconds(measure: Callable[[], Any], calls: int) -> float | None:
    """Seconds per call in which the GPU ran something, by a trace; None where there is no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with profiled(pathlib.Path(folder)):
            measure()
        found, _ = device_kernels(load(pathlib.Path(folder)))
    return analyse(found, 1).busy_s / (calls * max(3, 64 // calls)) if found else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=1, help="equal steps in the trace")
    arguments = parser.parse_args(argv)
    report, shown = report_of(arguments.trace, arguments.steps)
    print(shown)
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
