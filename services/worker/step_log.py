"""The engine's steps that a watching agent has not been told of yet. Knows no clock."""

from __future__ import annotations

from collections.abc import Sequence

from protos import engine_pb2
from services.worker.scheduler.stats import StepTimes

_INTERVAL = 0.1  # seconds between two reports
_MAX_STEPS = 1024  # kept while the agent reads nothing; later ones are left out


class StepLog:
    """Keeps nothing until somebody watches."""

    def __init__(self) -> None:
        self._watched = False
        self._steps: list[tuple[float, StepTimes]] = []  # with the time when each ended
        self._last_report = float("-inf")

    def obey(self, commands: Sequence[engine_pb2.EngineCommand]) -> None:
        """Begins or ends watching, if some command says so."""
        for command in commands:
            if command.HasField("watch_steps"):
                self._watched = command.watch_steps
        if not self._watched:
            self._steps.clear()

    def add(self, steps: Sequence[StepTimes], now: float) -> None:
        """Steps, in order, the last of which has just ended."""
        if not self._watched or len(self._steps) >= _MAX_STEPS:
            return
        ended = now - sum(step.duration + step.bubble for step in steps[1:])
        for position, step in enumerate(steps):
            if position:
                ended += step.duration + step.bubble
            self._steps.append((ended, step))

    def due_in(self, now: float) -> float | None:
        """Seconds until the next report, 0 if it is due; None if there is nothing to tell."""
        return max(self._last_report + _INTERVAL - now, 0.0) if self._steps else None

    def report_to(self, event: engine_pb2.EngineEvent, now: float) -> None:
        """Puts what was kept into an event that is sent now."""
        for ended, step in self._steps:
            event.steps.add(
                number=step.number,
                began_us_ago=max(round((now - ended + step.duration) * 1e6), 0),
                duration_us=round(step.duration * 1e6),
                bubble_us=round(step.bubble * 1e6),
                num_prefill_tokens=step.num_prefill_tokens,
                num_decode_tokens=step.num_decode_tokens,
            )
        self._steps.clear()
        self._last_report = now
