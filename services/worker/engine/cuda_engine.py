"""The engine on a GPU: steps queued on one stream, results copied back on another.

    scheduler  launch N+1 ....... result N ........ launch N+2
    thread         queue N+1                            queue N+2
    engine     ... N .......| N+1 ..........................| N+2
    copies                  | ids of N

A step is queued by the engine thread, which waits for a grammar's masks and never for the
device: inputs go through pinned memory, ids that the host does not know yet come from the
token pool on the device. `result` waits for one event, recorded after the copies of its
step, and so not for what was queued since.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

import torch

from services.worker.core import Batch, EngineInfo, PendingStep, StepResult
from services.worker.engine.group import Leader
from services.worker.engine.steps import StepTensors
from services.worker.engine.thread import EngineThread


class CudaEngine:
    """`services.worker.core.Engine` on a GPU.

    `idle` of a step is the time from the end of the step before to its own first copy, as
    the device saw it. A device that starves inside a step, because kernels are launched
    more slowly than they run, counts as busy.
    """

    def __init__(
        self,
        info: EngineInfo,
        launch: Callable[[Batch], StepTensors],
        thread: EngineThread,
        stream: torch.cuda.Stream,
        leader: Leader,
        resources: ExitStack,
    ) -> None:
        self._info = info
        self._leader = leader
        self._launch = launch
        self._thread = thread
        self._stream = stream
        self._copies = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
        self._resources = resources
        self._last_end: torch.cuda.Event | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, batch: Batch) -> PendingStep:
        return QueuedStep(self._thread.submit(lambda: self._queue(batch)))

    def check(self) -> None:
        self._leader.check()

    def close(self) -> None:
        """Waits for launched steps, then lets the other ranks go."""
        self._thread.close()
        self._stream.synchronize()
        self._copies.synchronize()
        self._resources.close()

    def _queue(self, batch: Batch) -> CudaStep:
        """Queues a step on the device; on the engine thread."""
        start, end, copied = (_event() for _ in range(3))
        with torch.cuda.stream(self._stream):
            start.record()
            tensors = self._launch(batch)
            end.record()
        with torch.cuda.stream(self._copies):
            end.wait()
            host = tensors.to_host()
            copied.record()
        step = CudaStep(tensors, host, start, end, copied, self._last_end)
        self._last_end = end
        return step


class QueuedStep:
    """A launched step (`services.worker.core.PendingStep`)."""

    def __init__(self, queued: Future[CudaStep]) -> None:
        self._queued = queued

    def result(self) -> StepResult:
        """Blocks until the step is done. Raises what queueing it or CUDA raised."""
        return self._queued.result().result()


class CudaStep:
    """A step on the device.

    Keeps the step's tensors on the device until they are copied: freed before, their memory
    would be given to kernels of the engine's stream, which does not wait for the copies.
    """

    def __init__(
        self,
        tensors: StepTensors,
        host: StepTensors,
        start: torch.cuda.Event,
        end: torch.cuda.Event,
        copied: torch.cuda.Event,
        last_end: torch.cuda.Event | None,
    ) -> None:
        self._tensors: StepTensors | None = tensors
        self._host = host
        self._start = start
        self._end = end
        self._copied = copied
        self._last_end = last_end

    def result(self) -> StepResult:
        """Blocks until the step is done. Raises what CUDA raised since the last answer."""
        self._copied.synchronize()
        self._tensors = None
        idle = self._last_end.elapsed_time(self._start) if self._last_end is not None else 0.0
        return dataclasses.replace(
            self._host.result(),
            duration=self._start.elapsed_time(self._end) / 1000,
            idle=max(idle, 0.0) / 1000,
        )


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
