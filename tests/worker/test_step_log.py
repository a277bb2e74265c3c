"""What a watched rank tells of its steps."""

from __future__ import annotations

from protos import engine_pb2
from services.worker.scheduler.stats import StepTimes
from services.worker.step_log import StepLog


def watch(*, on: bool) -> list[engine_pb2.EngineCommand]:
    return [engine_pb2.EngineCommand(), engine_pb2.EngineCommand(watch_steps=on)]


def step(number: int, duration: float = 0.02, bubble: float = 0.005) -> StepTimes:
    return StepTimes(number, duration, bubble, num_prefill_tokens=3, num_decode_tokens=4)


def test_nothing_is_kept_until_somebody_watches() -> None:
    log = StepLog()
    log.add([step(1)], 10.0)
    assert log.due_in(10.0) is None
    log.obey(watch(on=True))
    log.add([step(2)], 10.0)
    assert log.due_in(10.0) == 0.0
    log.obey(watch(on=False))
    assert log.due_in(10.0) is None


def test_a_report_says_when_each_step_began() -> None:
    log = StepLog()
    log.obey(watch(on=True))
    log.add([step(1), step(2)], 10.0)  # the second has just ended
    event = engine_pb2.EngineEvent()
    log.report_to(event, 10.5)
    assert [told.number for told in event.steps] == [1, 2]
    assert [told.began_us_ago for told in event.steps] == [545_000, 520_000]
    assert event.steps[0].duration_us == 20_000
    assert event.steps[0].bubble_us == 5_000
    assert (event.steps[0].num_prefill_tokens, event.steps[0].num_decode_tokens) == (3, 4)
    assert log.due_in(10.5) is None


def test_reports_are_ten_a_second_at_most() -> None:
    log = StepLog()
    log.obey(watch(on=True))
    log.report_to(engine_pb2.EngineEvent(), 10.0)
    log.add([step(1)], 10.01)
    due = log.due_in(10.01)
    assert due is not None
    assert 0.08 < due < 0.1
    assert log.due_in(10.2) == 0.0


def test_what_nobody_reads_is_bounded() -> None:
    log = StepLog()
    log.obey(watch(on=True))
    for number in range(5000):
        log.add([step(number)], 10.0)
    event = engine_pb2.EngineEvent()
    log.report_to(event, 11.0)
    assert len(event.steps) == 1024
