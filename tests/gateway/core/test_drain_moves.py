"""Peers that drain: what they hand back goes on elsewhere, and costs no move."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protos import common_pb2
from services.gateway.domain import TextOptions
from tests.gateway.core.conftest import Rig, collect, joined, make_rig, request
from tests.gateway.core.fakes import FakeWorker, expected_ids, expected_text
from tests.gateway.core.test_resume import read_until, worker_of


def hand_back(worker: FakeWorker) -> None:
    """Drains as a worker with `--drain handoff` does."""
    worker.pending.step.moved.extend(worker.running)
    worker.running.clear()
    worker.drain()


def sample(rig: Rig, name: str, peer: str) -> float:
    value = rig.registry.get_sample_value(name, {"peer": peer})
    assert value is not None
    return value


async def test_a_stream_handed_back_goes_on_elsewhere_for_nothing(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2, max_resumes=0) as rig:
        generation = await rig.core.start(request(max_tokens=60, seed=5, logprobs=0))
        chunks = await read_until(generation, 7)
        worker = worker_of(rig)
        hand_back(worker)
        chunks += await collect(generation)
        assert joined(chunks) == (expected_text("hello", 60), expected_ids("hello", 60))
        logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
        assert [entry.logprob for entry in logprobs] == [-float(i) for i in range(60)]
        assert sample(rig, "shoal_gateway_handoffs_total", "worker") == 1
        assert sample(rig, "shoal_gateway_resumes_total", "worker") == 0
        assert not worker.aborts  # its handle was free
        await rig.settled()


async def test_with_no_other_worker_it_waits_for_one(rig: Rig) -> None:
    generation = await rig.core.start(request(max_tokens=40))
    chunks = await read_until(generation, 3)
    hand_back(rig.worker)
    await rig.until_fleet(lambda fleet: not fleet.workers.ready)
    await rig.worker.server.kill()
    rig.worker.info.epoch = 2
    await rig.worker.server.start()
    chunks += await collect(generation)
    assert joined(chunks)[1] == expected_ids("hello", 40)
    await rig.settled()


async def test_handed_back_before_it_was_accepted(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2, max_resumes=0) as rig:
        for worker in rig.workers:
            worker.accept = False
        starting = asyncio.create_task(rig.core.start(request()))
        await rig.until(lambda: any(worker.submits for worker in rig.workers))
        (busy,) = [worker for worker in rig.workers if worker.submits]
        (other,) = [worker for worker in rig.workers if worker is not busy]
        other.accept = True
        busy.pending.step.moved.append(busy.submits[0].handle)
        busy.drain()
        assert joined(await collect(await starting))[1] == expected_ids("hello", 10)
        await rig.settled()


async def test_a_refusal_by_a_worker_that_drains_is_no_failure(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2, max_resumes=0) as rig:
        for worker in rig.workers:
            worker.accept = False
        starting = asyncio.create_task(rig.core.start(request()))
        await rig.until(lambda: any(worker.submits for worker in rig.workers))
        (busy,) = [worker for worker in rig.workers if worker.submits]
        (other,) = [worker for worker in rig.workers if worker is not busy]
        other.accept = True
        error = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="draining")
        busy.pending.step.rejected.add(handle=busy.submits[0].handle, error=error)
        busy.drain()
        assert joined(await collect(await starting))[1] == expected_ids("hello", 10)
        denied = rig.registry.get_sample_value("shoal_gateway_retries_total", {"outcome": "made"})
        assert denied == 0
        await rig.settled()


async def test_what_waits_at_a_draining_worker_starts_elsewhere(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2, routing="round-robin") as rig:
        for worker in rig.workers:
            worker.auto = False
        running = await rig.core.start(request(max_tokens=30))
        busy = worker_of(rig)
        (other,) = [worker for worker in rig.workers if worker is not busy]
        busy.step()
        chunks = await read_until(running, 1)
        (await rig.core.start(request())).close()  # the other one's turn
        waiting = await rig.core.start(request("wait"))
        assert len(busy.running) == 2  # nothing tells of the second: it waits there
        busy.drain()
        await rig.until(lambda: other.running)
        await rig.until(lambda: len(busy.running) == 1)
        for worker in rig.workers:
            worker.auto = True
        assert joined(await collect(waiting))[1] == expected_ids("wait", 10)
        chunks += await collect(running)  # it had begun, and finishes where it is
        assert joined(chunks)[1] == expected_ids("hello", 30)
        assert sample(rig, "shoal_gateway_handoffs_total", "worker") == 1
        assert len(other.submits) == 2
        await rig.settled()


async def test_a_resume_that_no_other_worker_could_take_stays_where_it_waits(
    tmp_path: Path,
) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        worker, other = rig.workers
        other.info.fingerprint = "other"
        await other.server.kill()
        await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 1)
        generation = await rig.core.start(request(max_tokens=400, timeout=10.0))
        chunks = await read_until(generation, 3)
        await worker.server.kill()
        worker.auto = False
        await worker.server.start()
        await rig.until(lambda: worker.running)
        await other.server.start()
        await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 2)
        worker.drain()
        await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 1)
        worker.auto = True
        chunks += await collect(generation)
        assert joined(chunks)[1] == expected_ids("hello", 400)
        assert not other.submits
        await rig.settled()


@pytest.mark.parametrize("stop", [(), ("zq",)])
async def test_a_text_leaves_a_draining_detokenizer(tmp_path: Path, stop: tuple[str, ...]) -> None:
    async with make_rig(tmp_path, detokenizers=2, max_resumes=0) as rig:
        text = TextOptions(stop=stop)
        generation = await rig.core.start(request(max_tokens=80, text=text))
        chunks = await read_until(generation, 7)
        (busy,) = [fake for fake in rig.detokenizers if fake.texts]
        busy.drain()
        await rig.until(lambda: not busy.texts)
        chunks += await collect(generation)
        assert joined(chunks) == (expected_text("hello", 80), expected_ids("hello", 80))
        assert sample(rig, "shoal_gateway_handoffs_total", "detokenizer") == 1
        await rig.settled()


async def test_a_lone_draining_detokenizer_keeps_its_texts(rig: Rig) -> None:
    generation = await rig.core.start(request(max_tokens=50))
    chunks = await read_until(generation, 3)
    rig.detokenizer.drain()
    chunks += await collect(generation)
    assert joined(chunks)[1] == expected_ids("hello", 50)
