"""Fills the generated blocks of README.md and docs/*.md from the code, so that they can't go stale.

A block stands between `<!-- generated: NAME -->` and `<!-- end -->`. Run from anywhere: `python docs/generate.py`, or
with `--check` to only say which files would change.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs import method_pages  # noqa: E402  (the path comes first)
from docs.method_pages import cell, value  # noqa: E402
from sparsejax import config, registry  # noqa: E402
from sparsejax.metrics import EngineMetrics  # noqa: E402

BLOCK = re.compile(r"(<!-- generated: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def methods() -> str:
    """One line per method and storage."""
    rows = ["| name | kind | what it does | source |", "|---|---|---|---|"]
    for entry in registry.available().values():
        kind = "storage" if entry.kind == "storage" else entry.axis if entry.axis != "none" else "baseline"
        rows.append(f"| `{entry.name}` | {kind} | {cell(entry.summary)} | {cell(entry.paper) or '-'} |")
    return "\n".join(rows)


def options() -> str:
    """Every setting by group."""
    groups: dict[str, list[str]] = {}
    for config_type in (config.EngineConfig, config.ServerConfig):
        for field in dataclasses.fields(config_type):
            meta = field.metadata
            spellings = [field.name.replace("_", "-"), *meta["aliases"]]
            flags = ", ".join(f"`--{name}`" for name in spellings)
            help_text = meta["help"] + (f" ({', '.join(meta['choices'])})" if meta["choices"] else "")
            unit = f" {meta['unit']}" if meta["unit"] and field.default is not None else ""
            row = f"| {flags} | {value(field.default)}{unit} | {cell(help_text)} |"
            groups.setdefault(meta["group"], []).append(row)
    parts = []
    for group, rows in groups.items():
        parts.append(
            "\n".join([f"### {group.capitalize()}", "", "| flag | default | meaning |", "|---|---|---|", *rows])
        )
    return "\n\n".join(parts)


def metrics() -> str:
    """Every metric of the engine, as exposed."""
    rows = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in EngineMetrics().all():
        suffix = "_total" if metric.kind == "counter" and not metric.name.endswith("_total") else ""
        label = f"`{metric.label}`" if metric.label else "-"
        rows.append(f"| `sparsejax:{metric.name}{suffix}` | {metric.kind} | {label} | {cell(metric.help)} |")
    return "\n".join(rows)


def summary(path: pathlib.Path) -> str:
    """First sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0].rstrip(".")


def layout() -> str:
    """One line per module of the four code folders."""
    parts = []
    for folder in ("sparsejax", "models", "serving", "pallas_kernels"):
        rows = [f"| `{folder}/` | |", "|---|---|"]
        for path in sorted((ROOT / folder).rglob("*.py"), key=lambda path: (len(path.parts), path.parts)):
            text = summary(path)
            if path.name != "__init__.py" or (text and path.parent != ROOT / folder):
                rows.append(f"| `{path.relative_to(ROOT / folder).as_posix()}` | {cell(text)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


GENERATORS = {
    "methods": methods,
    "pages": method_pages.pages,
    "compositions": method_pages.matrix,
    "options": options,
    "metrics": metrics,
    "layout": layout,
}


def fill(text: str) -> str:
    """The text with every block regenerated."""
    return BLOCK.sub(lambda match: f"{match[1]}{GENERATORS[match[2]]()}\n{match[3]}", text)


def main() -> int:
    """Rewrites what changed; with --check only lists it and returns 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text("utf-8")
        new = fill(text)
        if new != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(new, "utf-8")
    if stale:
        print(f"{'out of date' if check else 'updated'}: {', '.join(stale)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
