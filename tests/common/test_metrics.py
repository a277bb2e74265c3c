from __future__ import annotations

import asyncio

from services.common.metrics import process_registry


async def test_the_loops_tasks_are_counted() -> None:
    registry = process_registry()
    before = registry.get_sample_value("shoal_asyncio_tasks")
    assert before is not None
    task = asyncio.create_task(asyncio.Event().wait())
    assert registry.get_sample_value("shoal_asyncio_tasks") == before + 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert registry.get_sample_value("shoal_asyncio_tasks") == before


async def test_the_process_is_measured() -> None:
    registry = process_registry()
    for name in ("process_open_fds", "process_resident_memory_bytes", "process_cpu_seconds_total"):
        assert (registry.get_sample_value(name) or 0) > 0, name
