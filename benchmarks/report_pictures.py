"""Pictures of result files for benchmarks.report: pure functions from a record to SVG, one idea each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks import bars, lines, turn_rows
from benchmarks.report_sections import Record, frontier

LONGEST = " L=128K"


class Picture(NamedTuple):
    """`suffix` ends the file's name, `title` is for readers who can't see it, `draw` gives the SVG."""

    suffix: str
    title: str
    draw: Callable[[Record], str]


def _context(case: str) -> float:
    """Thousands of tokens (1,024) of a case such as "quest 2K B=16 L=8K"."""
    found = re.search(r" L=(\d+)(K?)$", case)
    if found is None:
        raise KeyError(f"context in the name of the case {case!r}")
    return int(found[1]) / (1 if found[2] else 1024)


def _lines(title: str, points: Iterable[tuple[str, lines.Point]], x_label: str, y_label: str, **more: Any) -> str:
    """A line per name; the first ones if there are more than can be told apart, which the title then says."""
    series: dict[str, list[lines.Point]] = {}
    for name, point in points:
        series.setdefault(name, []).append(point)
    shown = dict(list(series.items())[: len(lines.COLOURS)])
    if len(shown) < len(series):
        title += f" ({len(shown)} of {len(series)} methods)"
    return lines.svg(title, shown, x_label, y_label, **more)


def _step(record: Record) -> str:
    cases = record["result"]["cases"]
    rates = dict.fromkeys(rate for case in cases.values() for rate in case["step_over_floor"])
    series = {f"{rate} rate": [case["step_over_floor"][rate] for case in cases.values()] for rate in rates}
    return bars.svg("Decode step, time over its floor", list(cases), series, "x")


def _longest(record: Record) -> dict[str, Record]:
    """Cases at 128K that have a step, by method."""
    cases = record["result"]["cases"].items()
    return {name.removesuffix(LONGEST): case for name, case in cases if name.endswith(LONGEST) and "step_s" in case}


def _capacity(record: Record) -> str:
    cases = _longest(record)
    labels = [f"{name}, {case['batch']} requests" for name, case in cases.items()]
    rates = [case["tokens_per_s"] for case in cases.values()]
    return bars.svg("Decoding with the largest batch at 128K", labels, {"tokens per second": rates}, "/s")


def _memory(record: Record) -> str:
    cases = _longest(record)
    series = {"requests that fit": [case["batch"] for case in cases.values()]}
    return bars.svg("Requests of 128K tokens in the same memory", list(cases), series, "requests")


def _capacity_by_context(record: Record) -> str:
    cases = [(name, case) for name, case in record["result"]["cases"].items() if "step_s" in case]
    points = [(name.partition(" L=")[0], lines.Point(_context(name), case["tokens_per_s"])) for name, case in cases]
    labels = "context, K tokens", "tokens per second"
    return _lines("Largest batch, tokens per second by context", points, *labels, log_x=True, log_y=True)


def _window_by_context(record: Record) -> str:
    cases = [(name, case) for name, case in record["result"]["cases"].items() if "over_dense" in case]
    points = [(name.partition(" B=")[0], lines.Point(_context(name), case["over_dense"])) for name, case in cases]
    labels = "context, K tokens", "tokens per second over dense"
    return _lines("Full batch, speed over dense by context", points, *labels, log_x=True, levels={"dense": 1.0})


def _window_share(record: Record) -> str:
    cases = {name: case for name, case in record["result"]["cases"].items() if case["valid"]}
    rates = dict.fromkeys(rate for case in cases.values() for rate in case["share_of_floor"])
    series = {f"{rate} rate": [case["share_of_floor"][rate] * 100 for case in cases.values()] for rate in rates}
    return bars.svg("Full batch, share of the memory's speed", list(cases), series, "%")


def _perplexity(record: Record) -> str:
    series: dict[str, list[lines.Point]] = {}
    for spec, found in record["result"]["methods"].items():
        point = lines.Point(found["read_share"], found["loss"] * 100)
        series.setdefault(re.sub(r"\([^)]*\)", "", spec), []).append(point)
    labels = "bytes read per step, of dense", "perplexity over dense, %"
    return lines.svg("What prose loses by method and budget", series, *labels, percent_x=True)


def _pareto(share: str, verb: str) -> Callable[[Record], str]:
    """KL against a share of dense's bytes at the longest context; a line joins what nothing else beats at both."""

    def draw(record: Record) -> str:
        length = max(record["result"]["lengths"], key=int)
        variants: Mapping[str, Record] = record["result"]["lengths"][length]["variants"]
        best = frontier(variants, share)
        compared = [n for n, facts in variants.items() if not facts["control"] and "invalid" not in facts]
        series = {"best for its bytes": best, "others": [n for n in compared if n not in best]}
        points = {
            name: [lines.Point(variants[n][share], variants[n]["kl_nats"][0]) for n in names]
            for name, names in series.items()
        }
        drawn = {name: [point for point in found if point.y > 0] for name, found in points.items()}
        labels = f"bytes {verb}, of dense", "KL from dense, nats per token (less is better)"
        log = {"log_x": True, "log_y": True}
        title = f"Quality against bytes {verb}, {int(length):,} tokens"
        return lines.svg(title, drawn, *labels, percent_x=True, unjoined=("others",), **log)

    return draw


PICTURES: dict[str, tuple[Picture, ...]] = {
    "decode_window": (
        Picture("_context", "Speed of a full batch over dense, by context", _window_by_context),
        Picture("_floor", "Share of the memory's speed of a full batch, by case", _window_share),
    ),
    "decode_step": (Picture("", "Decode steps", _step),),
    "capacity": (
        Picture("", "Tokens per second of the largest batches at 128K", _capacity),
        Picture("_memory", "Requests of 128K tokens that fit, by method", _memory),
        Picture("_context", "Tokens per second of the largest batches, by context", _capacity_by_context),
    ),
    "quality": (
        Picture("_kept", "Divergence from dense against bytes kept", _pareto("resident_share", "kept")),
        Picture("_read", "Divergence from dense against bytes read per step", _pareto("read_share", "read per step")),
    ),
    "perplexity": (Picture("", "Perplexity", _perplexity),),
    "chain_turns": (Picture("", "Time to the first token by turn", lambda record: turn_rows.plot(record["result"])),),
}
