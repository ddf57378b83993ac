"""Horizontal bars as SVG, for the plots of benchmarks: no dependency, and a file that diffs."""

from __future__ import annotations

import html
import pathlib
from collections.abc import Mapping, Sequence

COLOURS = ("#2b6cb0", "#a0aec0", "#dd6b20", "#38a169")
_LABEL, _WIDTH, _BAR, _SPACE = 260, 420, 14, 8


def svg(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], unit: str) -> str:
    """One group of bars per label, one bar of a group per series; all start at zero.

    Raises:
      ValueError: a series has not one value per label.
    """
    if any(len(values) != len(labels) for values in series.values()):
        raise ValueError("every series needs one value per label")
    top = max((value for values in series.values() for value in values), default=0.0) or 1.0
    group = _BAR * len(series) + _SPACE
    height = 60 + group * len(labels)
    parts = [f'<text x="8" y="18" font-size="14" font-weight="bold">{html.escape(title)}</text>']
    for i, name in enumerate(series):
        x = _LABEL + i * 150
        parts.append(f'<rect x="{x}" y="26" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="35">{html.escape(name)}</text>')
    for row, label in enumerate(labels):
        y = 46 + row * group
        middle = y + _BAR * len(series) / 2 + 4
        parts.append(f'<text x="{_LABEL - 8}" y="{middle:g}" text-anchor="end">{html.escape(label)}</text>')
        for i, values in enumerate(series.values()):
            width, bar = values[row] / top * _WIDTH, y + i * _BAR
            colour = COLOURS[i % len(COLOURS)]
            parts.append(f'<rect x="{_LABEL}" y="{bar}" width="{width:.1f}" height="{_BAR - 2}" fill="{colour}"/>')
            parts.append(f'<text x="{_LABEL + width + 4:.1f}" y="{bar + 10}">{values[row]:.4g} {unit}</text>')
    size = f'width="{_LABEL + _WIDTH + 90}" height="{height}"'
    body = "\n".join(parts)
    font = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{body}\n</svg>\n'


def check(path: pathlib.Path | None) -> None:
    """Refuses a path that can't be written before anything is measured."""
    if path is not None and (path.suffix != ".svg" or not path.parent.is_dir()):
        raise SystemExit(f"--plot {path}: give a .svg file in a folder that exists")


def write(path: pathlib.Path, title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], unit: str):
    """Writes `svg(...)` to a file."""
    path.write_text(svg(title, labels, series, unit), "utf-8")
    print(f"wrote {path}")
