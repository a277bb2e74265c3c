"""A host of a group that spans several, other than the first: ranks to start and to watch.

The first host's agent serves the model; this one serves liveness. A member that dies takes
the whole group with it, as no step can be made without it, and whatever supervises the pods
starts all of them anew. It knows neither requests nor batches.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import suppress

from services.common.admin import build_app, serve_admin
from services.common.metrics import process_registry
from services.worker.config import WorkerConfig
from services.worker.supervisor import RANK_MODULE, Limits, Ranks

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5


async def serve_node(
    config: WorkerConfig,
    stop: asyncio.Event,
    *,
    limits: Limits | None = None,
    rank_module: str = RANK_MODULE,
) -> int:
    """Runs this host's ranks until `stop` is set or the group is lost; the exit status."""
    async with Ranks(config, limits=limits, module=rank_module) as ranks:
        registry = process_registry()
        app = build_app(
            registry, ready=lambda: ranks.responsive, alive=lambda: not ranks.lost.is_set()
        )
        async with serve_admin(config.admin_address, app):
            await ranks.start(lambda event: None, lambda: None)
            failure = await _until_ended(config, ranks, stop)
    if failure:
        print(f"shoal worker: {failure}", file=sys.stderr, flush=True)
    return 1 if failure else 0


async def _until_ended(config: WorkerConfig, ranks: Ranks, stop: asyncio.Event) -> str:
    """Waits for the signal, or the loss of a rank here or of the first host.

    Returns why the group was lost, empty if it was not.
    """
    lost = asyncio.create_task(ranks.lost.wait())
    stopped = asyncio.create_task(stop.wait())
    orphaned = asyncio.create_task(_first_host_gone(config.rendezvous))
    tasks = {lost, stopped, orphaned}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    if stopped.done() and not stopped.cancelled():
        return ""
    if ranks.lost.is_set():
        return await ranks.reason()
    return f"the group's first host, {config.rendezvous}, is gone"


async def _first_host_gone(endpoint: str) -> None:
    """Returns when the first host's torchrun has ended: its store then drops the connection.

    A rank that is stopped would never notice, and so this process watches.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            break
        await asyncio.sleep(_RETRY_SECONDS)  # it may start later than this host
    try:
        with suppress(OSError):
            await reader.read(1)
    finally:
        writer.close()
