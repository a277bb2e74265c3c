"""How fast the engine is, as its own steps have shown: the base of chunk sizes and estimates.

A step that decodes alone shows what a decode step takes; what a step with prompt tokens took
beyond that is their share. The decode time changes with the requests that run, so `mixed`
lets a step decode alone now and then. It knows durations only, and no clock.
"""

from __future__ import annotations

_DECODE_WEIGHT = 0.3  # of the newest step in the smoothed times
_PREFILL_WEIGHT = 0.3


class Pace:
    """Smoothed times in seconds; None while nothing has been measured."""

    def __init__(self) -> None:
        self.decode_time: float | None = None  # a step of all that decode
        self.token_time: float | None = None  # a prompt token, added to a step

    def observe(self, num_decode: int, num_prefill: int, duration: float) -> None:
        """Takes in a step's decode rows, prompt tokens and seconds; 0 s is no measurement."""
        if duration <= 0:
            return
        if not num_prefill:
            self.decode_time = _smooth(self.decode_time, duration, _DECODE_WEIGHT)
        elif not num_decode or self.decode_time is not None:
            beside = self.decode_time if num_decode and self.decode_time is not None else 0.0
            # Never nothing: noise must not make prompt tokens look free for long.
            share = max(duration - beside, 0.1 * duration) / num_prefill
            self.token_time = _smooth(self.token_time, share, _PREFILL_WEIGHT)

    def tokens_in(self, seconds: float) -> int | None:
        """How many prompt tokens take so long; None if it is not known."""
        return None if self.token_time is None else int(seconds / self.token_time)


def _smooth(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
