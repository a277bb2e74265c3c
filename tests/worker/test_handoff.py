"""Draining by handing requests back: nothing is lost, nothing is kept, nobody waits."""

from __future__ import annotations

import random
import signal
from collections import defaultdict
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from protos import worker_pb2
from tests.worker.agent_client import agent, session
from tests.worker.test_agent_map import Bench, take

FAKE = ("--model=byte", "--fake-step-ms=5")


async def test_every_request_is_handed_back_once_after_its_tokens() -> None:
    bench = Bench(handoff=True)
    sessions = [bench.open(), bench.open()]
    for number, opened in enumerate(sessions):
        for name in range(5):
            bench.submit(opened, name, 100 * number + name)
    frame = bench.obey()
    for handle in bench.live:
        frame.handles.append(handle)
        frame.counts.append(1)
        frame.token_ids.append(7)
    bench.deliver(frame)
    bench.abort(sessions[0], 0)  # its client does not want it any more
    bench.agent.drain()
    late = bench.obey()
    for handle in frame.handles:  # steps that were under way
        late.handles.append(handle)
        late.counts.append(1)
        late.token_ids.append(8)
    bench.deliver(late)
    for number, opened in enumerate(sessions):
        step = take(opened)
        assert list(step.token_ids) == [7] * 5
        assert sorted(step.moved) == list(range(5))[1 - number :]
        assert [item.handle for item in step.finished] == [0] * (1 - number)
    assert bench.agent.num_requests == 0
    assert bench.sample("shoal_worker_handed_back_total") == 9
    await bench.agent.idle()


async def test_what_comes_while_it_drains_is_refused_even_under_a_used_name() -> None:
    bench = Bench(handoff=True)
    opened = bench.open()
    bench.submit(opened, 1, 5)
    bench.agent.drain()
    bench.submit(opened, 1, 5)
    step = take(opened)
    assert list(step.moved) == [1]
    assert [item.error.message for item in step.rejected] == ["the worker is draining"]
    bench.deliver(bench.obey())
    assert bench.agent.num_requests == 0


async def test_handing_back_at_any_moment_frees_every_handle() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        bench = Bench(handoff=True)
        sessions = [bench.open() for _ in range(2)]
        ends: defaultdict[int, int] = defaultdict(int)
        submitted = 0
        for name in range(20):
            bench.submit(rng.choice(sessions), name, name)
            submitted += 1
            if rng.random() < 0.3:
                bench.deliver(bench.obey())
        bench.agent.drain()
        for _ in range(3):
            bench.deliver(bench.obey())
        for opened in sessions:
            step = take(opened)
            for name in step.moved:
                ends[name] += 1
        assert sorted(ends) == list(range(submitted))
        assert set(ends.values()) == {1}
        assert bench.agent.num_requests == 0


@pytest.mark.integration
async def test_sigterm_with_handoff_waits_for_nobody(tmp_path: Path) -> None:
    flags = (*FAKE, "--drain=handoff", "--drain-timeout=600", "--max-running-requests=2")
    async with (
        agent(tmp_path, *flags, settings={}) as running,
        session(running) as client,
    ):
        for handle in range(4):  # two run, two wait
            await client.submit(handle, [handle + 1, 2], max_tokens=20_000)
        await client.until(lambda: len(client.token_ids) >= 2 and len(client.accepted) == 4)
        running.process.send_signal(signal.SIGTERM)
        await client.until(lambda: len(client.moved) == 4)
        assert sorted(client.moved) == [0, 1, 2, 3]
        assert client.draining
        assert not client.rejected
        assert await running.wait_for_exit() == 0


@pytest.mark.integration
async def test_a_unary_generation_ends_with_what_it_has(tmp_path: Path) -> None:
    async with agent(tmp_path, *FAKE, "--drain=handoff", settings={}) as running:
        submit = worker_pb2.Submit(prompt_ids=[1, 2])
        submit.sampling.max_tokens = 20_000
        call = running.stub.Generate(worker_pb2.WorkerGenerateRequest(submit=submit))
        answers = aiter(call)
        assert (await anext(answers)).token_ids
        await running.stub.Drain(worker_pb2.DrainRequest())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            [answer async for answer in answers]
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert running.process.returncode is None  # the RPC alone does not end it


@pytest.mark.integration
async def test_a_second_sigterm_ends_a_drain_at_once(tmp_path: Path) -> None:
    async with (
        agent(tmp_path, *FAKE, "--drain-timeout=600", settings={}) as running,
        session(running) as client,
    ):
        await client.submit(0, [1, 2], max_tokens=8000)
        await client.until(lambda: 0 in client.token_ids)
        ranks = running.ranks()
        running.process.send_signal(signal.SIGTERM)
        await client.until(lambda: client.draining)
        assert not client.moved  # it finishes what it has, unless told to hand it back
        running.process.send_signal(signal.SIGTERM)
        assert await running.wait_for_exit() == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive
