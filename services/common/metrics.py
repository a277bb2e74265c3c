"""What every service tells Prometheus of its own process.

Its memory, file descriptors and CPU time under the usual `process_*` names, and how many
tasks its event loop has: a number that goes up and stays up is a leak.
"""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector


def process_registry() -> CollectorRegistry:
    """A registry that holds the process's own metrics. Make it inside the running loop."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    loop = asyncio.get_running_loop()
    tasks = Gauge("shoal_asyncio_tasks", "Tasks of the event loop.", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
    return registry
