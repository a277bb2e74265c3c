"""The gateway among real services: two workers with the fake engine, killed under streams."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import pytest

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from services.common import rpc
from services.common.process import child_environment

pytestmark = pytest.mark.integration


@asynccontextmanager
async def service(name: str, *flags: str) -> AsyncIterator[Process]:
    """A service as its own process, ended by SIGTERM; its exit status must be 0 then."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services",
        name,
        *flags,
        stdout=PIPE,
        stderr=DEVNULL,
        env={**child_environment(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), 20)
        assert process.returncode in (0, -signal.SIGKILL, 128 + signal.SIGTERM)


async def endpoints_of(gateway: Process) -> dict[str, str]:
    """Where a gateway says that it listens; its log is on the same stream."""
    assert gateway.stdout is not None
    async for line in gateway.stdout:
        if line.startswith(b'{"http":'):
            endpoints: dict[str, str] = json.loads(line)
            return endpoints
    raise AssertionError("the gateway ended before it listened")


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Asks another process until it says so; it has no event to wait on."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@dataclass
class Fleet:
    workers: list[Process]
    gateway: Process
    http: httpx.AsyncClient
    inference: inference_pb2_grpc.InferenceAsyncStub

    async def ready(self) -> None:
        async def is_ready() -> bool:
            return (await self.http.get("/readyz")).status_code == 200

        await until(is_ready, 60)

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith(name + " ")]
        return float(line.split()[-1])

    def generate(
        self, prompt: str, max_tokens: int
    ) -> grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]:
        sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
        return self.inference.Generate(
            inference_pb2.GenerateRequest(
                text=prompt, options=inference_pb2.GenerationOptions(sampling=sampling)
            )
        )

    async def ids(self, prompt: str, max_tokens: int) -> list[int]:
        call = self.generate(prompt, max_tokens)
        return [i async for answer in call for piece in answer.pieces for i in piece.token_ids]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    address = {name: f"unix:{tmp_path}/{name}" for name in ("t", "d", "w0", "w1")}
    model = ("--model", "byte")
    fake = (*model, "--engine", "fake", "--fake-step-ms", "5")
    async with AsyncExitStack() as stack:

        async def start(name: str, *flags: str) -> Process:
            return await stack.enter_async_context(service(name, *flags))

        await start("tokenizer", "--address", address["t"], *model)
        await start("detokenizer", "--address", address["d"], *model)
        workers = [
            await start("worker", "--address", address[name], *fake) for name in ("w0", "w1")
        ]
        gateway = await start(
            "gateway",
            *("--port=0", "--grpc-port=0"),
            f"--tokenizer-addresses={address['t']}",
            f"--detokenizer-addresses={address['d']}",
            f"--worker-addresses={address['w0']},{address['w1']}",
        )
        endpoints = await endpoints_of(gateway)
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{endpoints['http']}", trust_env=False)
        )
        channel = await stack.enter_async_context(rpc.open_channel(endpoints["grpc"]))
        fleet = Fleet(workers, gateway, http, inference_pb2_grpc.InferenceStub(channel))
        await fleet.ready()
        yield fleet


async def test_streams_outlive_a_killed_worker_and_leave_nothing(fleet: Fleet) -> None:
    prompts = [f"prompt number {number}" for number in range(16)]
    undisturbed = await asyncio.gather(*(fleet.ids(prompt, 400) for prompt in prompts[:4]))
    streams = [asyncio.create_task(fleet.ids(prompt, 400)) for prompt in prompts]

    async def all_run() -> bool:
        return await fleet.metric('shoal_gateway_handles{peer="worker"}') == len(prompts)

    await until(all_run, 30)
    fleet.workers[0].kill()
    async with asyncio.timeout(60):
        moved = await asyncio.gather(*streams)
    assert moved[:4] == undisturbed
    assert all(len(ids) == 400 for ids in moved)
    assert await fleet.metric('shoal_gateway_resumes_total{peer="worker"}') > 0

    call = fleet.generate("a client that leaves", 5000)
    await anext(aiter(call))
    call.cancel()

    async def none_runs() -> bool:
        return await fleet.metric("shoal_fleet_requests_running") == 0

    await until(none_runs, 5)
    for peer in ("worker", "tokenizer", "detokenizer"):
        assert await fleet.metric(f'shoal_gateway_handles{{peer="{peer}"}}') == 0


async def test_sigterm_lets_a_stream_finish(fleet: Fleet) -> None:
    stream = asyncio.create_task(fleet.ids("hello", 150))

    async def has_begun() -> bool:
        return await fleet.metric("shoal_gateway_output_tokens_total") > 0

    await until(has_begun, 10)
    fleet.gateway.terminate()
    async with asyncio.timeout(30):
        assert len(await stream) == 150
        assert await fleet.gateway.wait() == 0


async def test_a_second_sigterm_ends_the_gateway_at_once(fleet: Fleet) -> None:
    call = fleet.generate("a long one", 5000)
    await anext(aiter(call))
    fleet.gateway.terminate()

    async def drains() -> bool:
        return (await fleet.http.get("/readyz")).status_code == 503

    await until(drains, 10)
    fleet.gateway.terminate()
    async with asyncio.timeout(10):
        assert await fleet.gateway.wait() == 128 + signal.SIGTERM
