"""The engine thread: order, timing, and what a failing step does."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import numpy as np
import pytest

from services.worker.core import Batch, StepResult
from services.worker.engine.thread import EngineThread


def make_batch(number: int) -> Batch:
    return Mock(spec=Batch, step=number)


def test_steps_run_in_order_and_launch_does_not_wait() -> None:
    gate = threading.Event()

    def step(batch: Batch) -> StepResult:
        gate.wait()
        return StepResult(np.array([batch.step], np.int32))

    thread = EngineThread("test")
    pending = [thread.launch(step, make_batch(number)) for number in range(5)]
    gate.set()
    assert [int(p.result().token_ids[0]) for p in pending] == list(range(5))
    thread.close()


def test_idle_time_is_what_passed_with_nothing_queued() -> None:
    def step(batch: Batch) -> StepResult:
        return StepResult(np.array([], np.int32))

    thread = EngineThread("test")
    first = thread.launch(step, make_batch(1)).result()
    threading.Event().wait(0.05)
    second = thread.launch(step, make_batch(2)).result()
    assert second.idle >= 0.05
    assert first.duration >= 0
    thread.close()


def test_after_a_failure_every_later_step_raises_it() -> None:
    runs: list[int] = []

    def step(batch: Batch) -> StepResult:
        runs.append(batch.step)
        raise RuntimeError("broken")

    thread = EngineThread("test")
    pending = [thread.launch(step, make_batch(number)) for number in range(3)]
    for step_ in pending:
        with pytest.raises(RuntimeError, match="broken"):
            step_.result()
    thread.close()
    assert runs == [0]


def test_a_call_runs_on_the_thread_and_passes_on_its_outcome() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    thread = EngineThread("test")
    assert thread.call(lambda: threading.current_thread().name) == "test"
    with pytest.raises(ValueError, match="no such model"):
        thread.call(fail)
    assert thread.call(lambda: 3) == 3  # an error of a call is the caller's alone
    thread.close()


def test_a_submitted_function_is_not_waited_for() -> None:
    gate = threading.Event()
    thread = EngineThread("test")
    waiting, after = thread.submit(gate.wait), thread.submit(lambda: 5)
    assert not waiting.done()
    gate.set()
    assert after.result() == 5
    thread.close()
