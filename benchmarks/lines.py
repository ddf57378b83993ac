"""Lines with intervals as SVG, for quality against size: no dependency, and a file that diffs.

Series differ in colour, marker and dash, so that none of them is needed to tell them apart. Those after the eighth take
the colours again, with hollow markers and other dashes.
"""

from __future__ import annotations

import html
import math
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

# Okabe and Ito's palette, which people with any common colour blindness can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#7f7f7f")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "", "6 3", "2 3", "8 3 2 3")
MARKERS = ("circle", "square", "triangle", "diamond")
MOST_SERIES = 2 * len(COLOURS)
_LEFT, _TOP, _WIDTH, _HEIGHT, _LEGEND = 70, 40, 480, 300, 250


class Point(NamedTuple):
    """One measurement with its interval; a bound that is not finite is not drawn."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan


class Axis:
    """Maps values to pixels.

    Args:
      values: what must fit; those that are not finite are left out.
      start, end: pixels of the least and the largest value.
      log: logarithmic; all values must be above 0.
      zero: a linear axis starts at 0.

    Raises:
      ValueError: nothing to show, or a logarithm of what has none.
    """

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool = False, zero: bool = False):
        shown = [value for value in values if math.isfinite(value)]
        if not shown:
            raise ValueError("an axis needs a value")
        if log and min(shown) <= 0:
            raise ValueError(f"a logarithmic axis needs values above 0, got {min(shown)}")
        self.log, self.start, self.end = log, start, end
        low, high = min(shown), max(shown)
        if log:
            # A tenth more on both sides, and in any case enough for two ticks.
            self.low, self.high = min(low / 1.1, high / 2.6), high * 1.1
            wide = math.log10(self.high / self.low) > 3
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks = [10.0**power * k for power in decades for k in ((1,) if wide else (1, 2, 5))]
            self.ticks = [tick for tick in ticks if self.low <= tick <= self.high]
        else:
            low = min(0.0, low) if zero else low
            step = _nice((high - low or abs(high) or 1.0) / 5)
            first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
            self.ticks = [step * i for i in range(first, max(last, first + 1) + 1)]
            self.low, self.high = self.ticks[0], self.ticks[-1]

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        pick = math.log if self.log else float
        share = (pick(value) - pick(self.low)) / (pick(self.high) - pick(self.low))
        return self.start + share * (self.end - self.start)


def _nice(step: float) -> float:
    """The next larger of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= step * (1 - 1e-9))


def svg(
    title: str,
    series: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    levels: Mapping[str, float] | None = None,
    percent_x: bool = False,
    unjoined: Collection[str] = (),
) -> str:
    """A line with markers and intervals per series, over one pair of axes.

    Args:
      title, x_label, y_label: texts.
      series: points by name, drawn in the order of x.
      log_x, log_y: logarithmic axes.
      levels: named horizontal lines, such as chance.
      percent_x: x ticks as percentages.
      unjoined: series whose points no line joins.

    Raises:
      ValueError: no points, more series than can be told apart, or values that a logarithmic axis can't show.
    """
    if len(series) > MOST_SERIES:
        raise ValueError(f"{len(series)} series can't be told apart; {MOST_SERIES} can")
    levels = levels or {}
    points = [point for line in series.values() for point in line]
    bounds = [bound for point in points for bound in point[1:] if not (log_y and bound <= 0)]
    x = Axis([point.x for point in points], _LEFT, _LEFT + _WIDTH, log_x, zero=True)
    y = Axis([*bounds, *levels.values()], _TOP + _HEIGHT, _TOP, log_y, zero=True)
    parts = [f'<text x="8" y="18" font-size="14" font-weight="bold">{html.escape(title)}</text>']
    for tick in x.ticks:
        shown = f"{tick * 100:g}%" if percent_x else f"{tick:g}"
        parts.append(_line(x(tick), _TOP, x(tick), _TOP + _HEIGHT, "#e0e0e0"))
        parts.append(f'<text x="{x(tick):.1f}" y="{_TOP + _HEIGHT + 15}" text-anchor="middle">{shown}</text>')
    for tick in y.ticks:
        parts.append(_line(_LEFT, y(tick), _LEFT + _WIDTH, y(tick), "#e0e0e0"))
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle_x, middle_y = _LEFT + _WIDTH / 2, _TOP + _HEIGHT / 2
    parts.append(f'<text x="{middle_x}" y="{_TOP + _HEIGHT + 34}" text-anchor="middle">{html.escape(x_label)}</text>')
    turned = f'transform="rotate(-90 16 {middle_y})"'
    parts.append(f'<text x="16" y="{middle_y}" text-anchor="middle" {turned}>{html.escape(y_label)}</text>')
    for name, level in levels.items():
        parts.append(_line(_LEFT, y(level), _LEFT + _WIDTH, y(level), "#404040", "1 3"))
        parts.append(f'<text x="{_LEFT + _WIDTH + 4}" y="{y(level) + 4:.1f}">{html.escape(name)}</text>')
    for i, (name, line) in enumerate(series.items()):
        again, place = divmod(i, len(COLOURS))
        colour, dash, marker = COLOURS[place], DASHES[(place + again) % len(DASHES)], MARKERS[i % len(MARKERS)]
        ordered = sorted(line)
        path = " ".join(f"{x(point.x):.1f},{y(point.y):.1f}" for point in ordered)
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        joined = name not in unjoined
        if joined:
            parts.append(f'<polyline points="{path}" {style}/>')
        for point in ordered:
            if math.isfinite(point.low) and math.isfinite(point.high):
                parts.append(_line(x(point.x), y(point.low), x(point.x), y(point.high), colour))
            parts.append(_marker(marker, x(point.x), y(point.y), colour, bool(again)))
        at = _TOP + 10 + 18 * i
        left = _LEFT + _WIDTH + 60
        if joined:
            parts.append(_line(left, at, left + 28, at, colour, dash, 2))
        parts.append(_marker(marker, left + 14, at, colour, bool(again)))
        parts.append(f'<text x="{left + 34}" y="{at + 4}">{html.escape(name)}</text>')
    size = f'width="{_LEFT + _WIDTH + _LEGEND}" height="{_TOP + max(_HEIGHT, 18 * len(series)) + 48}"'
    body = "\n".join(parts)
    font = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{body}\n</svg>\n'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "", width: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}" stroke-dasharray="{dash}"/>'


def _marker(kind: str, x: float, y: float, colour: str, hollow: bool) -> str:
    style = f'fill="#ffffff" stroke="{colour}" stroke-width="1.5"' if hollow else f'fill="{colour}"'
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}/>'
    corners = {
        "square": ((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
        "triangle": ((0, -5), (4.5, 4), (-4.5, 4)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
    }[kind]
    path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{path}" {style}/>'


def write(path: pathlib.Path, text: str) -> None:
    """Writes what `svg` gave."""
    path.write_text(text, "utf-8")
    print(f"wrote {path}")
