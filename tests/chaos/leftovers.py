"""What requests leave in a fleet's processes once they are over: it must be nothing."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from protos import common_pb2, worker_pb2, worker_pb2_grpc
from services.common import rpc
from tests.chaos.fleet import Fleet
from tests.chaos.instance import Instance, until

# What requests hold, by role: 0 when all are over.
_HELD = {
    "gateway": ("shoal_gateway_requests_in_flight", "shoal_gateway_handles"),
    "tokenizer": ("shoal_tokenizer_jobs",),
    "detokenizer": ("shoal_detokenizer_open_texts",),
    "worker": (
        "shoal_worker_handles",
        "shoal_worker_engine_requests",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    ),
}
_PAGE_SIZE = 16  # tokens, the default
_SETTLE_SECONDS = 60.0
_SPARE_FDS = 3  # a scrape in progress, a closing connection


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a service's processes have open."""

    fds: int
    tasks: int
    threads: int

    @classmethod
    async def of(cls, instance: Instance) -> Footprint:
        metrics = await instance.metrics()
        processes = instance.processes()
        return cls(
            sum(process.num_fds() for process in processes),
            round(metrics["shoal_asyncio_tasks"]),
            sum(process.num_threads() for process in processes),
        )


async def held(fleet: Fleet) -> dict[str, float]:
    """What is still held in any process, by instance and metric; empty when all is let go."""
    found: dict[str, float] = {}
    for instance in fleet.instances:
        metrics = await instance.metrics()
        if not metrics:
            found[f"{instance.name} does not answer"] = 1
        for name, value in metrics.items():
            if value and name.partition("{")[0] in _HELD[instance.role]:
                found[f"{instance.name} {name}"] = value
        if instance.role == "worker" and metrics:
            pages = _pages(metrics)
            missing = pages["total"] - pages["free"] - pages["evictable"]
            if missing:
                found[f"{instance.name} pages neither free nor evictable"] = missing
    return found


async def nothing_held(fleet: Fleet) -> None:
    """Returns when no process holds anything of a request; AssertionError if one goes on to."""
    last: dict[str, float] = {}

    async def all_free() -> bool:
        last.clear()
        last.update(await held(fleet))
        return not last

    try:
        await until(all_free, _SETTLE_SECONDS, "every process lets go")
    except AssertionError:
        raise AssertionError(f"still held: {last}")


async def whole_pool_is_usable(fleet: Fleet) -> None:
    """Sends every worker a request of nine tenths of its KV pool, which must finish."""
    for worker in fleet.of("worker"):
        pages = _pages(await worker.metrics())["total"]
        async with rpc.open_channel(f"unix:{worker.socket}") as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            submit = worker_pb2.Submit(prompt_ids=[1] * round(0.9 * pages * _PAGE_SIZE))
            submit.sampling.max_tokens = 4
            call = stub.Generate(worker_pb2.WorkerGenerateRequest(submit=submit), timeout=60)
            reasons = [part.finished.reason async for part in call if part.HasField("finished")]
        assert reasons == [common_pb2.FINISH_REASON_LENGTH], (worker.name, reasons)


async def footprints(fleet: Fleet) -> dict[str, Footprint]:
    """The footprint of every instance."""
    return {instance.name: await Footprint.of(instance) for instance in fleet.instances}


async def back_to(baseline: dict[str, Footprint], fleet: Fleet) -> None:
    """Returns when every instance has open what it had; AssertionError if more stays open."""
    excess: list[str] = []

    async def is_back() -> bool:
        now = await footprints(fleet)
        excess[:] = [
            f"{name}: {now[name]}, was {before}"
            for name, before in baseline.items()
            if now[name].fds > before.fds + _SPARE_FDS or now[name].tasks > before.tasks + 1
        ]
        return not excess

    try:
        await until(is_back, _SETTLE_SECONDS, "fds and tasks are back")
    except AssertionError:
        raise AssertionError(f"more is open than at first: {excess}")


def resident_bytes(fleet: Fleet) -> dict[str, int]:
    """Resident memory by process, as `instance#position`."""
    sizes: dict[str, int] = {}
    for instance in fleet.instances:
        for position, process in enumerate(instance.processes()):
            try:
                sizes[f"{instance.name}#{position}"] = process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
    return sizes


def _pages(metrics: dict[str, float]) -> dict[str, float]:
    pages = {}
    for name, value in metrics.items():
        if name.startswith("shoal_worker_pages{"):
            pages[name.partition('state="')[2].partition('"')[0]] = value
    return pages
