"""When a worker gets no more requests although its session stands: a circuit breaker.

    closed --3 failures in a row--> open --pause--> half-open --a probe succeeds--> closed
                                     ^                  |
                                     +--the probe fails-+   the pause doubles, 1 s to 30 s

A failure is a request that was refused as unavailable or by a fault of the worker, or a
session lost before a request's first token; being overloaded is none. Pure: it is told
of requests and of the time.
"""

from __future__ import annotations

from typing import Literal

THRESHOLD = 3
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0
PROBE_SECONDS = 10.0  # after which an unanswered probe does not keep the next one back

State = Literal["closed", "open", "half-open"]


class Breaker:
    """The state of one worker. Every `now` is in the same clock's seconds."""

    def __init__(self) -> None:
        self.closed = True
        self.num_openings = 0
        self.next_chance = 0.0  # when an open one may be probed
        self._num_failures = 0  # in a row
        self._pause = FIRST_PAUSE_SECONDS
        self._probing = False

    def state(self, now: float) -> State:
        """Half-open from the end of the pause to the answer to a probe."""
        if self.closed:
            return "closed"
        return "half-open" if self._probing or now >= self.next_chance else "open"

    def allows(self, now: float) -> bool:
        """Whether a request may go there."""
        return self.closed or now >= self.next_chance

    def sending(self, now: float) -> None:
        """A request goes there; unless the breaker is closed it is the probe."""
        if not self.closed:
            self._probing = True
            self.next_chance = now + PROBE_SECONDS

    def reconnect(self, now: float) -> None:
        """The worker has greeted anew, perhaps as another process: it may be probed at once."""
        if not self.closed:
            self.next_chance = min(self.next_chance, now)

    def succeed(self) -> None:
        """A request's first token came."""
        self.closed, self._probing = True, False
        self._num_failures = 0
        self._pause = FIRST_PAUSE_SECONDS

    def fail(self, now: float) -> None:
        """A request failed; what fails while it is open had been sent before."""
        self._num_failures += 1
        if self._probing or (self.closed and self._num_failures >= THRESHOLD):
            self.closed, self._probing = False, False
            self.num_openings += 1
            self.next_chance = now + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
