"""The gateway's own spans: one for each call, one for each generation inside it.

    POST /v1/chat/completions  (server), or shoal.v1.Inference/Chat
      chat MODEL               (from arrival to the last token)
        encode, queue, prefill, decode, detokenize: by the services that do them

Attributes are those of OpenTelemetry's conventions for generative AI, and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import grpc
from msgspec.structs import replace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common import logs
from services.common.errors import STATUSES, ShoalError
from services.common.tracing import Span, TraceContext, Tracing, parse_trace
from services.gateway.asgi import header, headers
from services.gateway.domain import ChatPrompt, FinishReason, GenerationRequest, Usage

# With these the server is at fault, by OpenTelemetry's conventions; a client's mistake is none.
_FAILURES = frozenset(
    {
        *(grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL),
        *(grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE),
    }
)


def begin(tracing: Tracing, request: GenerationRequest) -> tuple[Span, GenerationRequest]:
    """A generation's span, and the request as the other services shall see it: a part of it."""
    if not tracing.enabled:
        return tracing.start("", request.trace), request
    operation = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
    sampling = request.sampling
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "shoal",
        "gen_ai.request.model": request.model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": request.n,
        "shoal.request_id": request.request_id,
        "shoal.tenant": request.tenant,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    name = f"{operation} {request.model}".strip()
    span = tracing.start(name, request.trace, attributes=attributes)
    context = span.context
    return span, replace(request, traceparent=context.traceparent, tracestate=context.tracestate)


def finish(
    span: Span, usage: Usage, reasons: Sequence[FinishReason], num_resumes: int, error: str
) -> None:
    """Ends a generation's span with what became of it."""
    span.set(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.finish_reasons": list(reasons),
            "shoal.resumes": num_resumes,
        }
    )
    span.end(error)


@contextmanager
def rpc_call(tracing: Tracing, method: str, trace: TraceContext) -> Iterator[TraceContext]:
    """A server span around a call of shoal.v1.Inference; yields what is a part of it.

    In a session each generation counts as a call.
    """
    attributes = {
        "rpc.system": "grpc",
        "rpc.service": "shoal.v1.Inference",
        "rpc.method": method,
    }
    name = f"shoal.v1.Inference/{method}"
    span = tracing.start(name, trace, kind="server", attributes=attributes)
    logs.bind(trace_id=span.context.trace_id)
    status = grpc.StatusCode.UNKNOWN
    try:
        yield span.context
        status = grpc.StatusCode.OK
    except ShoalError as error:
        status = STATUSES[error.code].grpc
        raise
    except asyncio.CancelledError:
        status = grpc.StatusCode.CANCELLED
        raise
    finally:
        span.set({"rpc.grpc.status_code": status.value[0]})
        span.end(status.name.lower() if status in _FAILURES else "")


def trace_of(scope: Scope) -> TraceContext:
    """What an HTTP request is part of: its own span, else what its headers say."""
    found: TraceContext | None = scope["state"].get("trace")
    if found is not None:
        return found
    # Several tracestate headers are one list, as the W3C says.
    state = ",".join(headers(scope, b"tracestate"))
    return parse_trace(header(scope, b"traceparent") or "", state)


class TraceCalls:
    """Middleware: a server span for each call of some paths."""

    def __init__(self, app: ASGIApp, tracing: Tracing, paths: Collection[str]) -> None:
        self._app = app
        self._tracing = tracing
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        span = self._tracing.start(
            f"{scope['method']} {scope['path']}",
            trace_of(scope),
            kind="server",
            attributes={
                "http.request.method": scope["method"],
                "http.route": scope["path"],
                "url.scheme": scope["scheme"],
            },
        )
        scope["state"]["trace"] = span.context
        logs.bind(trace_id=span.context.trace_id)
        error = "cancelled"

        async def watched_send(message: Message) -> None:
            nonlocal error
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set({"http.response.status_code": status})
                error = f"status {status}" if status >= 500 else ""
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            span.end(error)
