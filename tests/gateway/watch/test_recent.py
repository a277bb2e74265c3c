"""Figures of the last minutes: sums, percentiles, rates, and what has passed out of sight."""

from __future__ import annotations

import random

import pytest

from services.gateway.watch.recent import KEPT_SECONDS, Recent


def test_nothing_has_no_percentiles() -> None:
    minute = Recent().minute(1000.0)
    assert (minute.requests, minute.ttft.count, minute.ttft.p50) == (0, 0, None)


def test_percentiles_are_near_the_exact_ones() -> None:
    recent, draw = Recent(), random.Random(7)
    durations = sorted(draw.lognormvariate(-3, 1.2) for _ in range(5000))
    for duration in durations:
        recent.observe_first_chunk(500.0 + duration, 1, duration)
    ttft = recent.minute(520.0).ttft
    assert ttft.count == 5000
    for told, share in ((ttft.p50, 0.5), (ttft.p90, 0.9), (ttft.p99, 0.99)):
        assert told == pytest.approx(durations[int(share * 5000) - 1], rel=0.06)


def test_durations_below_the_least_bucket_count() -> None:
    recent = Recent()
    recent.observe_chunk(1.0, 1, 0.0)
    recent.observe_chunk(1.0, 1, -0.001)  # the clock is coarse
    assert recent.minute(1.0).itl.count == 2


def test_a_minute_forgets_what_is_older() -> None:
    recent = Recent()
    recent.count_prompt(100.0, 5)
    recent.count_end(100.0, failed=True, cancelled=False)
    recent.count_resume(100.0)
    recent.count_end(150.0, failed=False, cancelled=True)
    both, later = recent.minute(159.9), recent.minute(160.0)
    assert (both.requests, both.errors, both.cancelled, both.tokens_in) == (2, 1, 1, 5)
    assert (later.requests, later.errors, later.resumes, later.tokens_in) == (1, 0, 0, 0)


def test_a_second_of_the_round_before_is_not_taken_for_this() -> None:
    recent = Recent()
    recent.observe_first_chunk(10.0, 7, 0.1)
    assert recent.minute(10.0 + KEPT_SECONDS).tokens_out == 0
    recent.observe_first_chunk(10.0 + KEPT_SECONDS, 1, 0.1)
    assert recent.minute(10.0 + KEPT_SECONDS).tokens_out == 1


def test_rates_are_of_whole_seconds() -> None:
    recent = Recent()
    for at, tokens in ((7.5, 100), (8.2, 10), (9.9, 30), (10.1, 1000)):
        recent.observe_chunk(at, tokens, 0.1)
    assert recent.rates(10.2) == (0.0, 20.0)


def test_history_is_a_row_a_second() -> None:
    recent = Recent()
    recent.observe_first_chunk(200.5, 3, 0.25)
    history = recent.history(203.0)
    assert len(history.start) == len(history.tokens_out) == KEPT_SECONDS - 1
    row = history.start.index(200.0)
    assert history.tokens_out[row] == 3
    assert history.ttft_p50[row] == pytest.approx(0.25, rel=0.06)
    assert history.itl_p50[row] is None
    assert sum(history.tokens_out) == 3
