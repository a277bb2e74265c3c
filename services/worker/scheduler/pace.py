"""How fast the engine is, as its own steps have shown: the base of chunk sizes and estimates.

A step that decodes alone shows what a decode step takes; what a step with prompt tokens took
beyond that is their share. A prompt token attends to all before it, so that it costs
a + b x position; and a chunk fetches all keys before it once, whatever its length, which costs as
much as what REREAD of its tokens do with them. A decode step costs a + b x rows, which tells what
it takes when a burst has made one row many. What the rows read changes, too, so `mixed` lets a
step decode alone now and then. It knows durations only, and no clock.
"""

from __future__ import annotations

import math

# With the embedded model on two cores a chunk of 1 to 48 tokens at position 1,500, 3,000 and 5,000
# adds 4, 7 and 13 ms apart from its tokens, and a token's attention takes 0.9, 1.8 and 3 ms there.
REREAD = 4.5
_DECODE_WEIGHT = 0.25  # of the newest step in the smoothed decode time
_DECODE_LIMIT = 1.5  # times that, which no step counts for more than: some are held up
_ALIKE = 1.5  # times as many rows and four, or as few, and the smoothed time tells nothing
_FIRST = 4  # steps of a kind, of which the quickest counts: an engine's first ones may be slow
_NOISE = 0.15  # of a step's time, by which steps with prompt tokens differ from what is expected
_DECODE_NOISE = 0.05  # and those that decode alone
_DRIFT = 0.02  # by which prompt tokens' cost may change from a step to the next
_DOUBLED = 4000.0  # a first guess of the position at which attention doubles a token's cost
_DOUBLED_ROWS = 64.0  # and of the rows that double a decode step's time
_OUTLIER = 2.0  # standard deviations; what is further off counts as this far


class Pace:
    """Times in seconds; None while nothing has been measured."""

    def __init__(self) -> None:
        self.decode_time: float | None = None  # a step of all that decoded last
        self._rows = 0  # how many those were
        self.unsure = False  # a single step told what is a guess otherwise; another should
        self._single = 0.0  # what that one took
        self._by_rows: _LinearCost | None = None
        self._cost: _LinearCost | None = None
        self._num_decode_steps = self._num_prompt_steps = 0

    @property
    def settled(self) -> bool:
        """More than the first, perhaps slow step had prompt tokens: enough to refuse by."""
        return self._num_prompt_steps > 1

    def decode_time_of(self, rows: int) -> float | None:
        """Seconds of a step that decodes so many rows; None if it is not known."""
        if self.decode_time is None or self._by_rows is None:
            return None
        return self.decode_time * self._by_rows.at(rows) / self._by_rows.at(self._rows)

    def observe(
        self, num_decode: int, num_prefill: int, duration: float, position: float = 0.0
    ) -> None:
        """Takes in a step; 0 s is no measurement.

        Args:
            num_decode: decode rows.
            num_prefill: prompt tokens.
            duration: seconds.
            position: the prompt tokens' mean position, with REREAD more of each chunk in the sum.
        """
        if duration <= 0:
            return
        if not num_prefill:
            self._observe_decode(num_decode, duration)
            return
        if num_decode and self.decode_time is None:
            return
        # Without rows, too, a step reads the weights, which is not what its tokens cost.
        beside = self.decode_time_of(num_decode) or 0.0
        # Never nothing: noise must not make prompt tokens look free for long.
        share = max(duration - beside, 0.1 * duration) / num_prefill
        # Beside as many decode rows a share is mostly noise, of which the least would be believed.
        first = self._num_prompt_steps < _FIRST and beside < 0.5 * duration
        self._num_prompt_steps += 1
        if self._cost is None or (first and share < self._cost.at(position)):
            self._cost = _LinearCost(position, share, _DOUBLED)
        self._cost.observe(position, share, _NOISE * duration / num_prefill)

    def _observe_decode(self, rows: int, duration: float) -> None:
        expected = self.decode_time_of(rows)
        first = self._num_decode_steps < _FIRST
        self._num_decode_steps += 1
        if expected is None or self._by_rows is None or (first and duration < expected):
            self.decode_time, self._rows = duration, rows
            self._by_rows = _LinearCost(rows, duration, _DOUBLED_ROWS)
            return
        if rows > _ALIKE * self._rows + 4 or self._rows > _ALIKE * rows + 4:
            newest = self.decode_time = duration
            self._single, self.unsure = duration, True
        elif self.unsure:
            newest = self.decode_time = min(duration, self._single)
            self.unsure = False
        else:
            newest = min(duration, _DECODE_LIMIT * expected)
            self.decode_time = expected + _DECODE_WEIGHT * (newest - expected)
        self._rows = rows
        self._by_rows.observe(rows, newest, _DECODE_NOISE * newest)

    def prompt_time(self, start: int, num_tokens: int) -> float | None:
        """Seconds that prompt tokens from a position on take, in chunks so large that what these
        fetch anew does not count; None if it is not known."""
        if self._cost is None:
            return None
        return num_tokens * self._cost.at(start + 0.5 * num_tokens)

    def tokens_in(self, seconds: float, start: int = 0) -> int | None:
        """How many prompt tokens from a position on, as one chunk, add so much to a step: 0 if
        fetching what is before them takes it all; None if it is not known."""
        if self._cost is None:
            return None
        # The root of n base + (n + REREAD) (start + n / 2) slope = seconds, in the form that allows
        # a slope of 0.
        slope = self._cost.slope
        first = self._cost.at(start + 0.5 * REREAD)
        left = max(seconds - REREAD * start * slope, 0.0)
        return int(2 * left / (first + math.sqrt(first * first + 2 * slope * left)))


class _LinearCost:
    """Seconds, base + slope x position, by a Kalman filter of these two: a prompt token's, or,
    with the rows as the position, a decode step's.

    Its variances follow the measurements' own noise, so that steps with few tokens, whose share
    is mostly noise, count little; and both may drift, by one factor, as the machine does.
    """

    def __init__(self, position: float, cost: float, doubled: float) -> None:
        """From a first cost; `doubled` is a guess of the position that doubles the base."""
        self.base = cost / (1 + position / doubled)
        self.slope = self.base / doubled
        self._var_base, self._var_slope, self._covariance = self.base**2, self.slope**2, 0.0

    def at(self, position: float) -> float:
        return self.base + self.slope * position

    def observe(self, position: float, cost: float, deviation: float) -> None:
        """Takes in a cost at a position, measured with such a standard deviation."""
        self._var_base += (_DRIFT * self.base) ** 2
        self._var_slope += (_DRIFT * self.slope) ** 2
        self._covariance += _DRIFT**2 * self.base * self.slope
        to_base = self._var_base + self._covariance * position
        to_slope = self._covariance + self._var_slope * position
        variance = to_base + to_slope * position + deviation**2
        limit = _OUTLIER * math.sqrt(variance)
        surprise = min(max(cost - self.at(position), -limit), limit)
        self.base = max(self.base + to_base / variance * surprise, 0.1 * self.base)
        self.slope = max(self.slope + to_slope / variance * surprise, 0.0)
        self._var_base -= to_base * to_base / variance
        self._var_slope -= to_slope * to_slope / variance
        self._covariance -= to_base * to_slope / variance
