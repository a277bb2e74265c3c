"""How fast a worker's engine is now, from the totals that it reports of itself."""

from __future__ import annotations

from dataclasses import dataclass

from protos import worker_pb2

_WINDOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Means over the last one to two seconds. `busy` and `bubble` are shares of the time."""

    tokens_in: float = 0.0
    tokens_out: float = 0.0
    busy: float = 0.0
    bubble: float = 0.0


class Speed:
    """Keeps a report at the beginning of this window and one of the window before.

    Every `now` is in the same clock's seconds. To take in a report costs a comparison.
    """

    def __init__(self) -> None:
        self._older = self._newer = (0.0, worker_pb2.Load())
        self._last = self._newer

    def observe(self, now: float, load: worker_pb2.Load) -> None:
        """A worker told its load."""
        self._last = (now, load)
        if now - self._newer[0] >= _WINDOW_SECONDS:
            self._older, self._newer = self._newer, self._last

    def rates(self, now: float) -> Rates:
        """What the last reports say; nothing where the worker has been idle since."""
        (began, first), (ended, last) = self._older, self._last
        seconds = ended - began
        idle = not (last.num_running or last.num_waiting) and now - ended > _WINDOW_SECONDS
        if not began or seconds <= 0 or idle:
            return Rates()
        micro = 1e6 * seconds
        return Rates(
            tokens_in=(last.num_prefill_tokens - first.num_prefill_tokens) / seconds,
            tokens_out=(last.num_output_tokens - first.num_output_tokens) / seconds,
            busy=min((last.busy_us - first.busy_us) / micro, 1.0),
            bubble=min((last.bubble_us - first.bubble_us) / micro, 1.0),
        )
