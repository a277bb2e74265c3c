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
from functools import partial

import uvicorn
from prometheus_client import CollectorRegistry

from protos import inference_pb2_grpc
from services.common import rpc, tls
from services.common.admin import EmbeddedServer, build_app, serve_admin
from services.common.listening import cannot_listen
from services.common.metrics import process_registry
from services.common.tracing import tracing_to
from services.gateway import http
from services.gateway.config import GatewayConfig
from services.gateway.connection import ConnectionLimits, GuardedConnection
from services.gateway.core import Core
from services.gateway.grpc_keys import KeyInterceptor
from services.gateway.keys import KeyRing
from services.gateway.servicer import InferenceServicer

log = logging.getLogger(__name__)

SERVICE = "shoal.v1.Inference"
_BACKLOG = 2048  # connections that wait to be accepted
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
    tls.channel_credentials(config.peer_tls)  # a file that is not there is said at once
    keys = KeyRing(config.api_key, config.api_key_file)
    async with AsyncExitStack() as stack:
        tracing = await stack.enter_async_context(tracing_to("gateway", config.otlp_endpoint))
        core = Core(config, registry, tracing=tracing)
        sessions = await stack.enter_async_context(_background(core.run()))
        await stack.enter_async_context(_background(keys.follow_file()))
        await stack.enter_async_context(_admin(core, config, registry))
        leaving = asyncio.Event()
        rest = _rest(core, config, registry, keys, leaving)
        http_address = await stack.enter_async_context(rest)
        grpc_address = ""
        if config.grpc_port >= 0:
            public = _grpc(core, config, keys, leaving)
            grpc_address = await stack.enter_async_context(public)
        started(Endpoints(http_address, grpc_address))
        await _stopped_or_broken(stop, sessions)
        if config.reuse_port:  # a client that connects now is better served by another gateway
            leaving.set()
        log.info("draining", extra={"requests": core.num_requests})
        await core.drain(config.drain_timeout)
    return 0


@asynccontextmanager
async def _admin(
    core: Core, config: GatewayConfig, registry: CollectorRegistry
) -> AsyncIterator[None]:
    """Serves what operators ask, apart from the clients: no keys and no TLS."""
    app = build_app(
        registry, ready=lambda: True, alive=lambda: True, probes=http.probe_routes(core)
    )
    async with serve_admin(config.admin_address, app):
        yield


@asynccontextmanager
async def _rest(
    core: Core,
    config: GatewayConfig,
    registry: CollectorRegistry,
    keys: KeyRing,
    leaving: asyncio.Event,
) -> AsyncIterator[str]:
    """Serves REST, new connections until `leaving` is set; yields `host:port`."""
    context = tls.reloading_context(config.tls) if config.tls else None
    limits = ConnectionLimits(config.max_header_bytes, config.read_timeout, config.max_connections)
    listener = _listen(config)
    server = EmbeddedServer(
        uvicorn.Config(
            http.build_app(core, config, registry, keys, core.tracing, watched=core),
            http=partial(GuardedConnection, limits),  # type: ignore[arg-type]  # it only calls it
            ws="none",
            timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # seconds
            ssl_context_factory=None if context is None else lambda *_: context,
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nobody asks who the client is
            timeout_graceful_shutdown=_LINGER_SECONDS,
        )
    )

    async def leave() -> None:
        await leaving.wait()
        server.stop_listening()

    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with _background(leave()):
            yield _address(config.host, listener.getsockname()[1])
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def _grpc(
    core: Core, config: GatewayConfig, keys: KeyRing, leaving: asyncio.Event
) -> AsyncIterator[str]:
    """Serves the public gRPC API, its health following readiness, new connections until
    `leaving` is set; yields `host:port`."""
    server = rpc.Server(
        [SERVICE],
        public=True,
        interceptors=[KeyInterceptor(keys)],
        options=[
            ("grpc.so_reuseport", int(config.reuse_port)),
            ("grpc.max_metadata_size", config.max_header_bytes),
            ("grpc.absolute_max_metadata_size", config.max_header_bytes),
            ("grpc.server_handshake_timeout_ms", round(config.read_timeout * 1000)),
        ],
    )
    servicer = InferenceServicer(
        core, keys, unread_timeout=config.unread_timeout, tracing=core.tracing
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.grpc)

    async def leave() -> None:
        await leaving.wait()
        await server.stop(config.drain_timeout + _LINGER_SECONDS)

    try:
        wanted = _address(config.host, config.grpc_port)
        address = await server.start(wanted, config.tls, flag="--grpc-port")
        async with _background(_publish_readiness(core, server)), _background(leave()):
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


def _listen(config: GatewayConfig) -> socket.socket:
    """A listening socket. Raises StartupError."""
    host, port = config.host, config.port
    unread_ms = max(1, round(config.unread_timeout * 1000))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as closing:
            listener = closing.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if config.reuse_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # Connections inherit it. Without it a client that stays and never reads
            # keeps its request for ever: no write of it ends, and none fails.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
            listener.bind(address)
            listener.listen(_BACKLOG)  # before anybody is told the address
            closing.pop_all()
    except OSError as error:
        raise cannot_listen(host, port, error, "--host" if port == 0 else "--port")
    listener.setblocking(False)
    return listener


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
