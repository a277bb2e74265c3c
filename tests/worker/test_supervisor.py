"""The life and death of rank processes, direct and under torchrun."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
import uvloop

from protos import engine_pb2
from services.worker.config import WorkerConfig
from services.worker.supervisor import Limits, Ranks
from tests.worker.agent_client import SCRIPTED, AgentProcess, agent, session

pytestmark = pytest.mark.integration


async def _all_gone(processes: list[psutil.Process], timeout: float = 10) -> bool:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _last_line(running: AgentProcess) -> str:
    return running.errors().splitlines()[-1]


async def test_a_killed_agent_leaves_no_rank(tmp_path: Path) -> None:
    async with agent(tmp_path) as running:
        ranks = running.ranks()
        assert len(ranks) == 1
        running.process.kill()
        assert await _all_gone(ranks)


async def test_a_killed_agent_leaves_no_rank_that_ignores_its_socket(tmp_path: Path) -> None:
    async with agent(tmp_path, "--model=never-connect", wait=False) as running:
        ranks = await running.wait_for_ranks(1)
        running.process.kill()
        assert await _all_gone(ranks)


async def test_a_rank_that_exits_at_once_ends_the_agent(tmp_path: Path) -> None:
    async with agent(tmp_path, "--model=exit-at-once", wait=False) as running:
        assert await running.wait_for_exit(30) == 1
        assert _last_line(running) == "shoal worker: the engine process exited with status 3"


async def test_a_model_that_cannot_be_served_is_named_in_one_sentence(tmp_path: Path) -> None:
    async with agent(tmp_path, "--model=refuse-model", wait=False) as running:
        assert await running.wait_for_exit(30) == 1
        assert _last_line(running) == "shoal worker: the architecture Foo is not known"


async def test_a_rank_that_never_connects_ends_the_agent(tmp_path: Path) -> None:
    settings = {"rank_module": SCRIPTED, "limits": {"connect": 1.0}}
    async with agent(tmp_path, "--model=never-connect", settings=settings, wait=False) as running:
        ranks = await running.wait_for_ranks(1)
        assert await running.wait_for_exit(30) == 1
        assert "did not connect" in _last_line(running)
        assert await _all_gone(ranks)


async def test_the_reason_that_a_rank_left_is_said(tmp_path: Path) -> None:
    settings = {"rank_module": SCRIPTED}
    async with agent(tmp_path, "--model=leave-a-reason", settings=settings, wait=False) as running:
        assert await running.wait_for_exit(30) == 1
        assert _last_line(running) == "shoal worker: this rank has no GPU"


async def test_loading_without_progress_ends_the_agent(tmp_path: Path) -> None:
    settings = {"rank_module": SCRIPTED, "limits": {"load": 1.0}}
    async with agent(tmp_path, "--model=load-for-ever", settings=settings, wait=False) as running:
        assert await running.wait_for_exit(30) == 1
        assert "no sign of life" in _last_line(running)


@pytest.mark.slow
async def test_torchrun_ranks_end_with_a_killed_agent(tmp_path: Path) -> None:
    async with agent(tmp_path, "--tp=2", SLOW) as running, session(running) as client:
        await client.submit(1, [5], max_tokens=3)
        await client.until(lambda: 1 in client.finished)
        processes = running.ranks()
        assert len(processes) == 3  # torchrun, rank 0, rank 1
        running.process.kill()
        assert await _all_gone(processes)


@pytest.mark.slow
async def test_a_dead_follower_ends_the_whole_group(tmp_path: Path) -> None:
    async with agent(tmp_path, "--tp=2", SLOW) as running, session(running) as client:
        await client.submit(1, [5])
        await client.until(lambda: 1 in client.token_ids)
        processes = running.ranks()
        (follower,) = [process for process in processes if _rank(process) == "1"]
        follower.kill()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.until(lambda: False)
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await running.wait_for_exit(30) == 1
        assert "shoal worker: the engine" in _last_line(running)
        assert await _all_gone(processes)


@pytest.mark.slow
async def test_torchrun_ranks_end_with_a_drained_agent(tmp_path: Path) -> None:
    async with agent(tmp_path, "--tp=2", settings=_QUICK_EXIT) as running:
        processes = running.ranks()
        running.process.send_signal(signal.SIGTERM)
        assert await running.wait_for_exit(30) == 0
        assert await _all_gone(processes)


SLOW = "--fake-step-ms=20"
# The scripted follower waits for ever, as one that is stuck does.
_QUICK_EXIT = {"rank_module": SCRIPTED, "limits": {"exit": 1.0}}


def _rank(process: psutil.Process) -> str | None:
    return process.environ().get("RANK")


async def test_silence_and_its_end_are_told_at_once() -> None:
    states: list[bool] = []
    recovered, ready = asyncio.Event(), asyncio.Event()
    limits = Limits(silence=3.0)
    async with Ranks(WorkerConfig(engine="fake"), limits=limits, module=SCRIPTED) as ranks:

        def on_event(event: engine_pb2.EngineEvent) -> None:
            if event.HasField("ready"):
                ready.set()

        def on_responsive() -> None:
            states.append(ranks.responsive)
            if ranks.responsive:
                recovered.set()
            else:
                rank.send_signal(signal.SIGCONT)

        others = set(psutil.Process().children())
        await ranks.start(on_event, on_responsive)
        async with asyncio.timeout(30):
            await ready.wait()
            (rank,) = set(psutil.Process().children()) - others
            rank.send_signal(signal.SIGSTOP)
            await recovered.wait()
        assert states == [False, True]
        assert not ranks.lost.is_set()


def test_a_command_to_ranks_that_are_gone_is_dropped() -> None:
    async def lose_and_send() -> None:
        ready = asyncio.Event()
        async with Ranks(WorkerConfig(engine="fake"), module=SCRIPTED) as ranks:
            await ranks.start(lambda event: ready.set(), lambda: None)
            async with asyncio.timeout(30):
                await ready.wait()
                for process in psutil.Process().children():
                    process.kill()
                await ranks.lost.wait()
            for _ in range(20):  # turns of the loop in which the socket's end is closed
                ranks.send(engine_pb2.EngineCommand())
                await asyncio.sleep(0.01)

    # A worker runs on uvloop, whose closed transports raise where asyncio's drop.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(lose_and_send())
