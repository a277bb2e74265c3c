"""Line charts as SVG text: axes with round ticks, one line a series, a tooltip on each point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 16, 88
_DASHES = ("", "6 4", "2 3", "8 3 2 3")
_MAX_MARKERS = 40  # of a series; more would be a smear


@dataclass(frozen=True, slots=True)
class Series:
    """A line through points, in the order given."""

    name: str
    points: Sequence[tuple[float, float]]


def chart(
    title: str, x_title: str, y_title: str, series: Sequence[Series], *, x_step: float = 0.0
) -> str:
    """One chart; both axes begin at 0, and the ticks of x are at least `x_step` apart."""
    points = [point for one in series for point in one.points]
    x_ticks = ticks(max((x for x, _ in points), default=1.0), least=x_step)
    y_ticks = ticks(max((y for _, y in points), default=1.0))
    scale = _Scale(x_ticks[-1], y_ticks[-1])
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        *_axes(scale, x_ticks, y_ticks, x_title, y_title),
        *(part for index, one in enumerate(series) for part in _line(scale, index, one)),
        *(_legend(index, one.name) for index, one in enumerate(series)),
        "</svg>",
    ]
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}</figure>"


def ticks(top: float, count: int = 5, least: float = 0.0) -> list[float]:
    """Round numbers from 0 to the first at or above `top`, about `count` steps apart.

    The steps are not below `least`, which is round itself.
    """
    if not top > 0:
        return [0.0, 1.0]
    rough = top / count
    power = 10.0 ** math.floor(math.log10(rough))
    steps_of = [power * factor for factor in (1, 2, 2.5, 5, 10)]
    if least:  # a tick of a count is a count
        steps_of = [step for step in steps_of if not step % least] or [least]
    step = next((step for step in steps_of if step >= rough * 0.999), least)
    steps = math.ceil(top / step - 1e-9)
    return [round(index * step, 12) for index in range(steps + 1)]


@dataclass(frozen=True, slots=True)
class _Scale:
    x_top: float
    y_top: float

    def x(self, value: float) -> float:
        return round(_LEFT + value / self.x_top * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - value / self.y_top * (_HEIGHT - _TOP - _BOTTOM), 1)


def _axes(
    scale: _Scale,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_title: str,
    y_title: str,
) -> list[str]:
    base, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts: list[str] = []
    for value in y_ticks:
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 5}" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        x = scale.x(value)
        parts.append(f'<line class="grid" x1="{x}" y1="{_TOP}" x2="{x}" y2="{base}"/>')
        parts.append(f'<text x="{x}" y="{base + 20}" text-anchor="middle">{value:g}</text>')
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + base) / 2
    parts.append(
        f'<text x="{middle_x}" y="{base + 42}" text-anchor="middle">{escape(x_title)}</text>'
    )
    parts.append(
        f'<text transform="translate(18 {middle_y}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_title)}</text>"
    )
    return parts


def _line(scale: _Scale, index: int, series: Series) -> list[str]:
    if not series.points:
        return []
    places = [(scale.x(x), scale.y(y)) for x, y in series.points]
    path = " ".join(f"{x},{y}" for x, y in places)
    parts = [
        f'<polyline class="s{index % 4}" stroke-dasharray="{_DASHES[index % 4]}" points="{path}"/>'
    ]
    if len(places) <= _MAX_MARKERS:
        for (x, y), (x_value, y_value) in zip(places, series.points, strict=True):
            text = f"{series.name}: {y_value:.4g} at {x_value:.4g}"
            parts.append(
                f'<circle class="s{index % 4}" cx="{x}" cy="{y}" r="3">'
                f"<title>{escape(text)}</title></circle>"
            )
    return parts


def _legend(index: int, name: str) -> str:
    x, y = _LEFT + index % 4 * 116, _HEIGHT - 14
    return (
        f'<line class="key s{index % 4}" stroke-dasharray="{_DASHES[index % 4]}"'
        f' x1="{x}" y1="{y - 5}" x2="{x + 24}" y2="{y - 5}"/>'
        f'<text x="{x + 30}" y="{y}">{escape(name)}</text>'
    )
