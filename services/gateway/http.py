"""The REST front end: routes, and the way from a request to its answer.

`build_app` makes the ASGI application over any `Gateway`. What bodies mean and
what answers look like is in `services.gateway.openai`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services import __version__
from services.common.admin import metrics_response
from services.common.errors import (
    InternalError,
    InvalidRequest,
    ShoalError,
)
from services.gateway.asgi import (
    BodyLimits,
    RequestIds,
    RequireKey,
    read_body,
    while_connected,
    with_cors,
)
from services.gateway.config import GatewayConfig
from services.gateway.domain import Gateway, Readiness
from services.gateway.keys import KeyRing
from services.gateway.openai import models
from services.gateway.openai.answer import Job, collect
from services.gateway.openai.chat import parse_chat
from services.gateway.openai.completions import parse_completion
from services.gateway.openai.decode import Caller
from services.gateway.openai.errors import envelope, error_response, http_error_response
from services.gateway.openai.fanout import start_all
from services.gateway.openai.generate import parse_generate
from services.gateway.sse import KEEPALIVE_SECONDS, EventStream, json_event

log = logging.getLogger(__name__)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def build_app(
    gateway: Gateway,
    config: GatewayConfig,
    registry: CollectorRegistry,
    keys: KeyRing | None = None,
    *,
    keepalive: float = KEEPALIVE_SECONDS,
) -> ASGIApp:
    """The application; `keepalive` is how long a stream may be silent, in seconds."""
    limits = BodyLimits(config.max_body_bytes, config.max_json_depth)

    def generating(path: str, parse: Callable[[bytes, Caller], Job]) -> Route:
        endpoint = GenerationEndpoint(gateway, parse, limits, keepalive)
        return Route(path, endpoint, methods=["POST"])

    def parse_prompts(raw: bytes, caller: Caller) -> Job:
        return parse_completion(raw, caller, max_choices=config.max_requests)

    app = Starlette(
        routes=[
            generating("/v1/chat/completions", parse_chat),
            generating("/v1/completions", parse_prompts),
            generating("/generate", parse_generate),
            *_model_routes(gateway, limits),
            *_operator_routes(gateway, config, registry),
        ],
        exception_handlers={
            ShoalError: _on_shoal_error,
            HTTPException: _on_http_error,
            Exception: _on_fault,
        },
    )
    app.router.redirect_slashes = False
    guarded = RequireKey(app, KeyRing() if keys is None else keys)
    # Outside Starlette's own handlers, whose answers need ids too.
    return RequestIds(with_cors(guarded, config.cors_origins))


class GenerationEndpoint:
    """One endpoint that generates: reads, parses, starts, and streams or collects."""

    def __init__(
        self,
        gateway: Gateway,
        parse: Callable[[bytes, Caller], Job],
        limits: BodyLimits,
        keepalive: float,
    ) -> None:
        self._gateway = gateway
        self._parse = parse
        self._limits = limits
        self._keepalive = keepalive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(scope, receive, self._limits)
        job = self._parse(raw, caller_of(scope))
        stream = EventStream(send, keepalive=self._keepalive)
        error = await while_connected(
            receive,
            self._serve(job, stream, scope, receive, send),
            until_tick=stream.until_keepalive,
            tick=stream.keep_alive,
        )
        if error is None:
            return
        if not isinstance(error, ShoalError):
            _log_fault(scope, error)
            error = InternalError("internal error")
        if not stream.started:
            raise error  # the application's handlers answer with a status
        # As vLLM: the error as an event, no finish_reason, and [DONE], so that clients
        # which wait for it do not hang on a connection that a proxy keeps open.
        await stream.end(json_event(envelope(error)))

    async def _serve(
        self, job: Job, stream: EventStream, scope: Scope, receive: Receive, send: Send
    ) -> None:
        generation = await start_all(self._gateway, job.requests)
        try:
            answer = job.answer(self._gateway, generation)
            choices = []
            if job.stream:
                await stream.start()
                async for chunk in generation:
                    events = await answer.events(chunk)
                    if events:
                        await stream.write(events)
            else:
                choices = await collect(generation)
        finally:
            await generation.aclose()
        # Given up before the last byte: after it the client counts as gone.
        if job.stream:
            await stream.end(answer.last_events(generation.usage))
        else:
            body = await answer.body(choices, generation.usage)
            await Response(body, media_type="application/json")(scope, receive, send)


def caller_of(scope: Scope) -> Caller:
    """What the headers say.

    Raises:
        InvalidRequest: if X-Request-Timeout is no number of seconds.
    """
    headers = Headers(scope=scope)
    timeout = headers.get("x-request-timeout")
    traceparent = headers.get("traceparent", "")
    return Caller(
        request_id=scope["state"]["request_id"],
        timeout=None if timeout is None else _seconds(timeout),
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        tenant=scope["state"].get("tenant", ""),
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidRequest(
            "the header X-Request-Timeout must be a number of seconds above 0", param="timeout"
        )
    return seconds


def _model_routes(gateway: Gateway, limits: BodyLimits) -> list[Route]:
    """Models and the tokenizer: short calls with JSON answers."""

    async def list_models(request: Request) -> Response:
        return _json(models.model_list(gateway))

    async def get_model(request: Request) -> Response:
        return _json(models.model_by_id(gateway, request.path_params["id"]))

    def posted(call: Callable[[Gateway, bytes], Awaitable[dict[str, Any]]]) -> Any:
        async def endpoint(request: Request) -> Response:
            raw = await read_body(request.scope, request.receive, limits)
            return _json(await call(gateway, raw))

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
        return metrics_response(registry)

    async def server_info(request: Request) -> Response:
        limits = {
            name: getattr(config, name)
            for name in ("max_body_bytes", "max_buffer_bytes", "max_requests")
        }
        served = models.model_list(gateway)["data"]
        return _json({"version": __version__, "models": served, "limits": limits})

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


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _on_shoal_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ShoalError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return http_error_response(request.method, request.url.path, error)


async def _on_fault(request: Request, error: Exception) -> Response:
    _log_fault(request.scope, error)
    return error_response(InternalError("internal error"))


def _log_fault(scope: Scope, error: BaseException) -> None:
    log.error(
        "fault in %s %s",
        scope["method"],
        scope["path"],
        exc_info=error,
        extra={"request_id": scope["state"]["request_id"]},
    )
