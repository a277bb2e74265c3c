"""Writes the tables of docs/metrics.md from the metrics that the services register.

    python -m tools.metrics_page

Run it when a metric changes; a test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric

from protos import worker_pb2
from services.common.metrics import process_registry
from services.gateway.config import GatewayConfig
from services.gateway.core import Core
from services.tokenizer.metrics import DetokenizerMetrics, TokenizerMetrics
from services.tokenizer.session import Sessions
from services.worker.metrics import WorkerMetrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
_BEGIN, _END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"
_OPEN_LABELS = ("model_name", "version", "block_size", "num_gpu_blocks")  # one value a process
_OF_HISTOGRAMS = ("le",)


def _gateway(registry: CollectorRegistry) -> None:
    nowhere = ("unix:/nowhere",)
    Core(
        GatewayConfig(
            worker_addresses=nowhere, tokenizer_addresses=nowhere, detokenizer_addresses=nowhere
        ),
        registry,
    )


def _worker(registry: CollectorRegistry) -> None:
    WorkerMetrics(registry).engine_ready(worker_pb2.WorkerInfo(model="m"))


SERVICES: dict[str, Callable[[CollectorRegistry], object]] = {
    "gateway": _gateway,
    "tokenizer": lambda registry: TokenizerMetrics(registry, Sessions()),
    "detokenizer": lambda registry: DetokenizerMetrics(registry, Sessions()),
    "worker": _worker,
}


async def registries() -> dict[str, CollectorRegistry]:
    """What each service registers, and under "" what all of them do."""
    found = {"": process_registry()}
    for service, register in SERVICES.items():
        found[service] = process_registry()
        register(found[service])
    return found


async def render() -> str:
    """The tables."""
    found = await registries()
    common = {metric.name for metric in found[""].collect()}
    parts = []
    for service, registry in found.items():
        metrics = [
            metric for metric in registry.collect() if not service or metric.name not in common
        ]
        parts.append(f"## {service.capitalize() or 'Every service'}\n\n{_table(metrics)}")
    return "\n".join(parts)


def _table(metrics: list[Metric]) -> str:
    rows = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    rows += [
        f"| `{sample_name(metric)}` | {metric.type} | {_labels(metric)} | {_meaning(metric)} |"
        for metric in metrics
    ]
    return "\n".join(rows) + "\n"


def sample_name(metric: Metric) -> str:
    """The name under which a query finds a metric; of a histogram without what is appended."""
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def _labels(metric: Metric) -> str:
    values: dict[str, dict[str, None]] = {}
    for sample in metric.samples:
        for label, value in sample.labels.items():
            if label not in _OF_HISTOGRAMS:
                values.setdefault(label, {})[value] = None
    return ", ".join(
        f"`{label}`" if label in _OPEN_LABELS else f"`{label}`: {', '.join(seen)}"
        for label, seen in values.items()
    )


def _meaning(metric: Metric) -> str:
    text = metric.documentation.rstrip(".")
    buckets = [bucket for bucket in _buckets(metric) if bucket != "+Inf"]
    return f"{text}; buckets {buckets[0]} to {buckets[-1]}" if buckets else text


def _buckets(metric: Metric) -> Iterator[str]:
    for sample in metric.samples:
        if sample.name.endswith("_bucket"):
            yield f"{float(sample.labels['le']):,.15g}".replace("inf", "+Inf")


def with_tables(page: str, tables: str) -> str:
    """The page with new tables between its marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{tables}\n{_END}{after}"


def main() -> None:
    """Rewrites the page in place."""
    PAGE.write_text(with_tables(PAGE.read_text(), asyncio.run(render())))


if __name__ == "__main__":
    main()
