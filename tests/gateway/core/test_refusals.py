"""Workers that refuse: another is tried, within the budget, and the circuit breaks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protos import common_pb2
from services.common.errors import InternalError, Overloaded, ShoalError, Unavailable
from services.gateway.retry_budget import FLOOR, SHARE
from tests.gateway.core.conftest import Rig, collect, joined, make_rig, request
from tests.gateway.core.fakes import expected_ids

UNAVAILABLE = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="not now")
INTERNAL = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="a fault")
OVERLOADED = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, message="full")


def sample(rig: Rig, name: str, **labels: str) -> float:
    value = rig.registry.get_sample_value(name, labels)
    assert value is not None, name
    return value


@pytest.mark.parametrize("refusal", [UNAVAILABLE, INTERNAL, OVERLOADED])
async def test_a_refusal_before_the_first_token_is_tried_elsewhere(
    tmp_path: Path, refusal: common_pb2.Error
) -> None:
    async with make_rig(tmp_path, workers=2, routing="round-robin") as rig:
        rig.workers[0].reject_with = refusal
        for _ in range(4):
            chunks = await collect(await rig.core.start(request()))
            assert joined(chunks)[1] == expected_ids("hello", 10)
        assert sample(rig, "shoal_gateway_retries_total", outcome="made") >= 1
        await rig.settled()


async def test_failures_in_a_row_open_the_circuit_and_a_probe_closes_it(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2, routing="round-robin") as rig:
        bad = rig.workers[0]
        bad.reject_with = UNAVAILABLE
        for _ in range(8):
            await collect(await rig.core.start(request()))
        assert len(bad.submits) == 3
        assert sample(rig, "shoal_gateway_breakers", state="open") == 1
        assert sample(rig, "shoal_gateway_breaker_openings_total") == 1
        assert rig.core.readiness().ready  # the other one serves
        bad.reject_with = None
        await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 2)
        for _ in range(2):
            await collect(await rig.core.start(request()))
        assert len(bad.submits) == 4
        assert sample(rig, "shoal_gateway_breakers", state="closed") == 2
        await rig.settled()


async def test_openings_are_counted_also_of_a_worker_that_has_gone(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2, routing="round-robin") as rig:
        bad, good = rig.workers
        bad.reject_with = UNAVAILABLE
        while rig.core.fleet.breaker_states()["open"] == 0:
            await collect(await rig.core.start(request()))
        rig.core.fleet.workers._apply(frozenset({good.server.address}))
        assert len(list(rig.core.fleet.workers)) == 1
        assert sample(rig, "shoal_gateway_breaker_openings_total") == 1


async def test_a_lone_worker_whose_circuit_is_open_is_told_by_readiness(rig: Rig) -> None:
    rig.worker.reject_with = UNAVAILABLE
    while rig.core.readiness().ready:
        with pytest.raises(Unavailable):
            await rig.core.start(request())
    assert rig.core.readiness().reasons == ("every worker's circuit breaker is open",)
    with pytest.raises(Unavailable) as error:
        await rig.core.start(request())
    assert error.value.retry_after
    rig.worker.reject_with = None
    await rig.until_fleet(lambda fleet: fleet.workers.ready)
    await collect(await rig.core.start(request()))
    assert rig.core.readiness().ready


async def test_overload_is_no_failure(rig: Rig) -> None:
    rig.worker.reject_with = OVERLOADED
    for _ in range(10):
        with pytest.raises(Overloaded):
            await rig.core.start(request())
    assert sample(rig, "shoal_gateway_breakers", state="closed") == 1


async def test_a_session_lost_before_any_token_is_one_failure_however_many_wait(
    tmp_path: Path,
) -> None:
    async with make_rig(tmp_path, workers=2, routing="round-robin") as rig:
        for worker in rig.workers:
            worker.auto = False
        tasks = [asyncio.create_task(rig.core.start(request(timeout=20))) for _ in range(20)]
        generations = await asyncio.gather(*tasks)
        await rig.workers[0].server.kill()
        await rig.workers[0].server.start()
        await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 2)
        assert sample(rig, "shoal_gateway_breakers", state="closed") == 2
        for worker in rig.workers:
            worker.auto = True
        for generation in generations:
            assert joined(await collect(generation))[1] == expected_ids("hello", 10)
        assert sample(rig, "shoal_gateway_retries_total", outcome="made") == 0
        assert sample(rig, "shoal_gateway_resumes_total", peer="worker") >= 10
        await rig.settled()


async def test_retries_end_with_the_budget_and_resumes_do_not(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2, routing="round-robin") as rig:
        for worker in rig.workers:
            worker.reject_with = OVERLOADED  # opens no circuit
        count = 200
        for _ in range(count):
            with pytest.raises(Overloaded):
                await rig.core.start(request())
        submits = sum(len(worker.submits) for worker in rig.workers)
        retries = submits - count
        assert retries <= SHARE * count + FLOOR + 2  # a slow machine refills a little
        assert retries >= SHARE * count
        assert sample(rig, "shoal_gateway_retries_total", outcome="made") == retries
        assert sample(rig, "shoal_gateway_retries_total", outcome="denied") == count - retries
        for worker in rig.workers:
            worker.reject_with = None
            worker.auto = False
        tasks = [asyncio.create_task(rig.core.start(request())) for _ in range(30)]
        generations = await asyncio.gather(*tasks)
        for worker in rig.workers:
            worker.auto = True
        await rig.workers[0].server.kill()
        for generation in generations:
            assert joined(await collect(generation))[1] == expected_ids("hello", 10)


async def test_a_fault_after_acceptance_is_tried_elsewhere_only_before_the_first_token(
    tmp_path: Path,
) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        for worker in rig.workers:
            worker.auto = False
        generation = await rig.core.start(request(max_tokens=2))
        (busy,) = [worker for worker in rig.workers if worker.running]
        (other,) = [worker for worker in rig.workers if worker is not busy]
        (handle,) = busy.running
        busy.running.clear()
        busy.pending.step.rejected.add(handle=handle, error=INTERNAL)
        busy.send()
        await rig.until(lambda: other.running)
        other.step()
        await anext(generation)
        (handle,) = other.running
        other.running.clear()
        other.pending.step.rejected.add(handle=handle, error=INTERNAL)
        other.send()
        with pytest.raises(InternalError):
            await collect(generation)
        rig.assert_nothing_left()


async def test_a_lone_workers_fault_is_told_at_once(rig: Rig) -> None:
    rig.worker.reject_with = INTERNAL
    with pytest.raises(ShoalError, match="a fault"):
        await rig.core.start(request())
    assert len(rig.worker.submits) == 1
