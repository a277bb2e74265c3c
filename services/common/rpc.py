"""Everything about gRPC that must be the same on both sides of a wire.

Message limits, keepalive, reconnect backoff, heartbeats, health and reflection live
here and nowhere else; credentials are made by `services.common.tls`, and how a failed
call ends is told in `services.common.rpc_errors`. Channels and servers are made inside
a running loop, never before a fork.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import tls
from services.common.errors import StartupError
from services.common.listening import is_unix, require_free
from services.common.rpc_errors import ErrorInterceptor
from services.common.tls import NO_TLS, TlsFiles

MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # between Shoal's own services
MAX_PUBLIC_MESSAGE_BYTES = 16 * 1024 * 1024  # from clients of the gateway

# Each side of a session sends something at least this often, and a peer that is silent for the
# timeout is dead, even if TCP is up. A server beats faster while the session has work open, when
# its death would hold somebody up. Every message wakes a dozen threads of gRPC, so the slow beat is
# most of what an idle fleet costs.
HEARTBEAT_SECONDS = 2.0
PEER_TIMEOUT_SECONDS = 5.0
IDLE_HEARTBEAT_SECONDS = 6.0
IDLE_PEER_TIMEOUT_SECONDS = 15.0

# Between two frames of tokens or text on one session. No engine's steps come faster, but for tiny
# models on few streams; those merge, rather than cost a message a token at every hop.
FRAME_SECONDS = 0.001

# Calls of one connection to the gateway. Calls that ended while their client does not read
# count, so that such a client cannot pile them up; beyond, a connection's calls wait.
_MAX_PUBLIC_STREAMS = 4096

_KEEPALIVE_MS = 20_000
_MIN_PING_INTERVAL_MS = 10_000  # servers accept pings at twice the rate clients send them

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Two channels to one address (a restarted session) must not share a broken subchannel.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def server_options(*, public: bool) -> tuple[tuple[str, int], ...]:
    """Options of a listener; a public one takes smaller messages."""
    limit = MAX_PUBLIC_MESSAGE_BYTES if public else MAX_MESSAGE_BYTES
    streams = (("grpc.max_concurrent_streams", _MAX_PUBLIC_STREAMS),) if public else ()
    return (
        *streams,
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", limit),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    )


def open_channel(address: str, files: TlsFiles = NO_TLS) -> grpc.aio.Channel:
    """A channel to `host:port`, over TLS if there are files for it, or to `unix:/path`.

    Raises StartupError if the files cannot be read.
    """
    if not files or is_unix(address):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options: tuple[tuple[str, int | str], ...] = CHANNEL_OPTIONS
    if files.server_name:
        options += (("grpc.ssl_target_name_override", files.server_name),)
    return grpc.aio.secure_channel(address, tls.channel_credentials(files), options=options)


class Server:
    """A gRPC server with health, reflection and the error interceptor.

    Register servicers on `self.grpc`, then `await start(address)`. Health starts as
    NOT_SERVING for every service and for the server as a whole (""). `interceptors` see
    a call before it reaches a servicer and may raise ShoalErrors; `options` are added, or
    replace those of the same name.
    """

    def __init__(
        self,
        service_names: Iterable[str],
        *,
        public: bool = False,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        chosen = {**dict(server_options(public=public)), **dict(options)}
        self._shares_port = bool(chosen["grpc.so_reuseport"])
        self.grpc = grpc.aio.server(
            options=tuple(chosen.items()),
            interceptors=[ErrorInterceptor(), *interceptors],
        )
        self._names = ["", *service_names]
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            [*self._names[1:], health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc
        )

    async def start(
        self, address: str, files: TlsFiles = NO_TLS, *, flag: str = "--address"
    ) -> str:
        """Listens, over TLS if there are files for it, and returns the address with the
        real port.

        Raises StartupError if the address, which came from `flag`, is wrong or taken, or the
        files cannot be used.
        """
        require_free(address, flag, shared=self._shares_port)
        await self.set_serving(False)
        try:
            if files and not is_unix(address):
                port = self.grpc.add_secure_port(address, tls.server_credentials(files))
            else:
                port = self.grpc.add_insecure_port(address)
        except RuntimeError:
            raise StartupError(f"cannot listen on {address}; choose another with {flag}")
        await self.grpc.start()
        if address.startswith("unix:"):
            return address
        return f"{address.rpartition(':')[0]}:{port}"

    async def set_serving(self, serving: bool) -> None:
        """Publishes the instance's readiness at grpc.health.v1."""
        states = health_pb2.HealthCheckResponse.ServingStatus
        status = states.SERVING if serving else states.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        """Stops listening, gives calls `grace` seconds, then cancels them."""
        await self.grpc.stop(grace)


M = TypeVar("M", bound=Message)


class Outbox(Generic[M]):
    """What one side of a session will send next.

    Callers change `pending` and call `notify`; neither ever waits. `run` writes
    `pending` whole and starts a new one, so whatever is added while a write is in
    flight merges into the next message. After a while without news, a shorter one
    while `busy` says so, it writes an empty message, the heartbeat.

    A write ends long before its message is read, so a reader that cannot keep up would have
    a long row of messages before it. So there are `interval` seconds between the beginnings of
    two writes: news that come sooner wait that long at most, and merge.
    """

    def __init__(
        self,
        new: Callable[[], M],
        *,
        busy: Callable[[], bool] = lambda: False,
        interval: float = 0.0,
    ) -> None:
        self._new = new
        self._busy = busy
        self._interval = interval
        self.pending: M = new()
        self._dirty = False  # there are news
        self._waiter: asyncio.Future[None] | None = None  # the writer's, for them
        self._idle = asyncio.Event()
        self._idle.set()

    def notify(self) -> None:
        """Tells the writer that `pending` has something to send. Often called for each token."""
        if not self._dirty:
            self._dirty = True
            self._idle.clear()
            self._wake()

    async def flushed(self) -> None:
        """Returns once everything added so far has been written."""
        await self._idle.wait()

    async def run(self, write: Callable[[M], Awaitable[None]]) -> None:
        """Writes until `write` raises or the task is cancelled."""
        clock = asyncio.get_running_loop().time
        next_at = 0.0
        while True:
            if not self._dirty and await self._is_silent():
                await write(self._new())
                continue
            if (early := next_at - clock()) > 0:
                await asyncio.sleep(early)
            next_at = clock() + self._interval
            self._dirty = False
            await write(self._take())
            if not self._dirty:
                self._idle.set()

    def _take(self) -> M:
        """What is pending, whole; a new message takes its place."""
        message, self.pending = self.pending, self._new()
        return message

    async def _is_silent(self) -> bool:
        """Waits for news; True when a heartbeat is due first.

        One that becomes busy while it waits beats as a busy one from then on: the other
        side's patience is shorter from that moment.
        """
        silence = 0.0
        while silence < IDLE_HEARTBEAT_SECONDS:
            pause = min(HEARTBEAT_SECONDS, IDLE_HEARTBEAT_SECONDS - silence)
            await self._wait(pause)
            if self._dirty:
                return False
            silence += pause
            if self._busy():
                return True
        return True

    async def _wait(self, seconds: float) -> None:
        """Returns at the next news, or after so many seconds."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(seconds, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
