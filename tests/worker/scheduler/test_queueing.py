"""Who goes first, who waits too long, and who is turned away."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from services.common.errors import ErrorCode
from services.worker.core import FinishReason, SamplingParams
from services.worker.scheduler.policy import Policy, Quota
from services.worker.scheduler.waiting import AGEING
from tests.worker.scheduler.harness import Client, Harness, TimedEngine, make_info


def order_of_ends(harness: Harness, *clients: Client) -> list[int]:
    ends: list[int] = []
    while not all(client.ended for client in clients):
        ends += [row.handle for row in harness.step().finished]
    return ends


def test_higher_priority_goes_first_and_equals_in_order() -> None:
    harness = Harness(max_running=1)
    clients = [harness.submit([number], 2, priority=number % 2) for number in range(6)]
    assert order_of_ends(harness, *clients) == [1, 3, 5, 0, 2, 4]


def test_nobody_is_overtaken_for_ever() -> None:
    harness = Harness(max_running=1)
    humble = harness.submit([1], 2, priority=0)
    steps = 0
    while not humble.ended:
        harness.submit([2], 2, priority=3)
        harness.now += 0.5
        harness.step()
        steps += 1
        assert steps < 200
    assert harness.now > 3 * AGEING  # it did wait for its betters


def test_a_resume_goes_before_new_work_of_its_priority() -> None:
    harness = Harness(max_running=1)
    running = harness.submit([9], 3)
    harness.step()
    new = [harness.submit([number], 2) for number in range(2)]
    harness.step()
    first = harness.submit([5], 3, resume_ids=running.oracle(1))
    second = harness.submit([6], 3, resume_ids=running.oracle(1))
    above = harness.submit([7], 2, priority=1)
    everyone = (running, *new, first, second, above)
    expected = [c.submission.handle for c in (running, above, first, second, *new)]
    assert order_of_ends(harness, *everyone) == expected


def test_a_deadline_that_passes_in_the_queue_is_answered() -> None:
    harness = Harness(max_running=1)
    running = harness.submit([1], 50, timeout=0.1)
    late = harness.submit([2], 2, timeout=0.1)
    at_once = harness.submit([3], 2, timeout=0.0)
    patient = harness.submit([4], 2, timeout=100.0)
    harness.step()
    assert at_once.error is not None
    harness.run()
    assert late.error is not None
    assert late.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert late.tokens == []
    assert running.reason is patient.reason is FinishReason.LENGTH  # who runs is not dropped


def test_a_deadline_that_cannot_be_met_is_answered_before_it_passes() -> None:
    """A prompt of 400 tokens takes 4 s, and 2 s at twice the measured speed."""
    info = make_info(max_prefill_tokens=50)
    engine = TimedEngine(info, 1, lambda batch: 0.01 * batch.num_tokens)
    harness = Harness(info, max_running=1, engine=engine)
    harness.submit([1] * 100, 500)
    for _ in range(20):
        harness.step()
    started = harness.now
    hopeless = harness.submit(list(range(200)) * 2, 2, timeout=2.5)
    short = harness.submit([3], 2, timeout=2.5)
    much = harness.submit([4], timeout=2.5, sampling=SamplingParams(max_tokens=600, min_tokens=600))
    cached = harness.submit([1] * 100, 2, timeout=0.6)  # its prompt is in the cache
    ends: dict[int, float] = {}
    while len(ends) < 4:
        harness.step()
        for client in (hopeless, short, much, cached):
            if client.error is not None and client.submission.handle not in ends:
                assert client.error.code is ErrorCode.DEADLINE_EXCEEDED
                ends[client.submission.handle] = harness.now - started
    assert ends[hopeless.submission.handle] == pytest.approx(0.5, abs=0.1)
    assert ends[much.submission.handle] < 0.1
    assert ends[short.submission.handle] == pytest.approx(2.5, abs=0.1)
    assert ends[cached.submission.handle] == pytest.approx(0.6, abs=0.1)
    assert harness.scheduler.counters.num_late == 4


def test_slow_first_steps_have_no_deadline_refused_for_ever() -> None:
    """An engine that is idle is tried, and shows another pace."""
    info = make_info(max_prefill_tokens=50)
    slow = [50.0] * 4
    engine = TimedEngine(info, 1, lambda batch: slow.pop() if slow else 0.05)
    harness = Harness(info, max_running=1, engine=engine)
    harness.submit([1] * 100, 2)
    harness.run()
    for number in range(10):
        sampling = SamplingParams(max_tokens=4, min_tokens=4)
        client = harness.submit([2 + number] * 100, sampling=sampling, timeout=4.0)
        harness.run()
        assert client.reason is FinishReason.LENGTH


def test_nobody_behind_a_slow_first_step_is_refused_for_it() -> None:
    info = make_info(max_prefill_tokens=50)
    slow = [50.0]
    engine = TimedEngine(info, 1, lambda batch: slow.pop() if slow else 0.05)
    harness = Harness(info, max_running=1, engine=engine)
    running = harness.submit([1] * 50, 20)
    while not running.tokens:
        harness.step()
    clients = [harness.submit([2 + number] * 50, 2, timeout=10.0) for number in range(5)]
    harness.run()
    assert all(client.reason is FinishReason.LENGTH for client in clients)


def test_a_full_queue_turns_new_work_away_but_no_resume() -> None:
    harness = Harness(max_running=1, max_queue=2)
    clients = [harness.submit([number], 3) for number in range(5)]
    harness.step()
    assert [client.accepted for client in clients] == [True, True, True, False, False]
    for client in clients[3:]:
        assert client.error is not None
        assert client.error.code is ErrorCode.OVERLOADED
        assert client.error.retry_after is not None
        assert client.error.retry_after >= 1.0
    resumed = harness.submit([7], 3, resume_ids=[40])
    harness.step()
    assert resumed.accepted
    harness.run()


def test_requests_that_wait_for_pages_count_as_waiting() -> None:
    harness = Harness(make_info(num_pages=12, page_size=4), max_running=100, max_queue=2)
    for number in range(2):
        harness.submit([number] * 30, 10)
        harness.step()
    clients = [harness.submit([number + 5] * 30, 10) for number in range(3)]
    harness.step()
    assert [client.accepted for client in clients] == [True, False, False]
    harness.run()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("prefill-first", [Quota(False, 32)] * 3),
        ("decode-first", [Quota(True, 0)] * 3),
        ("mixed", [Quota(True, 28)] * 3),
    ],
)
def test_what_a_batch_is_made_of(name: str, expected: list[Quota]) -> None:
    policy = Policy(name, 32)  # type: ignore[arg-type]
    assert [policy.quota(4, 1) for _ in range(3)] == expected
    assert policy.quota(0, 1) == Quota(False, 32)
    assert policy.quota(4, 0).decode


def test_prompts_get_their_turn_under_every_policy() -> None:
    decode_first = Policy("decode-first", 32)
    quotas = [decode_first.quota(4, 1) for _ in range(34)]
    assert sum(not quota.decode for quota in quotas) == 2
    assert Policy("mixed", 32).quota(500, 1) == Quota(True, 8)


def test_a_request_that_finds_no_room_is_not_looked_up_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(make_info(num_pages=12))
    running = harness.submit([1] * 8, 30)
    for _ in range(5):
        harness.step()
    waiting = harness.submit([2] * 40, 4)
    kv = harness.scheduler._residents.kv
    lookup = Mock(wraps=kv.open)
    monkeypatch.setattr(kv, "open", lookup)
    for _ in range(10):
        harness.step()
    assert not running.ended
    assert lookup.call_count == 1
    harness.run()
    assert waiting.tokens == waiting.oracle(4)
