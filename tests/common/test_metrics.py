from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from services.common.metrics import TokenCounter, TokenHistogram, process_registry


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


def test_what_counts_tokens_is_written_as_the_library_writes_its_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    buckets = (0.001, 0.5, 1, 2.5)
    counter = TokenCounter("shoal_tokens", "Tokens.", ours)
    histogram = TokenHistogram("shoal_pause_seconds", "Pauses.", buckets, ours)
    their_counter = Counter("shoal_tokens", "Tokens.", registry=theirs)
    their_histogram = Histogram("shoal_pause_seconds", "Pauses.", buckets=buckets, registry=theirs)
    for seconds in (0.0, 0.001, 0.25, 0.5, 0.6, 1.0, 7.0):
        counter.value += 3
        their_counter.inc(3)
        histogram.observe(seconds)
        their_histogram.observe(seconds)

    def lines(registry: CollectorRegistry) -> list[bytes]:
        return [line for line in generate_latest(registry).splitlines() if b"_created" not in line]

    assert lines(ours) == lines(theirs)
