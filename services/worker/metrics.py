"""What the worker tells Prometheus: the `vllm:*` names and `shoal_worker_*`.

Counters and gauges are the engine's own (`services.worker.engine_series`). Histograms are
observed per request, and per step for a bounded sample of requests. This module keeps
times by engine handle and knows nothing of sessions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from protos import common_pb2, engine_pb2, worker_pb2
from services.worker.engine_series import LABELS, EngineSeries

# Gaps between tokens are observed for this many requests at a time, all of their gaps:
# a row per step for each of 256 requests would cost more than the step's wire.
MAX_SAMPLED = 8

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
_BETWEEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_WHOLE = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# Fine around two steps + 50 ms, the promise, for steps of up to 100 ms.
_ABORT = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.125),
    *(0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10),
)

_LENGTHS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
    *(10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000),
)


@dataclass(slots=True)
class _Life:
    """When what happened to a request, and how long it is, in tokens."""

    submitted: float
    num_prompt: int
    num_resumed: int  # of its output, from another worker
    started: float | None = None
    first_token: float | None = None
    aborted: float | None = None


class WorkerMetrics:
    """The worker's metrics in `registry`; series appear once the model is loaded."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.info: worker_pb2.WorkerInfo | None = None
        self.load = worker_pb2.Load()
        self.stats = engine_pb2.EngineStats()
        self.num_sessions = 0
        self._model = ""
        self._clock = clock
        self._step = 0
        self._lives: dict[int, _Life] = {}  # by handle
        self._without_token: set[int] = set()
        self._sampled: dict[int, float] = {}  # handle -> its last token
        self._finished = Counter(
            "vllm:request_success",
            "Requests that ended.",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        self._handed_back = Counter(
            "shoal_worker_handed_back",
            "Requests that were handed back unfinished, as the worker drained.",
            LABELS,
            registry=registry,
        )
        self._make_histograms(registry)
        registry.register(EngineSeries(self))

    def _make_histograms(self, registry: CollectorRegistry) -> None:
        self._histograms: list[Histogram] = []

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(name, text, LABELS, buckets=tuple(buckets), registry=registry)
            self._histograms.append(made)
            return made

        self._first_token = histogram(
            "vllm:time_to_first_token_seconds",
            "From submission to the first token; of a resumed request to its next.",
            _FIRST_TOKEN,
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds",
            f"Between tokens of one request, for {MAX_SAMPLED} requests at a time.",
            _BETWEEN,
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "From submission to the last token.", _WHOLE
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From submission to the first batch.", _WHOLE
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From the first batch to the first token.", _WHOLE
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _WHOLE
        )
        self._prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of the requests that ended.", _LENGTHS
        )
        self._output_tokens = histogram(
            "vllm:request_generation_tokens",
            "Tokens generated here for the requests that ended.",
            _LENGTHS,
        )
        self._steps = histogram(
            "shoal_worker_step_seconds",
            "How long a step took; of steps reported together, as under load, the last alone.",
            _STEP,
        )
        self._freed = histogram(
            "shoal_abort_to_kv_free_seconds",
            "From an abort's receipt to the engine's word that the request is gone.",
            _ABORT,
        )

    @property
    def num_handles(self) -> int:
        """Requests that the engine has not ended yet."""
        return len(self._lives)

    def engine_ready(self, info: worker_pb2.WorkerInfo) -> None:
        """Gives the series their model's name."""
        self.info = info
        self._model = info.model
        for reason in _REASONS.values():
            self._finished.labels(info.model, reason)
        self._handed_back.labels(info.model)
        for histogram in self._histograms:
            histogram.labels(info.model)

    def submitted(self, handle: int, submit: worker_pb2.Submit) -> None:
        self._without_token.add(handle)
        self._lives[handle] = _Life(self._clock(), len(submit.prompt_ids), len(submit.resume_ids))

    def aborted(self, handle: int) -> None:
        self._lives[handle].aborted = self._clock()

    def handed_back(self, handle: int) -> None:
        self._handed_back.labels(self._model).inc()
        self.aborted(handle)

    def stepped(self, frame: worker_pb2.StepFrame, stats: engine_pb2.EngineStats) -> None:
        """Takes in a frame of the engine, its rows still under the engine's handles."""
        self.load = frame.load
        self.stats = stats
        merged = frame.step > self._step + 1
        if frame.step != self._step:
            self._step = frame.step
            self._steps.labels(self._model).observe(stats.step_us / 1e6)
        if frame.started:
            self._start(frame)
        if frame.handles and (self._without_token or self._sampled):
            self._tokens(frame, merged)

    def _start(self, frame: worker_pb2.StepFrame) -> None:
        now = self._clock()
        for row in frame.started:
            life = self._lives[row.handle]
            life.started = now
            self._queue.labels(self._model).observe(now - life.submitted)

    def _tokens(self, frame: worker_pb2.StepFrame, merged: bool) -> None:
        """Observes first tokens, and the gaps of the sampled requests.

        A row of merged steps has several tokens, which share the gap evenly.
        """
        now = self._clock()
        handles = set(frame.handles[:])
        if self._sampled:
            counts = dict(zip(frame.handles[:], frame.counts[:], strict=True)) if merged else {}
            between = self._between.labels(self._model)
            for handle in self._sampled.keys() & handles:
                count = counts.get(handle, 1)
                for _ in range(count):
                    between.observe((now - self._sampled[handle]) / count)
                self._sampled[handle] = now
        for handle in self._without_token & handles:
            self._without_token.discard(handle)
            self._lives[handle].first_token = now
            self._first_token.labels(self._model).observe(now - self._lives[handle].submitted)
            if len(self._sampled) < MAX_SAMPLED:
                self._sampled[handle] = now

    def finished(self, finished: worker_pb2.Finished) -> None:
        """A request ended; its handle is the engine's."""
        now, model = self._clock(), self._model
        life = self._lives[finished.handle]
        self._finished.labels(model, _REASONS[finished.reason]).inc()
        self._whole.labels(model).observe(now - life.submitted)
        self._prompt_tokens.labels(model).observe(life.num_prompt)
        num_output = max(0, finished.num_output_tokens - life.num_resumed)
        self._output_tokens.labels(model).observe(num_output)
        if life.first_token is not None:
            self._decode.labels(model).observe(now - life.first_token)
            if life.started is not None:
                self._prefill.labels(model).observe(life.first_token - life.started)
        if life.aborted is not None:
            self._freed.labels(model).observe(now - life.aborted)
        self.forget(finished.handle)

    def forget(self, handle: int) -> None:
        """Drops a handle's times without an observation: the request was refused."""
        self._lives.pop(handle, None)
        self._without_token.discard(handle)
        self._sampled.pop(handle, None)
