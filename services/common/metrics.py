"""What every service tells Prometheus of its own process.

Its version, its memory, file descriptors and CPU time under the usual `process_*` names, and
how many tasks its event loop has: a number that goes up and stays up is a leak.
"""

from __future__ import annotations

import asyncio

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)

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
