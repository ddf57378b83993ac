"""The short table of README.md that benchmarks.report writes: what methods save and what they cost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.report_sections import Record, table

START, END = "<!-- results: written by python -m benchmarks.report -->", "<!-- results end -->"
_BUDGET, _PEERS = 1024, {"llama": "llama.cpp"}
_BATCH = re.compile(r"(.+) B=(\d+) L=128K")


class MarkersError(ValueError):
    """README.md has not exactly one pair of markers."""


def _times(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def _what(manifest: Mapping[str, Any], model: str) -> str:
    """Model, hardware and date."""
    device = manifest.get("device", "cpu")
    hardware = f"{manifest['cpu']}, {manifest['cpu_count']} cores" if device == "cpu" else f"one {device}"
    return f"{model}, {hardware}, {manifest['date'][:10]}"


def speed(window: Record, capacity: Record) -> str:
    """Ratios to dense at 128K, of the same batch (`decode_window`) and of the largest ones (`capacity`)."""
    same: dict[str, str] = {}
    for name, case in window["result"]["cases"].items():
        found = _BATCH.fullmatch(name)
        if found and "over_dense" in case:
            same[found[1]] = f"{_times(case['over_dense'])} ({found[2]} requests)"
    rows = []
    for name, case in capacity["result"]["cases"].items():
        method, at, _ = name.partition(" L=128K")
        if at and "over_dense" in case:
            over = case["over_dense"]
            batch = f"{_times(over['batch'])} ({case['batch']})"
            rows.append([method, same.pop(method, "-"), batch, _times(over["tokens_per_s"])])
    rows += [[method, shown, "-", "-"] for method, shown in same.items()]
    header = ["128K of context, over dense", "tokens/s, same batch", "requests that fit", "tokens/s, largest batch"]
    manifest = window["manifest"]
    model = f"{manifest['model']} shape, random weights, {manifest['dtype']}"
    return f"Speed and memory ({_what(manifest, model)}):\n\n{table(header, rows)}"


def cost(quality: Record) -> str:
    """What members of one budget lose at the longest context, beside the control of that budget."""
    length = max(quality["result"]["lengths"], key=int)
    rows = []
    for name, facts in quality["result"]["lengths"][length]["variants"].items():
        everything = facts["budget_tokens"] is None
        if "invalid" in facts or not (facts["budget_tokens"] == _BUDGET or (everything and not facts["control"])):
            continue
        shown = f"{name} (control)" if facts["control"] else name
        shares = [f"{facts[key]:.0%}" for key in ("resident_share", "read_share")]
        retrieval = f"{facts['retrieval'][0]:.0%}" if "retrieval" in facts else "-"
        rows.append([shown, *shares, f"{facts['loss'][0]:+.1%}", f"{facts['top1_agreement'][0]:.0%}", retrieval])
    header = [f"{int(length):,} tokens of context", "bytes kept", "bytes read", "perplexity", "same next token"]
    header.append("facts found")
    what = _what(quality["manifest"], f"{quality['manifest']['model']}, {quality['manifest']['dtype']}")
    notes = quality["manifest"].get("notes")
    return f"Quality, {_BUDGET:,} tokens kept or read ({what}):\n\n{table(header, rows)}" + (
        f"\n\nNote: {notes}." if notes else ""
    )


def served(load: Record) -> str:
    """Output tokens per second of the first server over each other one."""
    found: dict[str, list[str]] = {}
    model = next(iter(load["manifest"]["servers"].values()))["model"]
    for requests, facts in load["result"]["loads"].items():
        first = next(iter(facts["servers"]))
        for name in facts["servers"]:
            pair = facts["ratios"].get(f"{name} / {first}")
            if pair is not None:
                ratio = _times(1 / pair["output_tokens_per_s"]["ratio"])
                found.setdefault(_PEERS.get(name, name), []).append(f"{ratio} at {requests}")
    what = _what(load["manifest"] | {"device": "cpu"}, model)
    said = [f"over {peer}: {', '.join(ratios)} requests at once" for peer, ratios in found.items()]
    return f"Served, output tokens/s ({what}) {'; '.join(said)}."


def summary(records: Mapping[str, Record]) -> str:
    """Markdown of what there are records for, by file stem."""
    parts = []
    if "decode_window_h200" in records and "capacity_h200" in records:
        parts.append(speed(records["decode_window_h200"], records["capacity_h200"]))
    if "quality" in records:
        parts.append(cost(records["quality"]))
    if "serve_load" in records:
        parts.append(served(records["serve_load"]))
    return "\n\n".join(parts) or "No results yet."


def filled(text: str, shown: str) -> str:
    """`text` with `shown` between the markers.

    Raises:
      MarkersError: there is not exactly one pair of them.
    """
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise MarkersError(f"README.md needs one {START} and one {END} behind it")
    head, _, rest = text.partition(START)
    return f"{head}{START}\n{shown}\n{END}{rest.partition(END)[2]}"
