"""W3C trace context, and spans that exist only where an operator asked for them.

With no endpoint configured everything here passes the client's own context on and does
nothing else; OpenTelemetry is not even imported. With one, `services.common.otel` sends
spans there. Spans carry names, counts and times, never a prompt's or an answer's text.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from services.common.config import option
from services.common.errors import StartupError

Kind = Literal["server", "internal"]
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True)
class TracingOptions:
    """The flag of every service. Configs borrow it."""

    otlp_endpoint: str = option(
        "",
        "OTLP collector that gets traces over gRPC, as http://host:4317; default: what"
        " OTEL_EXPORTER_OTLP_ENDPOINT says, or no tracing",
        group="observability",
        metavar="URL",
    )


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Which span work belongs to, as the W3C writes it; empty means none."""

    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]


NO_TRACE = TraceContext()


def parse_trace(traceparent: str, tracestate: str = "") -> TraceContext:
    """The context in a client's headers; what is malformed is none, as the W3C says."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if not match or traceparent.startswith("ff") or not all(map(_is_not_zero, match.groups())):
        return NO_TRACE
    return TraceContext(traceparent, tracestate if _TRACESTATE.fullmatch(tracestate) else "")


def _is_not_zero(text: str) -> bool:
    return text.strip("0") != ""


class Span(Protocol):
    """Work that goes on."""

    @property
    def context(self) -> TraceContext:
        """The parent of whatever is done for this work, here or elsewhere."""
        ...

    def set(self, attributes: Attributes) -> None: ...
    def end(self, error: str = "") -> None:
        """The work is over; with an error, failed. Only the first call counts."""
        ...


class Tracing(Protocol):
    """Where spans go."""

    enabled: bool

    def start(
        self,
        name: str,
        parent: TraceContext,
        *,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
    ) -> Span:
        """Begins a span now; without a parent, a new trace."""
        ...

    def record(
        self,
        name: str,
        parent: TraceContext,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        """Tells of work that is over; times are those of `time.time_ns`."""
        ...

    def close(self) -> None:
        """Sends what is left, within seconds. May block."""
        ...


class _Passing:
    """A span that is none: what is done belongs to the client's own."""

    def __init__(self, context: TraceContext) -> None:
        self.context = context

    def set(self, attributes: Attributes) -> None:
        """Nobody reads it."""

    def end(self, error: str = "") -> None:
        """Nobody reads it."""


class NoTracing:
    """Spans go nowhere."""

    enabled = False

    def start(
        self,
        name: str,
        parent: TraceContext,
        *,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
    ) -> Span:
        return _Passing(parent)

    def record(
        self,
        name: str,
        parent: TraceContext,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        """Nobody reads it."""

    def close(self) -> None:
        """Nothing is left."""


@asynccontextmanager
async def tracing_to(service: str, endpoint: str) -> AsyncIterator[Tracing]:
    """`open_tracing` for the life of a process; what is left is sent at its end."""
    tracing = open_tracing(service, endpoint)
    try:
        yield tracing
    finally:
        if tracing.enabled:
            await asyncio.to_thread(tracing.close)


def open_tracing(service: str, endpoint: str) -> Tracing:
    """Tracing to an OTLP endpoint, or to that of OpenTelemetry's own variables, if any.

    Raises StartupError if OpenTelemetry is asked for and not installed.
    """
    wanted = endpoint or any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    if not wanted or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return NoTracing()
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise StartupError(f"--otlp-endpoint {endpoint!r} does not begin with http:// or https://")
    try:
        from services.common.otel import OtelTracing
    except ModuleNotFoundError as error:
        raise StartupError(f"tracing needs {error.name}; install with: pip install 'shoal[otel]'")
    return OtelTracing(service, endpoint)
