"""The REST front end: its routes.

`build_app` makes the ASGI application over any `Gateway`. What bodies mean and
what answers look like is in `services.gateway.openai`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services import __version__
from services.common.admin import metrics_response
from services.common.errors import (
    InternalError,
    ShoalError,
)
from services.common.tracing import Tracing
from services.gateway.asgi import (
    BodyLimits,
    RequestIds,
    RequireKey,
    read_body,
    with_cors,
)
from services.gateway.config import GatewayConfig
from services.gateway.docs.routes import docs_routes
from services.gateway.domain import Gateway, Readiness
from services.gateway.generating import GenerationEndpoint, log_fault
from services.gateway.keys import KeyRing
from services.gateway.openai import models
from services.gateway.openai.answer import Parse
from services.gateway.openai.chat import parse_chat
from services.gateway.openai.completions import parse_completion
from services.gateway.openai.errors import error_response, http_error_response
from services.gateway.openai.generate import parse_generate
from services.gateway.openai.responses.request import parse_response
from services.gateway.spans import TraceCalls
from services.gateway.sse import KEEPALIVE_SECONDS
from services.gateway.watch.routes import Watched, watch_routes
from services.gateway.web.routes import page_routes


def build_app(
    gateway: Gateway,
    config: GatewayConfig,
    registry: CollectorRegistry,
    keys: KeyRing | None = None,
    tracing: Tracing | None = None,
    *,
    keepalive: float = KEEPALIVE_SECONDS,
    watched: Watched | None = None,
) -> ASGIApp:
    """The application; `keepalive` is how long a stream may be silent, in seconds, and
    `watched` what `/fleet` shows: without it there is none."""
    routes = build_routes(gateway, config, registry, keepalive, watched)
    if config.web == "on":
        routes += page_routes()
    app = Starlette(
        routes=routes,
        exception_handlers={
            ShoalError: _on_shoal_error,
            HTTPException: _on_http_error,
            Exception: _on_fault,
        },
    )
    app.router.redirect_slashes = False
    called_directly = _Generating(app, routes)
    guarded: ASGIApp = RequireKey(called_directly, KeyRing() if keys is None else keys)
    if tracing is not None and tracing.enabled:
        called = [route.path for route in app.routes if isinstance(route, Route)]
        paths = [path for path in called if path.startswith("/v1/") or path == "/generate"]
        guarded = TraceCalls(guarded, tracing, paths)
    # Outside Starlette's own handlers, whose answers need ids too.
    return RequestIds(with_cors(guarded, config.cors_origins))


class _Generating:
    """Calls the endpoints that generate past Starlette, whose layers each cost a request's time."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._endpoints = {
            route.path: route.endpoint
            for route in routes
            if isinstance(route.endpoint, GenerationEndpoint)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            await endpoint(scope, receive, send)
        except ShoalError as error:  # before the first byte of an answer
            await error_response(error)(scope, receive, send)


def build_routes(
    gateway: Gateway,
    config: GatewayConfig,
    registry: CollectorRegistry,
    keepalive: float,
    watched: Watched | None = None,
) -> list[Route]:
    """Every route of the API; `services.gateway.docs.operations` describes them."""
    limits = BodyLimits(config.max_body_bytes, config.max_json_depth)

    def generating(path: str, parse: Parse) -> Route:
        endpoint = GenerationEndpoint(gateway, parse, limits, keepalive)
        return Route(path, endpoint, methods=["POST"])

    parse_prompts = partial(parse_completion, max_choices=config.max_requests)
    stored = Route(
        "/v1/responses/{id:path}", _no_stored_response, methods=["GET", "DELETE", "POST"]
    )
    return [
        generating("/v1/chat/completions", parse_chat),
        generating("/v1/completions", parse_prompts),
        generating("/v1/responses", parse_response),
        stored,
        generating("/generate", parse_generate),
        *_model_routes(gateway, limits),
        *_operator_routes(gateway, config, registry),
        *([] if watched is None else watch_routes(watched, limits, keepalive)),
        *docs_routes(),
    ]


def _model_routes(gateway: Gateway, limits: BodyLimits) -> list[Route]:
    """Models and the tokenizer: short calls with JSON answers."""

    async def list_models(request: Request) -> Response:
        return _json(models.model_list(gateway))

    async def get_model(request: Request) -> Response:
        if not request.path_params["id"]:  # which elsewhere means the only model
            raise HTTPException(404)
        return _json(models.model_by_id(gateway, request.path_params["id"]))

    def posted(call: Callable[[Gateway, bytes], Awaitable[bytes]]) -> Any:
        async def endpoint(request: Request) -> Response:
            raw = await read_body(request.scope, request.receive, limits)
            return Response(await call(gateway, raw), media_type="application/json")

        return endpoint

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{id:path}", get_model),
        Route("/tokenize", posted(models.tokenize), methods=["POST"]),
        Route("/detokenize", posted(models.detokenize), methods=["POST"]),
    ]


def probe_routes(gateway: Gateway) -> tuple[Route, Route]:
    """/livez and /readyz, the latter of the whole path, or with ?scope=gateway of itself."""

    async def livez(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        readiness = gateway.readiness()
        if request.query_params.get("scope") == "gateway":
            readiness = Readiness(not readiness.draining, ("draining",))
        if readiness.ready:
            return PlainTextResponse("ok\n")
        return PlainTextResponse(f"not ready: {', '.join(readiness.reasons)}\n", 503)

    return Route("/livez", livez), Route("/readyz", readyz)


def _operator_routes(
    gateway: Gateway, config: GatewayConfig, registry: CollectorRegistry
) -> list[Route]:
    """Probes, metrics, and what the people who run it ask for."""
    livez, readyz = probe_routes(gateway)

    async def metrics(request: Request) -> Response:
        if config.reuse_port:
            return PlainTextResponse(
                "several gateways share this port; each has its metrics at its --admin-address\n",
                404,
            )
        return metrics_response(registry)

    async def server_info(request: Request) -> Response:
        limits = {
            name: getattr(config, name)
            for name in ("max_body_bytes", "max_buffer_bytes", "max_requests")
        }
        served = models.model_list(gateway)["data"]
        quantizations = {card.id: card.quantizations for card in gateway.models()}
        return _json(
            {
                "version": __version__,
                "models": served,
                "quantizations": quantizations,
                "limits": limits,
            }
        )

    async def flush_cache(request: Request) -> Response:
        await gateway.flush_cache()
        return _json({"success": True})

    return [
        livez,
        readyz,
        Route("/health", readyz.endpoint),
        Route("/metrics", metrics),
        Route("/server_info", server_info),
        Route("/flush_cache", flush_cache, methods=["POST"]),
    ]


async def _no_stored_response(request: Request) -> Response:
    raise HTTPException(404, "This server keeps no responses, so there is none to be found")


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _on_shoal_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ShoalError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return http_error_response(request.method, request.url.path, error)


async def _on_fault(request: Request, error: Exception) -> Response:
    log_fault(request.scope, error)
    return error_response(InternalError("internal error"))
