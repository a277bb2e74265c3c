"""An OTLP collector that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)


@dataclass(frozen=True)
class SpanSeen:
    """A span as it came, with the name of the service that sent it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    failed: bool
    attributes: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port at `endpoint`, from entering to leaving."""

    def __init__(self) -> None:
        self.spans: list[SpanSeen] = []
        self.raw = b""
        self._news = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: Any, context: Any) -> Any:
        with self._news:
            self.raw += request.SerializeToString()
            for group in request.resource_spans:
                service = _attributes(group.resource.attributes)["service.name"]
                for scope in group.scope_spans:
                    self.spans += [_seen(service, span) for span in scope.spans]
            self._news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, check: Callable[[list[SpanSeen]], bool]) -> list[SpanSeen]:
        """All spans, once they pass the check."""
        with self._news:
            done = self._news.wait_for(lambda: check(self.spans), timeout=60)
            assert done, [(span.service, span.name) for span in self.spans]
            return list(self.spans)

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(0).wait()


def _seen(service: str, span: Any) -> SpanSeen:
    return SpanSeen(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        _attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
