"""What a local fleet tells Prometheus: where every service's metrics are, and the metrics.

Services on one machine listen on unix sockets, which Prometheus does not read. So the
supervisor passes their `/metrics` on, and lists them for `http_sd_configs`:

    GET /targets                   one target a service, as the Prometheus of its HTTP discovery
    GET /services/NAME/metrics     that service's own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from services.common.admin import build_app
from services.common.metrics import process_registry
from services.fleet.probes import admin_client
from services.fleet.run_dir import ProcessInfo


class Fleet(Protocol):
    """What there is to tell."""

    @property
    def processes(self) -> Sequence[ProcessInfo]: ...


def fleet_app(fleet: Fleet) -> Starlette:
    """The fleet's admin application. Make it inside a running loop."""

    async def targets(request: Request) -> Response:
        host = request.url.netloc
        return JSONResponse([_target(process, host) for process in fleet.processes])

    async def metrics(request: Request) -> Response:
        wanted = [p for p in fleet.processes if p.name == request.path_params["name"]]
        if not wanted:
            return PlainTextResponse("no such service\n", 404)
        return await _fetch(wanted[0].admin_address)

    def ready() -> bool:
        processes = fleet.processes  # none while it starts
        return bool(processes) and all(process.state == "ready" for process in processes)

    return build_app(
        process_registry(),
        ready,
        alive=lambda: True,
        more=[Route("/targets", targets), Route("/services/{name}/metrics", metrics)],
    )


def _target(process: ProcessInfo, host: str) -> dict[str, object]:
    labels = {
        "__metrics_path__": f"/services/{process.name}/metrics",
        "instance": process.name,
        "component": process.role,
    }
    return {"targets": [host], "labels": labels}


async def _fetch(address: str) -> Response:
    """A service's metrics as they are; 503 while it is away, so that its target is down."""
    try:
        async with admin_client(address) as client:
            answer = await client.get("/metrics")
    except httpx.TransportError as error:
        return PlainTextResponse(f"{type(error).__name__}\n", 503)
    return Response(answer.content, answer.status_code, media_type=answer.headers["content-type"])
