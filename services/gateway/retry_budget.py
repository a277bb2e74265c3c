"""How many requests may be sent a second time: a token bucket for the whole gateway.

Retries help when one worker refuses; when all do, they double the load that is the
cause. So they may be at most a share of the traffic. Resumes take nothing from it: a
request that a worker had accepted is a promise.
"""

from __future__ import annotations

SHARE = 0.2
FLOOR = 10.0  # retries that a quiet gateway can always make
_BURST = 100.0
_FLOOR_PER_SECOND = 1.0  # at which an empty bucket refills to the floor without traffic


class RetryBudget:
    """Each request adds `SHARE` of a retry, each retry takes one."""

    def __init__(self, now: float) -> None:
        self._balance = FLOOR
        self._refilled_at = now

    def deposit(self) -> None:
        """A new request came."""
        self._balance = min(self._balance + SHARE, _BURST)

    def withdraw(self, now: float) -> bool:
        """Takes one retry; False, and nothing taken, if there is none."""
        if self._balance < FLOOR:
            refill = (now - self._refilled_at) * _FLOOR_PER_SECOND
            self._balance = min(self._balance + refill, FLOOR)
        self._refilled_at = now
        if self._balance < 1:
            return False
        self._balance -= 1
        return True
