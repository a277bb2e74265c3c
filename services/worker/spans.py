"""What the agent tells a trace of each request: its time in the queue, in prefill, in decode.

The times are those at which frames of the engine arrived; a rank knows nothing of traces.
A request that goes on at another worker has spans of both, in one trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from protos import common_pb2, worker_pb2
from services.common.tracing import TraceContext, Tracing

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(slots=True)
class _Phase:
    """What a request is doing now, and since when."""

    parent: TraceContext
    request_id: str
    num_prompt: int
    since: int  # ns
    name: str = "queue"
    cached_tokens: int = 0
    num_output: int = 0


class RequestSpans:
    """The requests of the engine, by its handles. With tracing off it keeps nothing."""

    def __init__(self, tracing: Tracing, clock: Callable[[], int] = time.time_ns) -> None:
        self._tracing = tracing
        self._clock = clock
        self._phases: dict[int, _Phase] = {}

    def submitted(self, handle: int, submit: worker_pb2.Submit) -> None:
        if self._tracing.enabled:
            self._phases[handle] = _Phase(
                TraceContext(submit.traceparent, submit.tracestate),
                submit.request_id,
                len(submit.prompt_ids) + len(submit.resume_ids),
                self._clock(),
            )

    def stepped(self, frame: worker_pb2.StepFrame) -> None:
        """Takes in a frame, its rows still under the engine's handles."""
        if not self._phases:
            return
        for started in frame.started:
            if phase := self._phases.get(started.handle):
                phase.cached_tokens = started.cached_tokens
                self._next(phase, "prefill")
        for handle, count in zip(frame.handles, frame.counts, strict=True):
            if count and (phase := self._phases.get(handle)):
                if phase.name != "decode":
                    self._next(phase, "decode")
                phase.num_output += count

    def finished(self, handle: int, reason: common_pb2.FinishReason.ValueType) -> None:
        if phase := self._phases.pop(handle, None):
            self._record(phase, finish_reason=_REASONS.get(reason, "abort"))

    def forget(self, handle: int) -> None:
        """The request left without a finish: refused, failed, or handed back."""
        if phase := self._phases.pop(handle, None):
            self._record(phase, error="not finished here")

    def _next(self, phase: _Phase, name: str) -> None:
        self._record(phase)
        phase.name, phase.since = name, self._clock()

    def _record(self, phase: _Phase, finish_reason: str = "", error: str = "") -> None:
        attributes: dict[str, str | int] = {
            "shoal.request_id": phase.request_id,
            "gen_ai.usage.input_tokens": phase.num_prompt,
        }
        if phase.name != "queue":
            attributes["gen_ai.usage.cache_read.input_tokens"] = phase.cached_tokens
        if phase.name == "decode":
            attributes["gen_ai.usage.output_tokens"] = phase.num_output
        if finish_reason:
            attributes["shoal.finish_reason"] = finish_reason
        self._tracing.record(
            phase.name, phase.parent, phase.since, self._clock(), attributes, error
        )
