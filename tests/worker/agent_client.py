"""Drives an agent process from a test: start it, speak to it, watch it end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import worker_pb2, worker_pb2_grpc
from services.common.rpc import open_channel

SCRIPTED = "tests.worker.scripted_rank"
TIMEOUT = 150.0  # for anything that must happen; the machine may be busy


Call = grpc.aio.StreamStreamCall[worker_pb2.WorkerSessionRequest, worker_pb2.WorkerSessionResponse]


class AgentProcess:
    """A running agent with a channel to it."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self.process = process
        self.directory = directory
        self.channel = open_channel(f"unix:{directory}/worker.sock")
        self.stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(self.channel)

    def open_session(self) -> Call:
        """A bare session call, written to by hand."""
        return self.stub.Session()  # type: ignore[call-arg]  # the stub wants an iterator

    async def wait_for_health(self, serving: bool) -> None:
        """Returns when grpc.health.v1 says so; tries again while the agent only starts."""
        async with asyncio.timeout(TIMEOUT):
            while not await self._watch_health(serving):
                assert self.process.returncode is None, self.errors()

    async def _watch_health(self, serving: bool) -> bool:
        states = health_pb2.HealthCheckResponse.ServingStatus
        wanted = states.SERVING if serving else states.NOT_SERVING
        request = health_pb2.HealthCheckRequest(service="shoal.v1.Worker")
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(request, wait_for_ready=True)
        try:
            async for answer in watch:
                if answer.status == wanted:
                    watch.cancel()
                    return True
        except grpc.aio.AioRpcError as error:
            # A connection made in the instant in which the server starts may break.
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
        return False

    async def wait_for_exit(self, timeout: float = TIMEOUT) -> int:
        """The exit status."""
        async with asyncio.timeout(timeout):
            return await self.process.wait()

    def ranks(self) -> list[psutil.Process]:
        """All processes below the agent."""
        return psutil.Process(self.process.pid).children(recursive=True)

    async def wait_for_ranks(self, number: int) -> list[psutil.Process]:
        """The processes below the agent, once there are that many."""
        async with asyncio.timeout(TIMEOUT):
            while len(self.ranks()) != number:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.02)
        return self.ranks()

    def errors(self) -> str:
        """What it wrote, to stdout and to stderr."""
        return (self.directory / "output").read_text()

    async def admin(self, path: str) -> httpx.Response:
        """A GET of the admin address."""
        transport = httpx.AsyncHTTPTransport(uds=f"{self.directory}/admin.sock")
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
            return await client.get(path)

    async def metric(self, series: str) -> float:
        """The value of one series, named as in the text format."""
        text = (await self.admin("/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith(series + " ")]
        return float(line.rpartition(" ")[2])

    async def wait_for_metric(self, series: str, accept: Callable[[float], bool]) -> None:
        """Returns when a scrape shows a value that `accept` takes."""
        async with asyncio.timeout(TIMEOUT):
            while not accept(await self.metric(series)):  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.02)


@asynccontextmanager
async def agent(
    directory: Path, *flags: str, settings: dict[str, Any] | None = None, wait: bool = True
) -> AsyncIterator[AgentProcess]:
    """An agent on unix sockets in `directory`, ready if `wait`; killed at the end."""
    settings = {"rank_module": SCRIPTED} if settings is None else settings
    with (directory / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.worker.agent_process", json.dumps(settings)),
            f"--address=unix:{directory}/worker.sock",
            f"--admin-address=unix:{directory}/admin.sock",
            "--engine=fake",
            *flags,
            stdout=output,
            stderr=output,
        )
    running = AgentProcess(process, directory)
    try:
        if wait:
            await running.wait_for_health(serving=True)
        yield running
    finally:
        await running.channel.close(None)
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()


class SessionClient:
    """A session as a gateway has one: it heartbeats, and collects what comes."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.token_ids: dict[int, list[int]] = {}
        self.accepted: list[int] = []
        self.finished: dict[int, worker_pb2.Finished] = {}
        self.rejected: list[worker_pb2.Rejected] = []
        self.moved: list[int] = []
        self.draining = False

    async def submit(self, handle: int, prompt: list[int], max_tokens: int = 0) -> None:
        """Sends one submission."""
        submit = worker_pb2.Submit(handle=handle, prompt_ids=prompt)
        if max_tokens:
            submit.sampling.max_tokens = max_tokens
        await self.call.write(worker_pb2.WorkerSessionRequest(submits=[submit]))

    async def abort(self, *handles: int) -> None:
        """Sends aborts."""
        await self.call.write(worker_pb2.WorkerSessionRequest(aborts=handles))

    async def until(self, happened: Callable[[], bool]) -> None:
        """Reads frames until `happened`; raises what the stream ended with."""
        async with asyncio.timeout(TIMEOUT):
            while not happened():
                response = await self.call.read()
                if not isinstance(response, worker_pb2.WorkerSessionResponse):
                    raise EOFError(await self.call.code())
                self._take(response)

    def _take(self, response: worker_pb2.WorkerSessionResponse) -> None:
        self.draining = response.draining
        step = response.step
        start = 0
        for handle, count in zip(step.handles, step.counts, strict=True):
            tokens = self.token_ids.setdefault(handle, [])
            tokens.extend(step.token_ids[start : start + count])
            start += count
        self.accepted.extend(step.accepted)
        self.rejected.extend(step.rejected)
        self.moved.extend(step.moved)
        self.finished.update((item.handle, item) for item in step.finished)


@asynccontextmanager
async def session(running: AgentProcess) -> AsyncIterator[SessionClient]:
    """A session with heartbeats, cancelled at the end."""
    call = running.open_session()

    async def heartbeat() -> None:
        while True:
            await asyncio.sleep(0.5)
            await call.write(worker_pb2.WorkerSessionRequest())

    beating = asyncio.create_task(heartbeat())
    try:
        yield SessionClient(call)
    finally:
        beating.cancel()
        call.cancel()
        await asyncio.gather(beating, return_exceptions=True)
