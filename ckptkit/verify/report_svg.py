"""Line charts as inline SVG: loss curves on a linear scale, differences on a log scale with the bound drawn in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 600, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. `css` is its class ("reference", "equal", "c0"...); `key` joins it with its legend entry and row."""

    key: str
    label: str
    values: tuple[float | None, ...]
    css: str


def loss_chart(series: Sequence[Series], title: str) -> str:
    """Losses by step. Values that are not finite are gaps."""
    finite = [v for s in series for v in s.values if v is not None and math.isfinite(v)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    margin = (high - low) * 0.06 or abs(high) * 0.06 or 1.0
    ticks = nice_ticks(low - margin, high + margin)
    scale = _Scale(min(low - margin, ticks[0]), max(high + margin, ticks[-1]), _steps(series))
    marks = [(scale.y(t), f"{t:g}") for t in ticks]
    body = "".join(
        _line(s, scale, [v if v is not None and math.isfinite(v) else None for v in s.values]) for s in series
    )
    return _frame(title, marks, scale, body)


def difference_chart(series: Sequence[Series], bound: Sequence[float], title: str) -> str:
    """Relative differences by step, log scale, with `bound` (relative, per step) as the dashed line. Differences of
    exactly zero, and below the scale, lie on its floor, which is labelled 0; not finite ones lie on its ceiling."""
    if not any(s.values for s in series):
        return ""
    seen = [v for s in series for v in s.values if v is not None and math.isfinite(v) and v > 0]
    exponents = [math.floor(math.log10(v)) for v in [*seen, *(b for b in bound if b > 0)]]
    bottom, top = min([*exponents, -8]) - 1, max([*exponents, -3]) + 1
    scale = _Scale(bottom, top, _steps(series))

    def place(value: float | None) -> float | None:
        if value is None:
            return None
        if not math.isfinite(value):
            return float(top)
        return max(math.log10(value), bottom) if value > 0 else float(bottom)

    every = 1 if top - bottom <= 7 else 2
    marks = [(scale.y(e), "0" if e == bottom else f"1e{e}") for e in range(bottom, top + 1) if (top - e) % every == 0]
    if not any(text == "0" for _, text in marks):
        marks.append((scale.y(bottom), "0"))
    limit = Series("bound", "bound", tuple(bound), "bound")
    body = _line(limit, scale, [place(v) for v in bound])
    body += "".join(_line(s, scale, [place(v) for v in s.values]) for s in series)
    return _frame(title, marks, scale, body)


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers between low and high."""
    raw = (high - low) / max(count, 1)
    if raw <= 0 or not math.isfinite(raw):
        return [low]
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)] or [low]


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    steps: int

    def x(self, step: float) -> float:
        return LEFT + step / max(self.steps - 1, 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _steps(series: Sequence[Series]) -> int:
    return max((len(s.values) for s in series), default=1)


def _line(series: Series, scale: _Scale, values: Sequence[float | None]) -> str:
    """A path with a gap at each None, dots where a curve is short, and the title a browser shows on hover."""
    path, pen = [], "M"
    for step, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        path.append(f"{pen}{scale.x(step):.1f} {scale.y(value):.1f}")
        pen = "L"
    if not path:
        return ""
    dots = ""
    if len(path) <= 40 and series.css != "bound":
        dots = "".join(
            f'<circle cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}" r="2.2"/>'
            for step, value in enumerate(values) if value is not None
        )  # fmt: skip
    return (
        f'<g class="curve {series.css}" data-key="{escape(series.key)}"><title>{escape(series.label)}</title>'
        f'<path d="{"".join(path)}"/>{dots}</g>'
    )


def _frame(title: str, marks: Sequence[tuple[float, str]], scale: _Scale, body: str) -> str:
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'data-left="{LEFT}" data-right="{WIDTH - RIGHT}" data-steps="{scale.steps}">'
    ]
    for y, text in marks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>')
    every = max(1, math.ceil(scale.steps / 10))
    for step in range(0, scale.steps, every):
        parts.append(f'<text class="tick" x="{scale.x(step):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{step}</text>')
    parts.append(f'<text class="unit" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">optimizer step</text>')
    parts.append(f'{body}<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>')
    return "".join(parts)
