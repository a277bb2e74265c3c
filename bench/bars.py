"""What Shoal's wire is to be, beside its peers: ratios in one run of `bench.peers.wire`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.figures import OWN, Rounds, number, rows

GATEWAY_DECODES = "shoal, detokenizers 0"
MINI, SMG = "mini-sglang", "smg"


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio to a peer, which is to be at least, or else at most, a value.

    `with_gateway` is the value where the gateway decodes, if it is another one.
    """

    measure: str
    peer: str
    value: float
    at_least: bool
    with_gateway: float | None = None

    def of(self, system: str) -> float:
        """The value that one of Shoal's two forms is to keep."""
        other = self.with_gateway if system == GATEWAY_DECODES else None
        return self.value if other is None else other

    def is_met(self, system: str, ratio: float) -> bool:
        return ratio >= self.of(system) if self.at_least else ratio <= self.of(system)

    def __str__(self) -> str:
        other = "" if self.with_gateway is None else f" ({self.with_gateway:g})"
        kind = "at least" if self.at_least else "at most"
        return f"{self.measure}, to {self.peer}: {kind} {self.value:g}{other}"


BARS = (
    Bar("events/s, 64", MINI, 3.0, True, 4.0),
    Bar("events/s, 256", MINI, 3.0, True, 4.0),
    Bar("events/s, 64", SMG, 1.3, True, 1.8),
    Bar("events/s, 256", SMG, 1.3, True, 1.8),
    Bar("tokens/s, 1", MINI, 1.0, True),
    Bar("added p50 ms, 1", MINI, 0.9, False),
    Bar("added p50 ms, 64", MINI, 0.3, False),
    Bar("added p50 ms, 64", SMG, 0.65, False),
    Bar("added p50 ms, 256", SMG, 0.6, False),
    Bar("CPU us a token, 256", MINI, 0.25, False),
    Bar("CPU us a token, 256", SMG, 0.4, False),
    Bar("short requests/s", MINI, 3.0, True),
    Bar("short requests/s", SMG, 1.0, True),
)


def table(rounds: Rounds, bars: Sequence[Bar] = BARS) -> str:
    """Markdown: each bar with what was reached; empty without peers."""
    ours = [name for name in (OWN, GATEWAY_DECODES) if name in rounds.systems]
    known = [bar for bar in bars if bar.peer in rounds.systems and bar.measure in rounds.measures]
    if not ours or not known:
        return ""
    lines = [(str(bar), [_cell(bar, name, rounds) for name in ours]) for bar in known]
    return rows("ratio (where the gateway decodes)", ours, lines)


def _cell(bar: Bar, system: str, rounds: Rounds) -> str:
    ratio = rounds.ratio(system, bar.peer, bar.measure)
    if ratio is None:
        return "-"
    return f"{number(ratio)}, {'met' if bar.is_met(system, ratio) else '**not met**'}"
