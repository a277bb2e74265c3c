"""Servicers in this process, and the services as processes of their own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.process import child_environment
from services.common.rpc import IDLE_PEER_TIMEOUT_SECONDS, open_channel
from services.tokenizer.__main__ import Role, serve
from services.tokenizer.config import TokenizerConfig


@dataclass
class Service:
    """A service that runs in this process's loop."""

    channel: grpc.aio.Channel
    stop: asyncio.Event
    task: asyncio.Task[int]


@asynccontextmanager
async def running(
    role: Role,
    directory: Path,
    *,
    model: str = "byte",
    drain_timeout: float = 10.0,
    peer_timeout: float = IDLE_PEER_TIMEOUT_SECONDS,
) -> AsyncIterator[Service]:
    """One of the services, ready."""
    config = TokenizerConfig(
        address=f"unix:{directory}/{role}", model=model, drain_timeout=drain_timeout
    )
    stop = asyncio.Event()
    task = asyncio.create_task(serve(config, role, stop, peer_timeout=peer_timeout))
    async with open_channel(config.address) as channel:
        await wait_until_ready(channel)
        try:
            yield Service(channel, stop, task)
        finally:
            stop.set()
            assert await task == 0


@asynccontextmanager
async def process(
    role: Role, directory: Path, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, grpc.aio.Channel]]:
    """One of the services as a process, ready; it is killed at the end if it still runs."""
    address = f"unix:{directory}/{role}"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.tokenizer", "--role", role),
        *("--address", address, *flags),
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(),
    )
    try:
        async with open_channel(address) as channel:
            await wait_until_ready(channel)
            yield child, channel
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def wait_until_ready(channel: grpc.aio.Channel) -> None:
    """Follows grpc.health.v1 until it says SERVING."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60
    )
    async for state in watch:
        if state.status == health_pb2.HealthCheckResponse.SERVING:
            watch.cancel()
            return
