"""A stub of Shoal's worker: `shoal.v1.Worker.Session` over gRPC, one frame a step.

    python -m bench.peers.shoal_worker --address unix:/tmp/w --tokens 1,2,3 --report /tmp/sent.json

As the peers' stubs it has no agent and no scheduler: what is measured is the wire and the
gateway. The next step is made when the last has been written, so that nothing merges here. A
flooded stream alone is the exception: there, as in the real worker, the engine does not wait for
the wire, and the steps of a fast one (`_STEPS_A_SECOND`) merge between two frames.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from bench.peers.steps import Steps
from protos import common_pb2, worker_pb2, worker_pb2_grpc
from services.common import logs, process
from services.common.config import option, parse
from services.common.rpc import FRAME_SECONDS, HEARTBEAT_SECONDS, Server

_CONTEXT = 1 << 20
_STEPS_A_SECOND = 10_000.0  # of the engine behind one flooded stream


@dataclass(frozen=True)
class StubConfig:
    """Where the stub listens, and what it says."""

    address: str = option("", "where to listen")
    tokens: tuple[str, ...] = option((), "token ids to send, over and over", metavar="ID,...")
    report: str = option("", "file for the times at which paced tokens were sent")
    model: str = option("", "the model's name")
    vocab_size: int = option(1 << 20, "ids must be below this")
    max_running_requests: int = option(1 << 16, "what it says of its room; it takes what comes")


class StubWorker(worker_pb2_grpc.WorkerServicer):
    """Serves one gateway."""

    def __init__(self, config: StubConfig) -> None:
        self._info = worker_pb2.WorkerInfo(
            epoch=1,
            model=config.model,
            fingerprint="stub",
            max_model_len=_CONTEXT,
            vocab_size=config.vocab_size,
            page_size=16,
            num_pages=1 << 20,
            max_running_requests=config.max_running_requests,
            tensor_parallel_size=1,
            engine="fake",
        )
        self._steps = Steps([int(token) for token in config.tokens], Path(config.report))
        self._accepted: list[int] = []
        self._written_at = 0.0
        self._news = asyncio.Event()

    async def Session(  # type: ignore[override]  # the stub knows generators only
        self,
        request_iterator: AsyncIterator[worker_pb2.WorkerSessionRequest],
        context: worker_pb2_grpc._ServicerContext,
    ) -> None:
        """Reads and writes until the gateway leaves."""
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            await context.write(worker_pb2.WorkerSessionResponse(info=self._info))
            while not reader.done():
                if not self._steps and not self._accepted:
                    await self._idle()
                elif pause := self._steps.pause():
                    await asyncio.sleep(pause)  # the device at work
                elif self._steps.flooded_alone and not self._accepted:
                    await asyncio.sleep(FRAME_SECONDS)  # as the real worker's outbox
                await context.write(self._frame())
        finally:
            reader.cancel()

    async def _idle(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                await self._news.wait()
        except TimeoutError:
            return

    async def _read(self, requests: AsyncIterator[worker_pb2.WorkerSessionRequest]) -> None:
        async for request in requests:
            for submit in request.submits:
                sampling = submit.sampling
                self._steps.add(submit.handle, sampling.max_tokens, sampling.top_p or 1.0)
                self._accepted.append(submit.handle)
            for handle in request.aborts:
                self._steps.drop(handle)
            self._news.set()

    def _frame(self) -> worker_pb2.WorkerSessionResponse:
        response = worker_pb2.WorkerSessionResponse()
        rows = [row for _ in range(self._num_steps()) for row in self._steps.take()]
        step = response.step
        step.accepted.extend(self._accepted)
        self._accepted.clear()
        step.handles.extend([handle for handle, _, _ in rows])
        step.counts.extend([1] * len(rows))
        step.token_ids.extend([token_id for _, token_id, _ in rows])
        for handle, _, last in rows:
            if last:
                step.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_LENGTH)
        step.load.num_running = len(rows)
        return response

    def _num_steps(self) -> int:
        """How many steps go into the next frame."""
        now, before = time.monotonic(), self._written_at
        self._written_at = now
        if not self._steps.flooded_alone or self._accepted:
            return 1
        return max(int((now - before) * _STEPS_A_SECOND), 1)


async def serve(config: StubConfig, stop: asyncio.Event) -> int:
    """Serves until told to stop."""
    server = Server(["shoal.v1.Worker"])
    stub = StubWorker(config)  # type: ignore[abstract]  # gateways ask for sessions alone
    worker_pb2_grpc.add_WorkerServicer_to_server(stub, server.grpc)
    await server.start(config.address)
    print("ready", flush=True)
    await stop.wait()
    await server.stop(0)
    return 0


def main(argv: list[str]) -> None:
    """Runs until a signal."""
    config = parse(StubConfig, argv, prog="bench.peers.shoal_worker", description=__doc__ or "")
    logs.setup("stub", level="warning")
    process.run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main(sys.argv[1:])
