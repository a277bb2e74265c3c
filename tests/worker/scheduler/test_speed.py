"""What a step of the scheduler costs, without an engine: printed, since machines differ."""

from __future__ import annotations

import time

import numpy as np
import pytest

from services.worker.core import Batch, PendingStep, SamplingParams, StepResult
from services.worker.scheduler.request import Commands, Submission
from services.worker.scheduler.scheduler import Scheduler
from tests.worker.scheduler.harness import make_info


class NoEngine:
    """Answers every batch with zeros, at once."""

    def __init__(self) -> None:
        self.info = make_info(
            page_size=16, num_pages=60_000, max_model_len=4096, max_prefill_tokens=8192
        )

    def launch(self, batch: Batch) -> PendingStep:
        return _Done(StepResult(np.zeros(batch.num_rows, np.int32)))

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Done:
    def __init__(self, value: StepResult) -> None:
        self._value = value

    def result(self) -> StepResult:
        return self._value


@pytest.mark.parametrize("num_running", [1, 64, 256, 512])
def test_cpu_time_of_a_decode_step(num_running: int) -> None:
    scheduler = Scheduler(NoEngine(), max_running_requests=num_running)
    prompts = [np.arange(i, i + 500) % 256 for i in range(num_running)]
    submits = [
        Submission(handle, prompt, SamplingParams(max_tokens=3000, ignore_eos=True))
        for handle, prompt in enumerate(prompts)
    ]
    scheduler.step(Commands(submits), 0.0)
    while scheduler.gauges().num_running < num_running or scheduler.counters.batch_tokens > 512:
        scheduler.step(Commands(), 0.0)
    steps = 200
    started = time.process_time()
    for _ in range(steps):
        scheduler.step(Commands(), 0.0)
    spent = (time.process_time() - started) / steps
    print(f"{num_running} running: {spent * 1e6:.0f} us a step")
    assert scheduler.counters.num_output_tokens >= steps * num_running
