"""The small HTTP side of a service: /livez, /readyz, /metrics and /loglevel.

It is for those who run the service, plain and without keys, so it may tell no secret. What
changes the service is taken from this machine alone: a unix socket or the loopback address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from email.utils import formatdate

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.server import ServerState

from services.common import logs
from services.common.listening import cannot_listen, require_free, split_address

_FLAG = "--admin-address"


def metrics_response(registry: CollectorRegistry) -> Response:
    """The registry in Prometheus' text format."""
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def build_app(
    registry: CollectorRegistry,
    ready: Callable[[], bool],
    alive: Callable[[], bool],
    *,
    probes: Sequence[Route] | None = None,
    more: Sequence[Route] = (),
    on_level: Callable[[str], None] = lambda level: None,
) -> Starlette:
    """The admin application; `ready` and `alive` are asked on every probe.

    `probes` replace the routes that ask them; `more` are a service's own. `on_level` is told
    of a new level of the log, which this process shows by then.
    """

    def answer(value: bool) -> Response:
        return PlainTextResponse("ok\n" if value else "not ready\n", 200 if value else 503)

    async def livez(request: Request) -> Response:
        return answer(alive())

    async def readyz(request: Request) -> Response:
        return answer(ready())

    async def metrics(request: Request) -> Response:
        return metrics_response(registry)

    async def level(request: Request) -> Response:
        return _tell_level() if request.method == "GET" else _change_level(request, on_level)

    own_probes = [Route("/livez", livez), Route("/readyz", readyz)]
    return Starlette(
        routes=[
            *(own_probes if probes is None else probes),
            Route("/metrics", metrics),
            Route("/loglevel", level, methods=["GET", "POST"]),
            *more,
        ]
    )


def _tell_level() -> Response:
    return PlainTextResponse(f"{logs.current_level()}\n")


def _change_level(request: Request, on_level: Callable[[str], None]) -> Response:
    """Obeys ?level= until the process ends."""
    if not _is_local(request):
        return PlainTextResponse("only this machine may change the level\n", 403)
    level = request.query_params.get("level", "")
    if level not in logs.LEVELS:
        return PlainTextResponse(f"say ?level= and one of {', '.join(logs.LEVELS)}\n", 400)
    logs.change_level(level)
    on_level(level)
    return PlainTextResponse(f"{level}\n")


def _is_local(request: Request) -> bool:
    """From a unix socket, or from the loopback address."""
    if request.client is None or not request.client.host:
        return True
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


@asynccontextmanager
async def serve_admin(address: str, app: Starlette) -> AsyncIterator[str]:
    """Serves the admin application on `host:port` or `unix:/path`; empty means not at all.

    Yields the address with the real port.

    Raises:
        StartupError: the address is wrong or taken.
    """
    if not address:
        yield ""
        return
    listener = _listen(address)
    server = EmbeddedServer(uvicorn.Config(app, log_config=None))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield _real(address, listener)
    finally:
        server.should_exit = True
        await task
        listener.close()


def _real(address: str, listener: socket.socket) -> str:
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"


def _listen(address: str) -> socket.socket:
    """A listening socket; a stale unix socket is replaced."""
    require_free(address, _FLAG)
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        with suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        return listener
    host, port = split_address(address, _FLAG)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:  # another was quicker
        raise cannot_listen(host, port, error, _FLAG) from error


class _DatedState(ServerState):
    """Makes the Date header when a response needs it; uvicorn makes it by the clock."""

    _second = 0
    _headers: list[tuple[bytes, bytes]]

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every response."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._headers = [(b"date", formatdate(second, usegmt=True).encode())]
        return self._headers

    @default_headers.setter
    def default_headers(self, value: list[tuple[bytes, bytes]]) -> None:
        """uvicorn's own value is not needed."""


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server inside a process that handles its own signals, at rest when idle."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._exit = asyncio.Event()
        super().__init__(config)
        self.server_state = _DatedState()

    @property
    def should_exit(self) -> bool:
        """Set it to have the server stop."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()

    def stop_listening(self) -> None:
        """Takes no new connections; those that are open go on."""
        for server in self.servers:
            server.close()

    async def main_loop(self) -> None:
        """Waits; uvicorn's own loop ticks ten times a second."""
        await self._exit.wait()

    def install_signal_handlers(self) -> None:
        """Leaves signals to `services.common.process`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `services.common.process`."""
        yield
