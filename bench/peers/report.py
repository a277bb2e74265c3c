"""Figures of several systems over rounds: medians, spreads, and ratios to the peers.

Shared by every comparison with peers; knows neither what is measured nor how.
"""

from __future__ import annotations

import statistics
from typing import Any


class Rounds:
    """Values by system and measure, one a round."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {}  # measure -> system -> rounds

    def add(self, system: str, measure: str, value: float) -> None:
        self._values.setdefault(measure, {}).setdefault(system, []).append(value)

    @property
    def systems(self) -> list[str]:
        """In the order in which they came."""
        return list(dict.fromkeys(name for row in self._values.values() for name in row))

    @property
    def measures(self) -> list[str]:
        return list(self._values)

    def median(self, system: str, measure: str) -> float | None:
        values = self._values[measure].get(system)
        return statistics.median(values) if values else None

    def spread(self, system: str, measure: str) -> tuple[float, float] | None:
        """The least and the most of all rounds."""
        values = self._values[measure].get(system)
        return (min(values), max(values)) if values else None

    def ratio(self, system: str, peer: str, measure: str) -> float | None:
        """The median of the rounds' own ratios, system to peer: what they share falls out."""
        row = self._values[measure]
        pairs = zip(row.get(system, ()), row.get(peer, ()), strict=False)
        ratios = [one / other for one, other in pairs if other]
        return statistics.median(ratios) if ratios else None

    def as_json(self) -> dict[str, Any]:
        return self._values


def table(rounds: Rounds) -> str:
    """Markdown: a row a measure with median (least to most), then Shoal's ratios to the others."""
    systems = rounds.systems
    ours = [name for name in systems if name.startswith("shoal")]
    peers = [name for name in systems if name not in ours]
    lines = [_row("measure, streams", systems), _rule(len(systems))]
    for measure in rounds.measures:
        lines.append(_row(measure, [_cell(rounds, name, measure) for name in systems]))
    pairs = [(one, peer) for one in ours for peer in peers]
    if pairs:
        lines += ["", _row("ratio", [f"{one} / {peer}" for one, peer in pairs])]
        lines.append(_rule(len(pairs)))
        for measure in rounds.measures:
            ratios = [rounds.ratio(one, peer, measure) for one, peer in pairs]
            if any(ratio is not None for ratio in ratios):
                lines.append(_row(measure, [_number(ratio) for ratio in ratios]))
    return "\n".join(lines)


def _row(head: str, cells: list[str]) -> str:
    return f"| {' | '.join([head, *cells])} |"


def _rule(columns: int) -> str:
    return "|---|" + "---|" * columns


def _cell(rounds: Rounds, system: str, measure: str) -> str:
    median, spread = rounds.median(system, measure), rounds.spread(system, measure)
    if median is None or spread is None:
        return "-"
    return f"{_number(median)} ({_number(spread[0])} to {_number(spread[1])})"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
