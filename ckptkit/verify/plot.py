"""A small line plot of characters: each cell of a braille character is two by four dots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # row, column


def braille_plot(
    curves: Sequence[Sequence[float]], *, styles: Sequence[str], width: int = 56, height: int = 6
) -> list[Text]:
    """Lines of text with a scale on the left; `width` and `height` in characters. Where curves share a cell the last
    one colours it. Values that are not finite leave a gap; without two finite values there is no plot."""
    finite = [value for curve in curves for value in curve if math.isfinite(value)]
    longest = max((len(curve) for curve in curves), default=0)
    if len(finite) < 2 or longest < 2:
        return []
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    cells = [[0] * width for _ in range(height)]
    colours = [[""] * width for _ in range(height)]
    for curve, style in zip(curves, styles, strict=False):
        for x in range(width * 2):
            value = _at(curve, x * (longest - 1) / (width * 2 - 1))
            if value is None:
                continue
            y = round((high - value) / span * (height * 4 - 1))
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
            colours[y // 4][x // 2] = style
    labels = [f"{high:>9.4g} ┤", *[" " * 9 + " │"] * (height - 2), f"{low:>9.4g} ┤"]
    lines = []
    for label, row, tint in zip(labels, cells, colours, strict=True):
        line = Text(label, style="dim")
        for cell, style in zip(row, tint, strict=True):
            line.append(chr(0x2800 + cell), style=style)
        lines.append(line)
    return lines


def _at(curve: Sequence[float], position: float) -> float | None:
    """The curve between two of its points; None beyond its end and next to values that are not finite."""
    left = math.floor(position)
    if left >= len(curve):
        return None
    right = min(left + 1, len(curve) - 1)
    value = curve[left] + (curve[right] - curve[left]) * (position - left)
    return value if math.isfinite(value) else None
