"""What Shoal is to be beside its peers: ratios in one run.

`BARS` are of `bench.peers.wire`, `ENGINE_BARS` of `bench.engine_peers`, and `LIMIT_BARS` of
`bench.roofline`: how near the engine is to come to what the machine allows.
"""

from __future__ import annotations

import statistics
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


BEST = "the best peer"


@dataclass(frozen=True, slots=True)
class EngineBar:
    """A ratio of tokens a second, which is to be at least a value."""

    ours: str
    load: str
    peer: str  # or BEST, of each round
    value: float
    stretch: bool = False  # hoped for, not asked


ENGINE_BARS = (
    EngineBar("shoal none", "8 streams", "ctranslate2 float32", 1.1),
    EngineBar("shoal none", "32 streams", "ctranslate2 float32", 1.1),
    EngineBar("shoal none", "8 streams", "transformers", 1.5),
    EngineBar("shoal none", "32 streams", "transformers", 1.5),
    EngineBar("shoal int8", "8 streams", BEST, 1.2),
    EngineBar("shoal int8", "32 streams", BEST, 1.2),
    EngineBar("shoal int8", "single", "openvino genai", 1.0),
    EngineBar("shoal int8", "single", "llama.cpp", 1.0, stretch=True),
    EngineBar("shoal int8", "prefill of 512", "ctranslate2 int8", 1.0),
    EngineBar("shoal none, fleet", "32 streams", "shoal none", 0.92),
    EngineBar("shoal int8, fleet", "32 streams", "shoal int8", 0.92),
)


def engine_table(rounds: Rounds) -> str:
    """Markdown: each bar of the engine with what was reached, or that it was not measured."""
    lines = []
    for bar in ENGINE_BARS:
        ratio = _engine_ratio(rounds, bar)
        found = "not measured"
        if ratio is not None:
            found = f"{number(ratio)}, {'met' if ratio >= bar.value else '**not met**'}"
        aim = f"{bar.ours}: {bar.load}, at least {bar.value:g} of {bar.peer}"
        aim += " (a stretch)" if bar.stretch else ""
        lines.append((aim, [found]))
    return rows("aim", ["ratio"], lines)


def _engine_ratio(rounds: Rounds, bar: EngineBar) -> float | None:
    """The median of the rounds' own ratios; None without one of the two."""
    row = rounds.as_json().get(bar.load, {})
    peers = [name for name in row if not name.startswith(OWN)]
    if bar.peer != BEST:
        peers = [bar.peer] if bar.peer in row else []
    if not peers or bar.ours not in row:
        return None
    bests: list[float] = [max(found) for found in zip(*(row[name] for name in peers), strict=True)]
    return statistics.median(ours / best for ours, best in zip(row[bar.ours], bests, strict=True))


LIMIT_BARS = {"decode": 0.85, "prefill": 0.85, "attention": 0.5}


def shares(rounds: Rounds) -> dict[str, float]:
    """The share of its best limit that the engine reaches, by measure; values are times."""
    found = {}
    for name in rounds.measures:
        limits = {
            system: milliseconds
            for system in rounds.systems
            if system != OWN and (milliseconds := rounds.median(system, name)) is not None
        }
        best = min(limits, key=limits.__getitem__)
        share = rounds.ratio(best, OWN, name)
        assert share is not None
        found[name] = share
    return found


def limit_table(rounds: Rounds) -> str:
    """Markdown: each share of the best limit with its bar."""
    lines = []
    for name, share in shares(rounds).items():
        least = LIMIT_BARS[name]
        found = f"{number(share)}, {'met' if share >= least else '**not met**'}"
        lines.append((f"{name}, at least {least:g} of the limit", [found]))
    return rows("aim", ["share"], lines)
