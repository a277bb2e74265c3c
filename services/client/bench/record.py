"""What is known of one request when it has ended. All times are in seconds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from services.client.answer import Answer


@dataclass(frozen=True, slots=True)
class Record:
    """One request, measured. Times of day are seconds from the run's start.

    `scheduled_at` is when it should have been sent. In a closed loop that is when it was.
    `woken_late` is how long after that the client got to it: the client's own fault, while a
    wait for a slot under --concurrency is not. `error` is empty if the answer came whole.
    """

    job: int
    turn: int
    scheduled_at: float
    woken_late: float
    sent_at: float
    ended_at: float
    ttft: float | None = None  # from sending to the first text
    last: float | None = None  # from sending to the last text
    gaps: tuple[float, ...] = ()  # between one piece of text and the next
    input_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    from_usage: bool = False  # whether the server counted the tokens
    finish_reason: str = ""
    error: str = ""
    detail: str = ""

    @property
    def e2el(self) -> float:
        """From sending to the end of the stream."""
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first."""
        if self.ttft is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.ttft) / (self.output_tokens - 1)

    @property
    def waited(self) -> float:
        """From when it should have been sent to when it was."""
        return self.sent_at - self.scheduled_at

    @property
    def scheduled_ttft(self) -> float | None:
        """From when it should have been sent to the first text."""
        return None if self.ttft is None else self.ttft + self.waited

    @property
    def scheduled_e2el(self) -> float:
        """From when it should have been sent to the end of the stream."""
        return self.ended_at - self.scheduled_at

    def keeps(self, slos: dict[str, float]) -> bool:
        """Whether it is whole and within the limits; its times run from the schedule's."""
        times = {"ttft": self.scheduled_ttft, "tpot": self.tpot or 0.0, "e2el": self.scheduled_e2el}
        return not self.error and all(
            (time := times[name]) is not None and time <= limit for name, limit in slos.items()
        )

    def as_json(self) -> dict[str, Any]:
        """The line of --output-jsonl; times in milliseconds, times of day in seconds."""
        milliseconds = {
            "ttft_ms": self.ttft,
            "tpot_ms": self.tpot,
            "e2el_ms": self.e2el,
            "scheduled_ttft_ms": self.scheduled_ttft,
            "scheduled_e2el_ms": self.scheduled_e2el,
            "woken_late_ms": self.woken_late,
        }
        return {
            "job": self.job,
            "turn": self.turn,
            "scheduled_at_s": round(self.scheduled_at, 6),
            "sent_at_s": round(self.sent_at, 6),
            "ended_at_s": round(self.ended_at, 6),
            **{name: _ms(value) for name, value in milliseconds.items()},
            "itl_ms": [_ms(gap) for gap in self.gaps],
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "tokens_from": "usage" if self.from_usage else "events",
            "finish_reason": self.finish_reason or None,
            "error": self.error or None,
            "error_detail": self.detail or None,
        }


@dataclass(frozen=True, slots=True)
class Schedule:
    """A turn's place in a run, and when it was due; on the clock of the answers."""

    job: int
    turn: int
    start: float  # of the run
    due_at: float
    woken_at: float

    def record(self, answer: Answer) -> Record:
        """The record of a whole answer."""
        usage, arrivals = answer.usage, answer.arrivals
        details = usage.prompt_tokens_details if usage else None
        pairs = itertools.pairwise(arrivals)
        return Record(
            **self._times(answer.sent_at, answer.ended_at),
            ttft=answer.first_at - answer.sent_at if arrivals else None,
            last=answer.last_at - answer.sent_at if arrivals else None,
            gaps=tuple(after - before for before, after in pairs),
            input_tokens=usage.prompt_tokens if usage else 0,
            cached_tokens=details.cached_tokens if details else None,
            output_tokens=answer.tokens,
            from_usage=usage is not None and usage.completion_tokens is not None,
            finish_reason=answer.finish_reason,
        )

    def failure(self, sent_at: float, ended_at: float, kind: str, detail: str) -> Record:
        """The record of a request that failed."""
        return Record(**self._times(sent_at, ended_at), error=kind, detail=detail)

    def _times(self, sent_at: float, ended_at: float) -> dict[str, Any]:
        return {
            "job": self.job,
            "turn": self.turn,
            "scheduled_at": self.due_at - self.start,
            "woken_late": self.woken_at - self.due_at,
            "sent_at": sent_at - self.start,
            "ended_at": ended_at - self.start,
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
