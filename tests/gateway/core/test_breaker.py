"""The circuit breaker's states, by a clock of our own, and the retry budget."""

from __future__ import annotations

from services.gateway.peers.breaker import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    PROBE_SECONDS,
    THRESHOLD,
    Breaker,
)
from services.gateway.retry_budget import FLOOR, SHARE, RetryBudget


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(THRESHOLD):
        breaker.fail(now)
    return breaker


def test_a_worker_that_is_back_is_probed_at_once_and_once() -> None:
    """Lost again and again, its pause would outlast what an open stream waits for."""
    breaker = opened()
    assert not breaker.allows(FIRST_PAUSE_SECONDS / 2)
    breaker.reconnect(FIRST_PAUSE_SECONDS / 2)
    assert breaker.allows(FIRST_PAUSE_SECONDS / 2)
    breaker.sending(FIRST_PAUSE_SECONDS / 2)
    assert not breaker.allows(FIRST_PAUSE_SECONDS)


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(THRESHOLD - 1):
            breaker.fail(0.0)
        breaker.succeed()
    assert breaker.state(0.0) == "closed"
    breaker = opened()
    assert breaker.state(0.0) == "open"
    assert not breaker.allows(FIRST_PAUSE_SECONDS - 0.01)
    assert breaker.num_openings == 1


def test_one_probe_at_a_time_and_its_success_closes() -> None:
    breaker = opened()
    now = FIRST_PAUSE_SECONDS
    assert breaker.state(now) == "half-open"
    assert breaker.allows(now)
    breaker.sending(now)
    assert not breaker.allows(now)
    assert breaker.state(now) == "half-open"
    breaker.succeed()
    assert breaker.state(now) == "closed"


def test_a_failed_probe_doubles_the_pause_up_to_the_limit() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(8):
        pauses.append(breaker.next_chance - now)
        now = breaker.next_chance
        breaker.sending(now)
        breaker.fail(now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert max(pauses) == MAX_PAUSE_SECONDS
    breaker.sending(breaker.next_chance)
    breaker.succeed()
    for _ in range(THRESHOLD):
        breaker.fail(now)
    assert breaker.next_chance - now == FIRST_PAUSE_SECONDS


def test_late_failures_of_what_was_sent_before_change_nothing() -> None:
    breaker = opened()
    chance = breaker.next_chance
    for _ in range(50):
        breaker.fail(0.5)
    assert breaker.next_chance == chance
    assert breaker.num_openings == 1


def test_a_probe_that_is_never_answered_does_not_bar_the_worker_for_ever() -> None:
    breaker = opened()
    breaker.sending(FIRST_PAUSE_SECONDS)
    assert breaker.allows(FIRST_PAUSE_SECONDS + PROBE_SECONDS)


def test_retries_stay_below_their_share_of_the_traffic() -> None:
    budget = RetryBudget(0.0)
    made = 0
    for _ in range(10_000):
        budget.deposit()
        made += budget.withdraw(0.0)
    assert made <= SHARE * 10_000 + FLOOR
    assert made >= SHARE * 10_000 - 1


def test_a_quiet_gateway_can_always_retry_a_little() -> None:
    budget = RetryBudget(0.0)
    assert sum(budget.withdraw(0.0) for _ in range(100)) == FLOOR
    assert not budget.withdraw(0.5)
    assert budget.withdraw(1.6)
    assert not budget.withdraw(1.6)
    assert sum(budget.withdraw(1000.0) for _ in range(100)) == FLOOR
