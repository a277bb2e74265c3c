"""Spans through OpenTelemetry's SDK, sent in batches by a thread of its own.

Imported only where tracing is on. The SDK's own variables hold: OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_*.
"""

from __future__ import annotations

import os
import threading

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelApiSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services import __version__
from services.common.tracing import Attributes, Kind, Span, TraceContext

_KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
_EXPORT_SECONDS = 5  # for one batch
_CLOSE_SECONDS = 2.0  # for what is left at the end, which a collector that is away may not hold up
_W3C = TraceContextTextMapPropagator()


class OtelTracing:
    """Sends spans to an OTLP endpoint; a collector that is away costs spans, no request."""

    enabled = True

    def __init__(self, service: str, endpoint: str) -> None:
        """An empty endpoint leaves it to OpenTelemetry's variables."""
        # The environment's name and attributes win.
        named = os.environ.get("OTEL_SERVICE_NAME") or f"shoal-{service}"
        resource = Resource.create({SERVICE_NAME: named, SERVICE_VERSION: __version__})
        self._exporter = OTLPSpanExporter(endpoint=endpoint or None, timeout=_EXPORT_SECONDS)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("shoal", __version__)

    def start(
        self,
        name: str,
        parent: TraceContext,
        *,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
    ) -> Span:
        span = self._tracer.start_span(
            name, context=_context(parent), kind=_KINDS[kind], attributes=attributes
        )
        return OtelSpan(span)

    def record(
        self,
        name: str,
        parent: TraceContext,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        span = self._tracer.start_span(
            name, context=_context(parent), attributes=attributes, start_time=start_ns
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=max(start_ns, end_ns))

    def close(self) -> None:
        giving_up = threading.Timer(_CLOSE_SECONDS, self._exporter.shutdown)
        giving_up.start()
        self._provider.shutdown()
        giving_up.cancel()


class OtelSpan:
    """A span of OpenTelemetry in our words."""

    def __init__(self, span: OtelApiSpan) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(span, Context()))
        self.context = TraceContext(carrier["traceparent"], carrier.get("tracestate", ""))

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, error: str = "") -> None:
        if not self._span.is_recording():
            return
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


def _context(parent: TraceContext) -> Context:
    if not parent.traceparent:
        return Context()
    carrier = {"traceparent": parent.traceparent, "tracestate": parent.tracestate}
    return _W3C.extract(carrier, Context())
