"""What a gateway's requests have met in the last minutes, second by second.

One small record a second, in a ring: adding to it is a few operations on plain numbers, and
percentiles are worked out when somebody asks. Times are the caller's clock, in seconds.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from services.gateway.watch.shapes import FleetHistory, Minute, Percentiles

KEPT_SECONDS = 180
_MINUTE = 60
_RATE_SECONDS = 2  # whole ones that a rate is the mean of
# Durations are counted in buckets, each 10 % wider than the one before, from 0.1 ms to 160 s.
_GROWTH = 1.1
_BOUNDS = tuple(1e-4 * _GROWTH**i for i in range(150))


class _Second:
    """What happened in one second of the clock."""

    __slots__ = (
        "_figures", "at", "cancelled", "ended", "errors", "itl", "resumes", "tokens_in",
        "tokens_out", "ttft",
    )  # fmt: skip

    def __init__(self, at: int) -> None:
        self.at = at
        self.ttft = [0] * (len(_BOUNDS) + 1)  # how often, by bucket
        self.itl = [0] * (len(_BOUNDS) + 1)
        self.tokens_in = self.tokens_out = 0
        self.ended = self.errors = self.cancelled = self.resumes = 0
        self._figures: tuple[Percentiles, Percentiles] | None = None

    def figures(self) -> tuple[Percentiles, Percentiles]:
        """Of TTFT and of the time between texts; asked for once the second is over."""
        if self._figures is None:
            self._figures = percentiles([self.ttft]), percentiles([self.itl])
        return self._figures


class Recent:
    """The figures of the last three minutes."""

    def __init__(self) -> None:
        self._ring = [_Second(-1) for _ in range(KEPT_SECONDS)]
        self._newest = self._ring[0]

    # -- what happens

    def observe_first_chunk(self, now: float, num_tokens: int, seconds: float) -> None:
        """A request's first text was handed out, `seconds` after its arrival."""
        second = self._second(now)
        second.tokens_out += num_tokens
        second.ttft[bisect(_BOUNDS, seconds)] += 1

    def observe_chunk(self, now: float, num_tokens: int, seconds: float) -> None:
        """A text was handed out, `seconds` after the one before. On the path of every token."""
        second = self._newest
        if not second.at <= now < second.at + 1:
            second = self._second(now)
        second.tokens_out += num_tokens
        second.itl[bisect(_BOUNDS, seconds)] += 1

    def count_prompt(self, now: float, num_tokens: int) -> None:
        """A worker accepted a request."""
        self._second(now).tokens_in += num_tokens

    def count_resume(self, now: float) -> None:
        """A request goes on at another instance."""
        self._second(now).resumes += 1

    def count_end(self, now: float, *, failed: bool, cancelled: bool) -> None:
        """A request ended."""
        second = self._second(now)
        second.ended += 1
        second.errors += failed
        second.cancelled += cancelled

    # -- what is asked

    def minute(self, now: float) -> Minute:
        """Sums and percentiles of the last 60 seconds."""
        seconds = self._last(now, _MINUTE)
        return Minute(
            ttft=percentiles(second.ttft for second in seconds),
            itl=percentiles(second.itl for second in seconds),
            requests=sum(second.ended for second in seconds),
            errors=sum(second.errors for second in seconds),
            cancelled=sum(second.cancelled for second in seconds),
            tokens_in=sum(second.tokens_in for second in seconds),
            tokens_out=sum(second.tokens_out for second in seconds),
            resumes=sum(second.resumes for second in seconds),
        )

    def rates(self, now: float) -> tuple[float, float]:
        """Prompt and output tokens a second, over the last whole seconds."""
        seconds = self._last(int(now) - 1, _RATE_SECONDS)
        return (
            sum(second.tokens_in for second in seconds) / _RATE_SECONDS,
            sum(second.tokens_out for second in seconds) / _RATE_SECONDS,
        )

    def history(self, now: float) -> FleetHistory:
        """The whole seconds that are kept, oldest first."""
        seconds = self._last(int(now) - 1, KEPT_SECONDS - 1)
        ttft, itl = zip(*(second.figures() for second in seconds), strict=True)
        return FleetHistory(
            now=now,
            start=[float(second.at) for second in seconds],
            ttft_p50=[each.p50 for each in ttft],
            ttft_p99=[each.p99 for each in ttft],
            itl_p50=[each.p50 for each in itl],
            itl_p99=[each.p99 for each in itl],
            tokens_in=[second.tokens_in for second in seconds],
            tokens_out=[second.tokens_out for second in seconds],
            errors=[second.errors for second in seconds],
        )

    # -- inside

    def _second(self, now: float) -> _Second:
        at = int(now)
        second = self._ring[at % KEPT_SECONDS]
        if second.at != at:
            second = self._ring[at % KEPT_SECONDS] = _Second(at)
        self._newest = second
        return second

    def _last(self, now: float, count: int) -> list[_Second]:
        """The `count` seconds up to that of `now`, empty ones too, oldest first."""
        end = int(now) + 1
        found = (self._ring[at % KEPT_SECONDS] for at in range(end - count, end))
        wanted = range(end - count, end)
        return [
            second if second.at == at else _Second(at)
            for at, second in zip(wanted, found, strict=True)
        ]


def percentiles(counts: Iterable[Sequence[int]]) -> Percentiles:
    """Of the durations in some rows of buckets."""
    total = [sum(column) for column in zip(*counts, strict=True)]
    count = sum(total)
    if not count:
        return Percentiles(0)
    up_to = list(accumulate(total))
    return Percentiles(count, *(_rank(up_to, share * count) for share in (0.5, 0.9, 0.99)))


def _rank(up_to: list[int], rank: float) -> float:
    """The duration that `rank` of the durations do not exceed: the middle of its bucket."""
    bucket = bisect_left(up_to, rank)
    return _BOUNDS[0] * math.pow(_GROWTH, bucket - 0.5)
