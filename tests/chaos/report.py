"""The figures of a chaos run, in a form that people and documents can keep."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from services import __version__
from services.common.cores import available_cores
from tests.chaos.faults import Fault
from tests.chaos.load import Tally

# Seconds around a fault's begin in which a silence that is its doing may begin.
_BEFORE, _AFTER = 0.1, 0.5


@dataclass(slots=True)
class Report:
    """What one run showed."""

    seed: int
    seconds: float
    tally: Tally
    faults: list[Fault]
    moves: dict[str, int] = field(default_factory=dict)  # by kind of peer
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        tally = self.tally
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s, shoal {__version__},"
            f" Python {platform.python_version()}, grpcio {version('grpcio')},"
            f" {available_cores()} cores, {sys.platform}",
            f"streams answered in full: {tally.streams} ({tally.tokens} tokens); left by their"
            f" client: {tally.left}; ended by their own deadline: {tally.late}",
            f"tokens lost: {tally.lost}; doubled: {tally.doubled}; wrong answers:"
            f" {len(tally.problems)}",
            f"resumes: {self.moves.get('worker', 0)}; redecodes:"
            f" {self.moves.get('detokenizer', 0)}; re-encodes: {self.moves.get('tokenizer', 0)}",
            "refused by rule: "
            + (", ".join(f"{n} x {status}" for status, n in sorted(tally.refused.items())) or "0")
            + f"; connections not taken by a gateway going away: {tally.door_closed}",
            f"clients: {', '.join(f'{n} {kind}' for kind, n in sorted(tally.manners.items()))}",
            self._pause_line(),
            f"faults: {len(self.faults)}",
            *self._fault_lines(),
            *self.notes,
        ]
        return "\n".join(lines)

    def _pause_line(self) -> str:
        pauses = [end - start for start, end in self.tally.gaps]
        return (
            f"silences of over 0.1 s inside answers: {len(pauses)},"
            f" p50 {percentile(pauses, 50):.2f} s, p99 {percentile(pauses, 99):.2f} s"
        )

    def _fault_lines(self) -> list[str]:
        """A line a kind: how often, and the longest silence around each fault."""
        attribute_pauses(self.faults, self.tally.gaps)
        by_kind: dict[str, list[float]] = {}
        for fault in self.faults:
            by_kind.setdefault(fault.kind, []).append(fault.pause)
        by_kind["all"] = [fault.pause for fault in self.faults]
        return [
            f"  {kind:<18} {len(pauses):>4}   longest pause of a stream"
            f"  p50 {percentile(pauses, 50):5.2f} s  p99 {percentile(pauses, 99):5.2f} s"
            for kind, pauses in sorted(by_kind.items())
        ]


def attribute_pauses(faults: Sequence[Fault], gaps: Sequence[tuple[float, float]]) -> None:
    """Gives each fault the longest silence that began when it did.

    Faults are close together, so a silence may be that of a neighbour.
    """
    for fault in faults:
        fault.pause = max(
            (
                end - start
                for start, end in gaps
                if fault.begin - _BEFORE < start < fault.begin + _AFTER
            ),
            default=0.0,
        )


def percentile(values: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, len(ranked) * percent // 100)] if ranked else 0.0
