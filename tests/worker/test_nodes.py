"""A group over two hosts, here two agents: it serves together and ends together."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from protos import worker_pb2
from services.worker.config import WorkerConfig
from services.worker.engine import torch_engine
from tests.worker.agent_client import AgentProcess, SessionClient, agent, session
from tests.worker.engine.driver import Driver, Request
from tests.worker.models.checkpoints import save_tiny

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROMPT = [5, 9, 30, 77, 12]
LIMITS = {"limits": {"silence": 3.0}}


@asynccontextmanager
async def two_hosts(
    directory: Path, model: Path, *, limits: dict[str, Any] | None = None
) -> AsyncIterator[tuple[AgentProcess, AgentProcess]]:
    """The first host, serving, and the second."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = [
        *(f"--model={model}", "--num-pages=64", "--num-threads=1"),
        *("--engine=torch", "--tp=2", "--nnodes=2"),
        *(f"--rendezvous=127.0.0.1:{port}", "--check-ranks"),
    ]
    folders = [directory / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    async with (
        agent(folders[1], *flags, "--node-rank=1", settings=limits or {}, wait=False) as second,
        agent(folders[0], *flags, settings=limits or {}) as first,
    ):
        yield first, second


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "llama")
    return path


async def submit(client: SessionClient, handle: int, max_tokens: int) -> None:
    row = worker_pb2.Submit(handle=handle, prompt_ids=PROMPT)
    row.sampling.max_tokens = max_tokens
    row.sampling.temperature = 0
    row.sampling.ignore_eos = True
    await client.call.write(worker_pb2.WorkerSessionRequest(submits=[row]))


async def all_gone(processes: list[psutil.Process]) -> bool:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 20)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def stop_rank(host: AgentProcess) -> None:
    """Stops the process that computes on a host, and leaves the others running."""
    (rank,) = [
        process
        for process in host.ranks()
        if "services.worker.rank" in process.cmdline()
        and "services.worker.torchrun" not in process.cmdline()
    ]
    rank.send_signal(signal.SIGSTOP)


async def test_two_hosts_give_the_tokens_of_one_and_the_streams_end_with_the_second(
    tmp_path: Path, model: Path
) -> None:
    alone = torch_engine.load(
        WorkerConfig(model=str(model), num_pages=64, num_threads=1), lambda *_: None
    )
    (expected,) = Driver(alone).generate([Request(PROMPT)], 12)
    alone.close()
    async with two_hosts(tmp_path, model) as (first, second):
        async with session(first) as client:
            await submit(client, 1, 12)
            await client.until(lambda: 1 in client.finished)
            assert client.token_ids[1] == expected
            await submit(client, 2, 400)
            await client.until(lambda: 2 in client.token_ids)
            processes = [*first.ranks(), *second.ranks()]
            second.process.kill()
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await client.until(lambda: 2 in client.finished)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await first.wait_for_exit() == 1
        assert await all_gone(processes)


@pytest.mark.parametrize("how", ["stop the second's rank", "kill the first"])
async def test_a_member_that_dies_under_load_takes_the_group_along(
    tmp_path: Path, model: Path, how: str
) -> None:
    async with two_hosts(tmp_path, model, limits=LIMITS) as (first, second):
        async with session(first) as client:
            await submit(client, 1, 500)
            await client.until(lambda: 1 in client.token_ids)
            processes = [*first.ranks(), *second.ranks()]
            if how == "kill the first":
                first.process.kill()
            else:
                stop_rank(second)
                assert await first.wait_for_exit() == 1
            assert await second.wait_for_exit() == 1
        assert await all_gone(processes)
