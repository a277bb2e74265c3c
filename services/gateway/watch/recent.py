"""What a gateway's requests have met in the last minutes, second by second.

One small record a second, in a ring: adding to it is a few operations on plain numbers, and
percentiles are worked out when somebody asks. Times are the caller's clock, in seconds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import log

from services.gateway.watch.shapes import FleetHistory, Minute, Percentiles

KEPT_SECONDS = 180
_MINUTE = 60
_RATE_SECONDS = 2  # whole ones that a rate is the mean of
# Durations are counted in buckets, each 10 % wider than the one before, from 0.1 ms on.
_LEAST = 1e-4
_PER_LEAST = 1 / _LEAST
_PER_E = 1 / math.log(1.1)


class _Second:
    """What happened in one second of the clock."""

    __slots__ = (
        "at", "cancelled", "ended", "errors", "itl", "resumes", "tokens_in", "tokens_out", "ttft",
    )  # fmt: skip

    def __init__(self, at: int) -> None:
        self.at = at
        self.ttft: defaultdict[int, int] = defaultdict(int)  # bucket -> how often
        self.itl: defaultdict[int, int] = defaultdict(int)
        self.tokens_in = self.tokens_out = 0
        self.ended = self.errors = self.cancelled = self.resumes = 0


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
        second.ttft[_bucket(seconds)] += 1

    def observe_chunk(self, now: float, num_tokens: int, seconds: float) -> None:
        """A text was handed out, `seconds` after the one before. On the path of every token."""
        second = self._newest
        if now >= second.at + 1 or now < second.at:
            second = self._second(now)
        second.tokens_out += num_tokens
        second.itl[int(log(seconds * _PER_LEAST) * _PER_E) if seconds > _LEAST else 0] += 1

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
        ttft = [percentiles([second.ttft]) for second in seconds]
        itl = [percentiles([second.itl]) for second in seconds]
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


def percentiles(counts: Iterable[Mapping[int, int]]) -> Percentiles:
    """Of the durations in some buckets."""
    total: Counter[int] = Counter()
    for each in counts:
        total.update(each)
    count = total.total()
    if not count:
        return Percentiles(0)
    ordered = sorted(total.items())
    return Percentiles(count, *(_rank(ordered, share * count) for share in (0.5, 0.9, 0.99)))


def _rank(ordered: list[tuple[int, int]], rank: float) -> float:
    """The duration that `rank` of the durations do not exceed: the middle of its bucket."""
    up_to = accumulate(count for _, count in ordered)
    bucket = next(
        bucket for (bucket, _), below in zip(ordered, up_to, strict=True) if below >= rank
    )
    return _LEAST * math.exp((bucket + 0.5) / _PER_E)


def _bucket(seconds: float) -> int:
    return int(log(seconds * _PER_LEAST) * _PER_E) if seconds > _LEAST else 0
