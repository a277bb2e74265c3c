"""The worker's gauges and counters, from what the engine reported last.

They are made when they are scraped, and cost nothing per step. The names are vLLM's where
dashboards and endpoint pickers know one, else `shoal_worker_*`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import engine_pb2, worker_pb2

LABELS = ("model_name",)


class LastReport(Protocol):
    """What is known of the engine now."""

    @property
    def info(self) -> worker_pb2.WorkerInfo | None:
        """None until the model is loaded."""
        ...

    @property
    def load(self) -> worker_pb2.Load: ...
    @property
    def stats(self) -> engine_pb2.EngineStats: ...
    @property
    def num_sessions(self) -> int: ...
    @property
    def num_handles(self) -> int:
        """Requests that the engine has not ended yet."""
        ...


class EngineSeries(Collector):
    """Makes the series of a report when Prometheus asks."""

    def __init__(self, report: LastReport) -> None:
        self._report = report

    def describe(self) -> Iterator[Metric]:
        """Promises no names: they need the model's name as a label."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        info = self._report.info
        if info is None:
            return
        for name, (value, text) in self._gauges().items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric([info.model], value)
            yield gauge
        yield from self._by_state(info.model)
        for name, (value, text) in self._counters().items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric([info.model], value)
            yield counter
        yield _facts(info)

    def _gauges(self) -> dict[str, tuple[float, str]]:
        """Values and descriptions by name."""
        report = self._report
        load, stats = report.load, report.stats
        used = load.num_pages - load.num_free_pages - load.num_evictable_pages
        return {
            "vllm:num_requests_running": (load.num_running, "Requests that hold KV pages."),
            "vllm:num_requests_waiting": (load.num_waiting, "Requests that wait for pages."),
            "vllm:kv_cache_usage_perc": (
                used / max(1, load.num_pages),
                "Share of KV pages in use; 1 is all.",
            ),
            "shoal_worker_sessions": (report.num_sessions, "Open streams of clients."),
            "shoal_worker_handles": (report.num_handles, "Requests the agent has open."),
            "shoal_worker_engine_requests": (stats.num_requests, "Requests the engine knows."),
            "shoal_worker_batch_tokens": (stats.batch_tokens, "Tokens in the last batch."),
            "shoal_worker_grammar_requests": (
                stats.num_grammar_requests,
                "Running requests that follow a grammar.",
            ),
        }

    def _counters(self) -> dict[str, tuple[float, str]]:
        """The same of what only grows."""
        load, stats = self._report.load, self._report.stats
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

    def _by_state(self, model: str) -> Iterator[Metric]:
        load, stats = self._report.load, self._report.stats
        pages = {
            "free": load.num_free_pages,
            "evictable": load.num_evictable_pages,
            "locked": stats.num_locked_pages,
            "in_flight": stats.num_inflight_pages,
            "total": load.num_pages,
        }
        requests = {"running": load.num_running, "waiting": load.num_waiting}
        for name, text, states in (
            ("shoal_worker_pages", "KV pages by state.", pages),
            ("shoal_worker_requests", "Requests by state.", requests),
        ):
            family = GaugeMetricFamily(name, text, labels=(*LABELS, "state"))
            for state, number in states.items():
                family.add_metric([model, state], number)
            yield family


def _facts(info: worker_pb2.WorkerInfo) -> Metric:
    """The KV pool's shape, under the name and labels that endpoint pickers look for."""
    labels = (*LABELS, "block_size", "num_gpu_blocks")
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "Tokens a KV page and pages of the pool; always 1.", labels=labels
    )
    family.add_metric([info.model, str(info.page_size), str(info.num_pages)], 1)
    return family
