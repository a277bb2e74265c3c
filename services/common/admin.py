"""The small HTTP side of a gRPC service: /livez, /readyz and /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from services.common.errors import StartupError


def metrics_response(registry: CollectorRegistry) -> Response:
    """The registry in Prometheus' text format."""
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def build_app(
    registry: CollectorRegistry, ready: Callable[[], bool], alive: Callable[[], bool]
) -> Starlette:
    """The admin application; `ready` and `alive` are asked on every probe."""

    def answer(value: bool) -> Response:
        return PlainTextResponse("ok\n" if value else "not ready\n", 200 if value else 503)

    async def livez(request: Request) -> Response:
        return answer(alive())

    async def readyz(request: Request) -> Response:
        return answer(ready())

    async def metrics(request: Request) -> Response:
        return metrics_response(registry)

    return Starlette(
        routes=[Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", metrics)]
    )


@asynccontextmanager
async def serve_admin(address: str, app: Starlette) -> AsyncIterator[None]:
    """Serves the admin application on `host:port` or `unix:/path`; empty means not at all."""
    if not address:
        yield
        return
    if address.startswith("unix:"):
        config = uvicorn.Config(app, uds=address.removeprefix("unix:"), log_config=None)
    else:
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise StartupError(f"--admin-address {address!r} is not host:port or unix:/path")
        config = uvicorn.Config(app, host=host.strip("[]"), port=int(port), log_config=None)
    server = EmbeddedServer(config)
    task = asyncio.create_task(server.serve())
    try:
        yield
    finally:
        server.should_exit = True
        await task


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server inside a process that handles its own signals."""

    def install_signal_handlers(self) -> None:
        """Leaves signals to `services.common.process`."""

    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Leaves signals to `services.common.process`."""
        import contextlib

        return contextlib.nullcontext()
