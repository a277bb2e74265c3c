"""Many workers in one process: real agents and sessions over engines that only count.

    python -m bench.sim_workers --addresses unix:/tmp/a,unix:/tmp/b --step-ms 100

Each agent listens at an address of its own and speaks `shoal.v1.Worker` with the code that a
worker pod runs. Behind it stands no rank: an engine that emits one token for each of its
requests in every step, at a steady pace, costs little beside the agent, so that one core can
pretend to be dozens of workers to the gateways.
"""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from protos import common_pb2, engine_pb2, worker_pb2, worker_pb2_grpc
from services.common import logs, process
from services.common.config import option, parse
from services.common.rpc import Server
from services.worker.agent import Agent
from services.worker.metrics import WorkerMetrics
from services.worker.servicer import WorkerServicer

_TOKEN = ord("a")
_CONTEXT = 8192
_PAGES = 1 << 20


@dataclass(frozen=True)
class SimConfig:
    """Which workers to pretend to be."""

    addresses: tuple[str, ...] = option((), "where the agents listen", metavar="ADDR,...")
    step_ms: float = option(100.0, "how long a step of every engine takes, in milliseconds")


class CountingEngine:
    """Answers commands as rank 0 would, one token a request and step."""

    def __init__(self, step_seconds: float) -> None:
        self.agent = Agent(self.send, WorkerMetrics(CollectorRegistry()))
        self._step_seconds = step_seconds
        self._left: dict[int, int] = {}  # tokens to go, by handle
        self._news = worker_pb2.StepFrame()
        self._num_steps = 0
        self._work = asyncio.Event()
        self._epoch = random.getrandbits(63)
        ready = worker_pb2.WorkerInfo(
            epoch=self._epoch,
            model="byte",
            fingerprint="simulated",
            max_model_len=_CONTEXT,
            vocab_size=259,
            page_size=16,
            num_pages=_PAGES,
            max_running_requests=1 << 16,
            tensor_parallel_size=1,
            engine="fake",
        )
        self.agent.handle_event(engine_pb2.EngineEvent(ready=ready))

    def send(self, command: engine_pb2.EngineCommand) -> None:
        """Takes submissions and aborts in; the next step answers them."""
        for submit in command.submits:
            self._left[submit.handle] = submit.sampling.max_tokens
            self._news.accepted.append(submit.handle)
        for handle in command.aborts:
            if self._left.pop(handle, None) is not None:
                self._news.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_ABORT)
        self._work.set()

    async def run(self) -> None:
        """Steps at its pace while there is work, from a moment of its own."""
        await asyncio.sleep(random.uniform(0, self._step_seconds))
        while True:
            await self._work.wait()
            self._step()
            if not self._left:
                self._work.clear()
            await asyncio.sleep(self._step_seconds)  # the device at work

    def _step(self) -> None:
        frame, self._news = self._news, worker_pb2.StepFrame()
        self._num_steps += 1
        handles = list(self._left)
        frame.epoch, frame.step = self._epoch, self._num_steps
        frame.handles.extend(handles)
        frame.counts.extend([1] * len(handles))
        frame.token_ids.extend([_TOKEN] * len(handles))
        for handle in handles:
            self._left[handle] -= 1
            if not self._left[handle]:
                del self._left[handle]
                frame.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_LENGTH)
        frame.load.num_running = len(self._left)
        frame.load.num_pages = frame.load.num_free_pages = _PAGES
        step_us = round(self._step_seconds * 1e6)
        stats = engine_pb2.EngineStats(step_us=step_us, num_requests=len(self._left))
        self.agent.handle_event(engine_pb2.EngineEvent(step=frame, stats=stats))


async def serve(config: SimConfig, stop: asyncio.Event) -> int:
    """Serves every address until told to stop."""
    async with AsyncExitStack() as stack:
        engines = [CountingEngine(config.step_ms / 1000) for _ in config.addresses]
        for address, engine in zip(config.addresses, engines, strict=True):
            server = Server(["shoal.v1.Worker"])
            worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(engine.agent), server.grpc)
            await server.start(address)
            stack.push_async_callback(server.stop, 0.5)
        steps = [asyncio.create_task(engine.run()) for engine in engines]
        print("ready", flush=True)
        await stop.wait()
        for step in steps:
            step.cancel()
        for engine in engines:
            engine.agent.end_sessions()
    return 0


def main(argv: list[str]) -> None:
    """Runs until a signal."""
    config = parse(SimConfig, argv, prog="bench.sim_workers", description=__doc__ or "")
    logs.setup("sim", level="warning")
    process.run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main(sys.argv[1:])
