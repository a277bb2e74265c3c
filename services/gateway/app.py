"""The gateway process: start-up, main loop, shut-down.

sessions to peers --+
REST listener ------+--> serve until told to stop --> drain --> close listeners
gRPC listener ------+
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass

import uvicorn
from prometheus_client import CollectorRegistry

from protos import inference_pb2_grpc
from services.common import rpc
from services.common.admin import EmbeddedServer
from services.common.errors import StartupError
from services.common.metrics import process_registry
from services.gateway import http
from services.gateway.config import GatewayConfig
from services.gateway.core import Core
from services.gateway.servicer import InferenceServicer

log = logging.getLogger(__name__)

SERVICE = "shoal.v1.Inference"
# What connections get, after the streams have ended, to take in their last bytes.
_LINGER_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a gateway really listens, `host:port`; `grpc` is empty if it does not."""

    http: str
    grpc: str


async def serve(
    config: GatewayConfig,
    stop: asyncio.Event,
    started: Callable[[Endpoints], None] = lambda endpoints: None,
) -> int:
    """Runs a gateway until `stop` is set and its requests have ended; returns 0.

    `started` is told the endpoints once both listeners are up, which does not wait
    for any peer. Raises StartupError if a port is taken or the configuration lacks
    something.
    """
    registry = process_registry()
    core = Core(config, registry)
    async with AsyncExitStack() as stack:
        sessions = await stack.enter_async_context(_background(core.run()))
        http_address = await stack.enter_async_context(_rest(core, config, registry))
        grpc_address = ""
        if config.grpc_port >= 0:
            grpc_address = await stack.enter_async_context(_grpc(core, config))
        started(Endpoints(http_address, grpc_address))
        await _stopped_or_broken(stop, sessions)
        log.info("draining", extra={"requests": core.num_requests})
        await core.drain(config.drain_timeout)
    return 0


@asynccontextmanager
async def _rest(
    core: Core, config: GatewayConfig, registry: CollectorRegistry
) -> AsyncIterator[str]:
    """Serves REST; yields `host:port`."""
    listener = _listen(config.host, config.port, config.unread_timeout)
    server = EmbeddedServer(
        uvicorn.Config(
            http.build_app(core, config, registry),
            http="httptools",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_LINGER_SECONDS,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield _address(config.host, listener.getsockname()[1])
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def _grpc(core: Core, config: GatewayConfig) -> AsyncIterator[str]:
    """Serves the public gRPC API, its health following readiness; yields `host:port`."""
    server = rpc.Server([SERVICE], public=True)
    servicer = InferenceServicer(core, unread_timeout=config.unread_timeout)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.grpc)
    try:
        address = await server.start(_address(config.host, config.grpc_port))
        async with _background(_publish_readiness(core, server)):
            yield address
    finally:
        servicer.end_sessions()
        await server.stop(_LINGER_SECONDS)


async def _publish_readiness(core: Core, server: rpc.Server) -> None:
    seen = -1
    while True:
        seen = await core.fleet.change(seen)
        await server.set_serving(core.readiness().ready)


@asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Runs something beside the body, and ends with it."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _stopped_or_broken(stop: asyncio.Event, sessions: asyncio.Task[None]) -> None:
    """Returns when told to stop. Raises what ended the sessions, should they end first."""
    async with _background(_wait(stop)) as stopped:
        await asyncio.wait([stopped, sessions], return_when=asyncio.FIRST_COMPLETED)
    if sessions.done():
        sessions.result()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _listen(host: str, port: int, unread_timeout: float) -> socket.socket:
    """A listening socket. Raises StartupError."""
    unread_ms = max(1, round(unread_timeout * 1000))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as closing:
            listener = closing.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it. Without it a client that stays and never reads
            # keeps its request for ever: no write of it ends, and none fails.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
            listener.bind(address)
            closing.pop_all()
    except OSError as error:
        raise StartupError(f"cannot listen on {_address(host, port)}: {error.strerror}")
    listener.setblocking(False)
    return listener


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
