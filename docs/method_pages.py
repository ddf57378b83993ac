"""What docs/generate.py writes into docs/methods.md: a page per member of the registry, and what goes with what.

Texts come from the members' `NOTES`, numbers from benchmarks/results/quality.json, pictures from docs/images.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from typing import Any

from sparsejax import registry
from sparsejax.errors import MethodError

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
AXES = ("none", "retention", "selection", "prefill", "storage")
KINDS = {
    "none": "Baseline",
    "retention": "Retention: which rows stay",
    "selection": "Selection: which rows a decoded token reads",
    "prefill": "Prefill: what a prompt chunk reads",
    "storage": "Storage: how a row is kept",
}


def cell(text: object) -> str:
    """Text for one cell of a Markdown table."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def value(default: Any) -> str:
    """A default as one would type it."""
    if default is None or default == ():
        return "-"
    if isinstance(default, tuple):
        return f"`{','.join(map(str, default))}`"
    return f"`{default}`"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join(lines + [f"| {' | '.join(map(cell, row))} |" for row in rows])


def entries() -> list[registry.Entry]:
    """Methods by axis, then storages."""
    return sorted(registry.available().values(), key=lambda entry: AXES.index(entry.axis))


# Pages


def pages() -> str:
    """A section for each axis, with a page for each member."""
    parts = []
    for axis, members in itertools.groupby(entries(), key=lambda entry: entry.axis):
        parts.append(f"## {KINDS[axis]}")
        parts += [page(entry) for entry in members]
    return "\n\n".join(parts)


def page(entry: registry.Entry) -> str:
    """What a member does, its knobs, what was measured, and its picture."""
    names = f" Also known as {', '.join(f'`{alias}`' for alias in entry.aliases)}." if entry.aliases else ""
    source = f" Source: {entry.paper}." if entry.paper else ""
    parts = [f"### `{entry.name}`", f"{entry.summary[:1].upper()}{entry.summary[1:]}.{source}{names}"]
    parts += [f"**{heading}.** {' '.join(text.split())}" for heading, text in entry.notes.items()]
    fields = dataclasses.fields(entry.params_type)
    rows = []
    for field in fields:
        unit, text = field.metadata.get("unit", "") or "-", field.metadata.get("help", "")
        rows.append([f"`{field.name}`", value(field.default), unit, text])
    parts.append(table(["knob", "default", "unit", "meaning"], rows) if fields else "No knobs.")
    parts += measured(entry.name)
    picture = ROOT / "docs" / "images" / f"retention_{entry.name}.svg"
    if picture.is_file():
        parts.append(f"![Which rows of a conversation {entry.name} keeps](images/{picture.name})")
    return "\n\n".join(parts)


# Numbers


@functools.cache
def results() -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """(tokens, results, manifest) of the longest contexts that `benchmarks.quality` has been run with."""
    if not RESULTS.is_file():
        return None
    record = json.loads(RESULTS.read_text("utf-8"))
    length = max(record["result"]["lengths"], key=int)
    if any("acts" not in facts for facts in record["result"]["lengths"][length]["variants"].values()):
        return None  # of a time when evicted contexts had lost their statistics
    return length, record["result"]["lengths"][length], record["manifest"]


def measured(family: str) -> list[str]:
    """The family's rows of the last run, nothing if it took no part."""
    found = results()
    if found is None:
        return []
    length, result, manifest = found
    chosen = {
        label.removeprefix(family).strip(): facts
        for label, facts in result["variants"].items()
        if facts["family"] == family and not facts["control"] and "invalid" not in facts
    }
    ordered = sorted(chosen.items(), key=lambda item: item[1]["budget_tokens"] or 0)
    rows = [[setting or "-", *(show(facts) for _, show in COLUMNS)] for setting, facts in ordered]
    if not rows:
        return []
    contexts = sorted({facts.get("contexts", result["contexts"]) for facts in chosen.values()})
    counted = " and ".join(map(str, contexts)) + (" context" if contexts == [1] else " contexts")
    about = f"Measured on {manifest['model']} ({manifest['dtype']}), {counted} of {int(length):,} tokens"
    about += "; read [Quality](quality.md) before you compare:"
    return [about, table(["setting", *(title for title, _ in COLUMNS)], rows)]


def _interval(facts: dict[str, Any], key: str) -> str:
    if key not in facts:
        return "-"
    found, low, high = facts[key]
    bounds = "" if low is None or high is None else f" [{low:.2g}, {high:.2g}]"
    return f"{found:.2g}{bounds}"


def _loss(facts: dict[str, Any]) -> str:
    return f"{facts['loss'][0]:+.1%}"


def _decode(facts: dict[str, Any]) -> str:
    return f"{facts['decode_speed']['ratio']:.2f}x" if "decode_speed" in facts else "-"


def _prefill(facts: dict[str, Any]) -> str:
    return f"{facts['prefill_time']:.2f}x" if "prefill_time" in facts else "-"


COLUMNS = (
    ("bytes kept", lambda facts: f"{facts['resident_bytes'] / 1e6:.1f} MB, {facts['resident_share']:.0%}"),
    ("bytes read", lambda facts: f"{facts['read_share']:.0%}"),
    ("decode speed", _decode),
    ("prefill time", _prefill),
    ("perplexity loss", _loss),
    ("KL, nats", lambda facts: _interval(facts, "kl_nats")),
    ("needles", lambda facts: _interval(facts, "needles")),
    ("asked later", lambda facts: _interval(facts, "question_later")),
)
"""Title and text of each column."""


# What goes with what


def refusal(*names: str) -> str | None:
    """Why a composition of members with their defaults is refused, or None."""
    try:
        registry.resolve("+".join(names))
    except MethodError as error:
        return str(error)
    return None


def matrix() -> str:
    """Every pair of members of different axes, the triples that no pair explains, and all reasons."""
    members = [entry for entry in entries() if entry.axis != "none" and entry.name != registry.DEFAULT_STORAGE]
    axis_of = {entry.name: entry.axis for entry in members}
    retention = [name for name, axis in axis_of.items() if axis == "retention"]
    others = [name for name, axis in axis_of.items() if axis != "retention"]
    reasons: dict[str, int] = {}

    def verdict(*names: str) -> str:
        if len({axis_of[name] for name in names}) < len(names):
            return "-"
        why = refusal(*names)
        return "yes" if why is None else f"no ({reasons.setdefault(why, len(reasons) + 1)})"

    def grid(left: list[str], top: list[str]) -> str:
        rows = [[f"`{name}`", *(verdict(name, other) for other in top)] for name in left]
        return table(["", *(f"`{name}`" for name in top)], rows)

    left = [name for name in others if axis_of[name] != "storage"]
    top = [name for name in others if axis_of[name] != "selection"]
    parts = [grid(retention, others), grid(left, top)]
    triples = [
        names
        for names in itertools.combinations(left + retention, 3)
        if len({axis_of[name] for name in names}) == 3
        and all(refusal(*pair) is None for pair in itertools.combinations(names, 2))
    ]
    refused = [names for names in triples if refusal(*names) is not None]
    text = f"Three methods of different axes go together where each two of them do: {len(triples) - len(refused)} of"
    parts.append(f"{text} {len(triples)} such triples.")
    parts += [f"Refused nevertheless: `{'+'.join(names)}`, {verdict(*names)}." for names in refused]
    parts.append("\n".join(f"{number}. {why}" for why, number in reasons.items()))
    return "\n\n".join(parts)
