"""A REST server on a free port, over a scripted gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import httpx
import openai
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Counter

from services.common.admin import EmbeddedServer
from services.gateway.config import GatewayConfig
from services.gateway.connection import ConnectionLimits, GuardedConnection
from services.gateway.http import build_app
from tests.gateway.rest.fake import FakeGateway

KEEPALIVE = 0.2


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
def config() -> GatewayConfig:
    return GatewayConfig(max_body_bytes=100_000)


class Server(EmbeddedServer):
    """Tells when it listens and stops when told, where uvicorn would poll."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        self.listening.set()
        await self.stop.wait()


@pytest.fixture
def limits() -> ConnectionLimits:
    return ConnectionLimits(max_header_bytes=65_536, read_timeout=60, max_connections=10_000)


@pytest.fixture
async def address(
    gateway: FakeGateway, config: GatewayConfig, limits: ConnectionLimits
) -> AsyncIterator[tuple[str, int]]:
    """Host and port of the server."""
    registry = CollectorRegistry()
    Counter("fake_things", "A metric to be found.", registry=registry)
    app = build_app(gateway, config, registry, keepalive=KEEPALIVE)
    server = Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            log_config=None,
            http=partial(GuardedConnection, limits),  # type: ignore[arg-type]  # it only calls it
        )
    )
    task = asyncio.create_task(server.serve())
    await server.listening.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    yield "127.0.0.1", port
    server.stop.set()
    await task


@pytest.fixture
async def client(address: tuple[str, int]) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://{address[0]}:{address[1]}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
        yield client


@pytest.fixture
async def sdk(address: tuple[str, int]) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, which retries nothing by itself."""
    async with openai.AsyncOpenAI(
        base_url=f"http://{address[0]}:{address[1]}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
