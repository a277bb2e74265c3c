"""What every service tells Prometheus of its own process.

Its version, its memory, file descriptors and CPU time under the usual `process_*` names, and
how many tasks its event loop has: a number that goes up and stays up is a leak.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services import __version__
from services.common.errors import ErrorCode

ERROR_CODES = tuple(code.name.lower() for code in ErrorCode)


def process_registry() -> CollectorRegistry:
    """A registry that holds the process's own metrics. Make it inside the running loop."""
    # They would be a second series beside every counter and histogram.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    loop = asyncio.get_running_loop()
    tasks = Gauge("shoal_asyncio_tasks", "Tasks of the event loop.", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
    info = Gauge("shoal_build_info", "Always 1.", ("version",), registry=registry)
    info.labels(__version__).set(1)
    return registry


class TokenCounter(Collector):
    """A counter for the path of a token: `value` is added to, and read when it is asked for.

    For one thread, an event loop's: the library's own takes a lock each time.
    """

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self.value = 0
        self._name, self._text = name, text
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self.value)


class TokenHistogram(Collector):
    """A histogram for the path of a token, as `TokenCounter`; `buckets` are upper bounds."""

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text = name, text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)  # the last: above all bounds
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
