"""The device stream of an engine without a device: one thread that runs steps in order.

It owns the order of the steps and their timing; what a step computes it does not know.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from services.worker.core import Batch, StepResult

T = TypeVar("T")


class EngineThread:
    """Runs each launched batch's step, in the order of the launches, on one daemon thread.

    The results carry `duration`, the time the step took, and `idle`, the time for which
    the thread had nothing to run before it. After a step that raised, every later one
    raises the same error: the state it left behind is not to be computed with.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the thread and waits for it. Raises what it raised.

        What computes in parallel belongs here from the start: OpenMP keeps a pool for every
        thread that ever did, and with more pooled threads than cores GNU's runtime stops
        spinning between operations, which doubled the time of a decode step.
        """
        return self.submit(function).result()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queues a function and returns at once."""
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:  # raised again by the future, in the caller's thread
                outcome.set_exception(error)

        self._queue.put(run)
        return outcome

    def launch(self, step: Callable[[Batch], StepResult], batch: Batch) -> _Job:
        """Queues a step and returns at once."""
        job = _Job(step, batch)
        self._queue.put(job)
        return job

    def close(self) -> None:
        """Waits for the launched steps and ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        failure: BaseException | None = None
        ended = time.perf_counter()
        while (job := self._queue.get()) is not None:
            if not isinstance(job, _Job):
                job()
                ended = time.perf_counter()
                continue
            started = time.perf_counter()
            if failure is None:
                try:
                    job.value = job.step(job.batch)
                except BaseException as error:  # raised again by result(), in the caller's thread
                    failure = error
            idle, ended = started - ended, time.perf_counter()
            job.finish(failure, duration=ended - started, idle=idle)


class _Job:
    """A launched step (`services.worker.core.PendingStep`)."""

    def __init__(self, step: Callable[[Batch], StepResult], batch: Batch) -> None:
        self.step = step
        self.batch = batch
        self.value: StepResult | None = None
        self._failure: BaseException | None = None
        self._done = threading.Event()

    def finish(self, failure: BaseException | None, *, duration: float, idle: float) -> None:
        """Publishes the outcome to `result`; called once, by the engine thread."""
        if failure is not None:
            self._failure = failure
        elif self.value is not None:
            self.value = dataclasses.replace(self.value, duration=duration, idle=idle)
        self._done.set()

    def result(self) -> StepResult:
        """Blocks until the step is done. Raises what the step raised."""
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        assert self.value is not None
        return self.value
