"""Shares on a grid as SVG: positions across, lines down, in one embedded picture, so that a file stays small."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Sequence

import numpy as np

SHADES = ("#ffffff", "#08306b")
"""None and all: lightness alone tells them apart, so any eye and any printer can."""
_LEVELS = 17
_LEFT, _TOP, _WIDTH, _BARS, _RIGHT = 52, 84, 820, 90, 16


def png(shares: np.ndarray) -> bytes:
    """An indexed picture of shares float [lines, columns] in [0, 1]: white is 0."""
    height, width = shares.shape
    ends = [np.asarray([int(shade[i : i + 2], 16) for i in (1, 3, 5)]) for shade in SHADES]
    palette = [np.round(ends[0] + (ends[1] - ends[0]) * i / (_LEVELS - 1)).astype(np.uint8) for i in range(_LEVELS)]
    pixels = np.round(np.clip(shares, 0, 1) * (_LEVELS - 1)).astype(np.uint8)
    scanlines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1).tobytes()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = [(b"IHDR", header), (b"PLTE", b"".join(map(bytes, palette))), (b"IDAT", zlib.compress(scanlines, 9))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in [*parts, (b"IEND", b"")])


def pooled(values: np.ndarray, width: int) -> np.ndarray:
    """Means of [lines, positions] over `width` neighbours, the last ones over what is left."""
    starts = np.arange(0, values.shape[1], width)
    counts = np.diff(np.append(starts, values.shape[1]))
    return np.add.reduceat(values, starts, axis=1) / counts


def svg(
    title: str,
    subtitle: str,
    values: np.ndarray,
    *,
    lines_per_row: int,
    borders: Sequence[tuple[int, int, str]],
    spans: Sequence[tuple[int, int, str]],
    bars: Sequence[float],
    x_label: str,
    y_label: str,
    bar_label: str,
    columns: int = 1024,
) -> str:
    """A picture of what each line has at each position.

    Args:
      title, subtitle: texts above.
      values: float [lines, positions], 0 or 1.
      lines_per_row: lines that belong to one row of the y axis.
      borders: (start, end, name) of the parts of the x axis.
      spans: (start, end, name) of positions to mark.
      bars: one number per row, drawn to the right.
      x_label, y_label, bar_label: texts.
      columns: at most so many columns of pixels; each shows the share of its positions.
    """
    lines, total = values.shape
    rows = lines // lines_per_row
    width = -(-total // columns)
    line_height = max(2.0, min(9.0, 270 / lines))
    height = line_height * lines
    bottom = _TOP + height

    def x(position: float) -> float:
        return _LEFT + position / total * _WIDTH

    def text(at_x: float, at_y: float, shown: str, anchor: str = "start", more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}"{more}>{html.escape(shown)}</text>'

    parts = [text(8, 18, title, more=' font-size="14" font-weight="bold"'), text(8, 34, subtitle)]
    picture = base64.b64encode(png(pooled(values, width))).decode()
    parts.append(
        f'<image x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{picture}"/>'
    )
    parts.append(f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{height:.1f}" fill="none" stroke="#404040"/>')
    for i, (start, end, name) in enumerate(borders):
        if i:
            parts.append(_line(x(start), _TOP - 14, x(start), bottom, "#d55e00", 'stroke-dasharray="4 2"'))
        if x(end) - x(start) > 6 * len(name):
            parts.append(text((x(start) + x(end)) / 2, _TOP - 5, name, "middle", ' fill="#a04000"'))
    for start, end, name in spans:
        at = _TOP - 20
        parts.append(_line(x(start), at, max(x(end), x(start) + 2), at, "#000000", 'stroke-width="3"'))
        late = x(start) > _LEFT + _WIDTH / 2
        parts.append(text(x(end) if late else x(start), at - 6, name, "end" if late else "start"))
    step = next(s for s in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 1 << 30) if total / s <= 9)
    for tick in range(0, total + 1, step):
        parts.append(_line(x(tick), bottom, x(tick), bottom + 4, "#404040"))
        parts.append(text(x(tick), bottom + 16, f"{tick}", "middle"))
    per_row = height / rows
    every = next(s for s in (1, 2, 5, 10, 20, 50, 1000) if per_row * s >= 14)
    parts += [text(_LEFT - 6, _TOP + (i + 0.5) * per_row + 4, f"{i}", "end") for i in range(0, rows, every)]
    left = _LEFT + _WIDTH + 8
    most = max(bars) or 1.0
    for row, bar in enumerate(bars):
        at, size = _TOP + row * per_row, bar / most * _BARS
        parts.append(
            f'<rect x="{left}" y="{at + 0.1 * per_row:.1f}" width="{size:.1f}" height="{0.8 * per_row:.1f}" '
            'fill="#7f7f7f"/>'
        )
    parts.append(text(left, _TOP - 5, f"{bar_label}, to {most:,.0f}"))
    parts.append(text(_LEFT + _WIDTH / 2, bottom + 34, x_label, "middle"))
    middle = _TOP + height / 2
    parts.append(text(14, middle, y_label, "middle", f' transform="rotate(-90 14 {middle:.1f})"'))
    parts += _legend(bottom + 26, width)
    whole = f'width="{left + _BARS + _RIGHT}" height="{bottom + 44:.0f}"'
    body = "\n".join(parts)
    font = 'font-family="sans-serif" font-size="11"'
    # The background is part of the picture: dark pages would swallow its texts.
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {whole} {font}>\n{ground}\n{body}\n</svg>\n'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'


def _legend(top: float, width: int) -> list[str]:
    left, parts = _LEFT + _WIDTH - 170, []
    parts.append(f'<defs><linearGradient id="s"><stop stop-color="{SHADES[0]}"/>')
    parts.append(f'<stop offset="1" stop-color="{SHADES[1]}"/></linearGradient></defs>')
    parts.append(f'<rect x="{left + 36}" y="{top:.1f}" width="70" height="9" fill="url(#s)" stroke="#404040"/>')
    few = "evicted" if width == 1 else f"of {width}: none"
    parts.append(f'<text x="{left + 32}" y="{top + 9:.1f}" text-anchor="end">{few}</text>')
    parts.append(f'<text x="{left + 110}" y="{top + 9:.1f}">{"kept" if width == 1 else "all kept"}</text>')
    return parts
