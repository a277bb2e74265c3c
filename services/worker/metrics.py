"""What the worker tells Prometheus: the `vllm:*` names and `shoal_worker_*`.

Counters and gauges are read from the engine's last report when they are scraped and
cost nothing per step. Histograms are observed per request, and per step for a
bounded sample of requests. This module keeps times by engine handle and knows
nothing of sessions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import common_pb2, engine_pb2, worker_pb2

# Gaps between tokens are observed for this many requests at a time, all of their gaps:
# a row per step for each of 256 requests would cost more than the step's wire.
MAX_SAMPLED = 8

_LABELS = ("model_name",)
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


class WorkerMetrics:
    """The worker's metrics in `registry`; series appear once the model's name is known."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.load = worker_pb2.Load()
        self.stats = engine_pb2.EngineStats()
        self.num_sessions = 0
        self.model = ""
        self._clock = clock
        self._step = 0
        self._submitted: dict[int, float] = {}
        self._without_token: dict[int, float] = {}  # handle -> submitted
        self._sampled: dict[int, float] = {}  # handle -> its last token
        self._aborted: dict[int, float] = {}
        self._finished = Counter(
            "vllm:request_success",
            "Requests that ended.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )

        self._handed_back = Counter(
            "shoal_worker_handed_back",
            "Requests that were handed back unfinished, as the worker drained.",
            _LABELS,
            registry=registry,
        )

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(name, text, _LABELS, buckets=tuple(buckets), registry=registry)

        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From submission to the first token.", _FIRST_TOKEN
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds",
            f"Between tokens of one request, for {MAX_SAMPLED} requests at a time.",
            _BETWEEN,
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "From submission to the last token.", _WHOLE
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
        registry.register(_EngineCollector(self))

    @property
    def num_handles(self) -> int:
        """Requests that the engine has not ended yet."""
        return len(self._submitted)

    def engine_ready(self, model: str) -> None:
        """Gives the series their model name."""
        self.model = model
        for reason in _REASONS.values():
            self._finished.labels(model, reason)
        self._handed_back.labels(model)
        for metric in (self._first_token, self._between, self._whole, self._steps, self._freed):
            metric.labels(model)

    def submitted(self, handle: int) -> None:
        self._submitted[handle] = self._without_token[handle] = self._clock()

    def aborted(self, handle: int) -> None:
        self._aborted[handle] = self._clock()

    def handed_back(self, handle: int) -> None:
        self._handed_back.labels(self.model).inc()
        self.aborted(handle)

    def stepped(self, frame: worker_pb2.StepFrame, stats: engine_pb2.EngineStats) -> None:
        """Takes in a frame of the engine, its rows still under the engine's handles."""
        self.load = frame.load
        self.stats = stats
        if frame.step != self._step:
            self._step = frame.step
            self._steps.labels(self.model).observe(stats.step_us / 1e6)
        if frame.handles and (self._without_token or self._sampled):
            self._tokens(set(frame.handles[:]))

    def _tokens(self, handles: set[int]) -> None:
        now = self._clock()
        if self._sampled:
            between = self._between.labels(self.model)
            for handle in self._sampled.keys() & handles:
                between.observe(now - self._sampled[handle])
                self._sampled[handle] = now
        if self._without_token:
            for handle in self._without_token.keys() & handles:
                self._first_token.labels(self.model).observe(now - self._without_token.pop(handle))
                if len(self._sampled) < MAX_SAMPLED:
                    self._sampled[handle] = now

    def finished(self, handle: int, reason: common_pb2.FinishReason.ValueType) -> None:
        now = self._clock()
        self._finished.labels(self.model, _REASONS[reason]).inc()
        self._whole.labels(self.model).observe(now - self._submitted[handle])
        if handle in self._aborted:
            self._freed.labels(self.model).observe(now - self._aborted[handle])
        self.forget(handle)

    def forget(self, handle: int) -> None:
        """Drops a handle's times without an observation: the request was refused."""
        for times in (self._submitted, self._without_token, self._sampled, self._aborted):
            times.pop(handle, None)


class _EngineCollector(Collector):
    """Reads the engine's last report when Prometheus asks."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Promises no names: they need the model's name as a label."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        if not metrics.model:
            return
        for name, (value, text) in self._gauges().items():
            yield self._series(GaugeMetricFamily(name, text, labels=_LABELS), value)
        yield self._pages(metrics.load, metrics.stats)
        yield self._requests(metrics.load)
        for name, (value, text) in self._counters().items():
            yield self._series(CounterMetricFamily(name, text, labels=_LABELS), value)

    def _gauges(self) -> dict[str, tuple[float, str]]:
        """Values and descriptions by name."""
        metrics = self._metrics
        load, stats = metrics.load, metrics.stats
        used = load.num_pages - load.num_free_pages - load.num_evictable_pages
        return {
            "vllm:num_requests_running": (load.num_running, "Requests that hold KV pages."),
            "vllm:num_requests_waiting": (load.num_waiting, "Requests that wait for pages."),
            "vllm:kv_cache_usage_perc": (
                used / max(1, load.num_pages),
                "Share of KV pages in use; 1 is all.",
            ),
            "shoal_worker_sessions": (metrics.num_sessions, "Open streams of clients."),
            "shoal_worker_handles": (metrics.num_handles, "Requests the agent has open."),
            "shoal_worker_engine_requests": (stats.num_requests, "Requests the engine knows."),
            "shoal_worker_batch_tokens": (stats.batch_tokens, "Tokens in the last batch."),
            "shoal_worker_grammar_requests": (
                stats.num_grammar_requests,
                "Running requests that follow a grammar.",
            ),
        }

    def _counters(self) -> dict[str, tuple[float, str]]:
        """The same of what only grows."""
        load, stats = self._metrics.load, self._metrics.stats
        return {
            "vllm:prefix_cache_queries": (stats.num_prefix_query_tokens, "Tokens looked up."),
            "vllm:prefix_cache_hits": (stats.num_prefix_hit_tokens, "Tokens found."),
            "vllm:prompt_tokens": (stats.num_prefill_tokens, "Prompt tokens computed."),
            "vllm:generation_tokens": (stats.num_output_tokens, "Tokens generated."),
            "vllm:num_preemptions": (load.num_preempted, "Requests that lost their pages."),
            "shoal_worker_preemptions": (load.num_preempted, "Requests that lost their pages."),
            "shoal_worker_late_requests": (
                stats.num_late,
                "Requests dropped from the queue, as their deadline could not be met.",
            ),
            "shoal_worker_prefix_query_tokens": (
                stats.num_prefix_query_tokens,
                "Prompt tokens looked up in the prefix cache.",
            ),
            "shoal_worker_prefix_hit_tokens": (
                stats.num_prefix_hit_tokens,
                "Prompt tokens found there.",
            ),
            "shoal_worker_steps": (stats.num_steps, "Steps of the engine."),
            "shoal_worker_busy_seconds": (stats.busy_us / 1e6, "Time the engine computed."),
            "shoal_worker_bubble_seconds": (
                stats.bubble_us / 1e6,
                "Time the engine stood idle with work waiting.",
            ),
            "shoal_worker_grammars_compiled": (stats.num_grammars_compiled, "Grammars compiled."),
            "shoal_worker_grammars_refused": (
                stats.num_grammars_failed,
                "Grammars that could not be compiled.",
            ),
            "shoal_worker_grammar_cache_hits": (
                stats.num_grammar_hits,
                "Requests whose grammar was compiled already, or being compiled.",
            ),
            "shoal_worker_grammar_compile_seconds": (
                stats.grammar_compile_us / 1e6,
                "Time spent compiling grammars.",
            ),
        }

    def _series(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._metrics.model], value)
        return family

    def _requests(self, load: worker_pb2.Load) -> Metric:
        family = GaugeMetricFamily(
            "shoal_worker_requests", "Requests by state.", labels=(*_LABELS, "state")
        )
        family.add_metric([self._metrics.model, "running"], load.num_running)
        family.add_metric([self._metrics.model, "waiting"], load.num_waiting)
        return family

    def _pages(self, load: worker_pb2.Load, stats: engine_pb2.EngineStats) -> Metric:
        family = GaugeMetricFamily(
            "shoal_worker_pages", "KV pages by state.", labels=(*_LABELS, "state")
        )
        states = {
            "free": load.num_free_pages,
            "evictable": load.num_evictable_pages,
            "locked": stats.num_locked_pages,
            "in_flight": stats.num_inflight_pages,
            "total": load.num_pages,
        }
        for state, pages in states.items():
            family.add_metric([self._metrics.model, state], pages)
        return family
