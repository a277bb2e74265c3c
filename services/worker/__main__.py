"""`shoal worker`: the pod's agent process, from its first to its last moment.

It listens before the ranks are started, so that probes are answered while the model
loads; it drains when it is told to stop, and exits non-zero when the engine is lost.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from protos import engine_pb2, worker_pb2_grpc
from services.common import logs, process
from services.common.admin import build_app, serve_admin
from services.common.config import parse
from services.common.metrics import process_registry
from services.common.rpc import IDLE_PEER_TIMEOUT_SECONDS, Server
from services.common.tracing import tracing_to
from services.worker import precheck
from services.worker.agent import Agent
from services.worker.config import WorkerConfig
from services.worker.metrics import WorkerMetrics
from services.worker.node import serve_node
from services.worker.servicer import WorkerServicer
from services.worker.spans import RequestSpans
from services.worker.supervisor import RANK_MODULE, Limits, Ranks

log = logging.getLogger(__name__)

_GOODBYE_SECONDS = 1.0  # for calls that were told to end


async def serve(
    config: WorkerConfig,
    stop: asyncio.Event,
    *,
    limits: Limits | None = None,
    rank_module: str = RANK_MODULE,
    peer_timeout: float = IDLE_PEER_TIMEOUT_SECONDS,
) -> int:
    """Runs a worker until `stop` is set or its engine is lost; returns the exit status."""
    registry = process_registry()
    server = Server(["shoal.v1.Worker"])
    async with (
        tracing_to("worker", config.otlp_endpoint) as tracing,
        Ranks(config, limits=limits, module=rank_module) as ranks,
    ):
        agent = Agent(
            ranks.send,
            WorkerMetrics(registry),
            spans=RequestSpans(tracing),
            handoff=config.drain == "handoff",
            withdraw=ranks.withdraw,
        )
        servicer = WorkerServicer(agent, peer_timeout=peer_timeout)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)

        def ready() -> bool:
            return agent.ready and ranks.responsive

        def on_level(level: str) -> None:
            ranks.send(engine_pb2.EngineCommand(log_level=level))

        app = build_app(registry, ready, lambda: not agent.failed, on_level=on_level)
        async with (
            serve_admin(config.admin_address, app),
            _listening(server, config, ready, agent.changed),
        ):
            await ranks.start(agent.handle_event, agent.changed.set)
            failure = await _until_ended(agent, ranks, stop, config.drain_timeout)
    if failure:
        print(f"shoal worker: {failure}", file=sys.stderr, flush=True)
    return 1 if failure else 0


async def _until_ended(
    agent: Agent, ranks: Ranks, stop: asyncio.Event, drain_timeout: float
) -> str:
    """Waits for the engine's loss, or for the signal and then for the running requests.

    Returns why the engine was lost, empty if it was not.
    """
    lost = asyncio.create_task(ranks.lost.wait())
    stopped = asyncio.create_task(stop.wait())
    drained = asyncio.create_task(_drained(agent, stop))
    await asyncio.wait({lost, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not lost.done():
        log.info("draining", extra={"requests": agent.num_requests})
        await asyncio.wait(
            {lost, drained}, timeout=drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
    for task in (lost, stopped, drained):
        task.cancel()
    if ranks.lost.is_set():
        agent.fail()
        return await ranks.reason()
    agent.end_sessions()
    return ""


async def _drained(agent: Agent, stop: asyncio.Event) -> None:
    await stop.wait()
    agent.drain()
    await agent.idle()


@asynccontextmanager
async def _listening(
    server: Server, config: WorkerConfig, ready: Callable[[], bool], changed: asyncio.Event
) -> AsyncIterator[None]:
    """Listens and publishes `ready`; says goodbye to the callers however it ends.

    Raises StartupError if the address cannot be had, or its TLS files cannot be used.
    """
    health = asyncio.create_task(_publish_health(server, ready, changed))
    try:
        log.info("listening", extra={"address": await server.start(config.address, config.tls)})
        yield
    finally:
        health.cancel()
        await server.set_serving(False)
        await server.stop(_GOODBYE_SECONDS)


async def _publish_health(
    server: Server, ready: Callable[[], bool], changed: asyncio.Event
) -> None:
    """Keeps grpc.health.v1 equal to `ready`, which is read when `changed` says so."""
    while True:
        changed.clear()
        await server.set_serving(ready())
        await changed.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `shoal worker` and `python -m services.worker`."""
    config = parse(
        WorkerConfig,
        sys.argv[1:] if argv is None else argv,
        prog="shoal worker",
        description="Serves one model replica by token ids over gRPC.",
    )
    logs.setup("worker", level=config.log_level, format=config.log_format)
    program = serve_node if config.node_rank > 0 else serve

    async def run(stop: asyncio.Event) -> int:
        await asyncio.to_thread(precheck.check, config)
        return await program(config, stop)

    process.run(run)


if __name__ == "__main__":
    main()
