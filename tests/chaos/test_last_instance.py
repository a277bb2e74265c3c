"""One instance of each service, and that one goes: streams wait for its return, or end by rule."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.chaos import leftovers
from tests.chaos.cases import Case, judge, prompt_ids_of
from tests.chaos.client import Answer, Manner, Unanswered, ask, get
from tests.chaos.fleet import Fleet, Shape, running_fleet
from tests.chaos.instance import Instance, until
from tests.chaos.oracle import expect

pytestmark = pytest.mark.asyncio(loop_scope="module")

EAGER = Manner("eager")
PATIENCE = 60.0
_SHAPE = Shape(
    workers=1,
    tokenizers=1,
    detokenizers=1,
    gateways=1,
    worker_flags=(
        *("--engine=fake", "--fake-step-ms=20"),
        *("--max-running-requests=8", "--max-queue=8", "--drain-timeout=60"),
    ),
    gateway_flags=("--hold-timeout=30", "--drain-timeout=4", "--admission-queue=8"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with running_fleet(_SHAPE, random.Random(0)) as fleet:
        yield fleet


def case(prompt: str = "a prompt", max_tokens: int = 150, **fields: Any) -> Case:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return Case("/v1/completions", body, EAGER)


def one(fleet: Fleet, role: str) -> Instance:
    (instance,) = [instance for instance in fleet.instances if instance.role == role]
    return instance


async def send(fleet: Fleet, request: Case) -> Answer:
    async with asyncio.timeout(PATIENCE):
        return await ask(one(fleet, "gateway").address, request.path, request.body, request.manner)


def assert_undisturbed(request: Case, answer: Answer) -> None:
    assert (answer.status, answer.error) == (200, {})
    assert not judge(request, prompt_ids_of(request), answer).problems


async def streaming(fleet: Fleet, requests: list[Case]) -> list[asyncio.Task[Answer]]:
    """The requests as tasks, all of which have begun to stream."""
    gateway = one(fleet, "gateway")
    name = "shoal_gateway_time_to_first_token_seconds_count"
    before = (await gateway.metrics())[name]
    tasks = [asyncio.create_task(send(fleet, request)) for request in requests]

    async def all_have_begun() -> bool:
        return (await gateway.metrics())[name] >= before + len(requests)

    await until(all_have_begun, PATIENCE, "every stream has begun")
    return tasks


async def test_streams_wait_for_the_only_worker(fleet: Fleet) -> None:
    requests = [case(f"number {number}") for number in range(6)]
    streams = await streaming(fleet, requests)
    worker = one(fleet, "worker")
    starts = worker.starts
    worker.kill()
    new = case("one that comes while no worker is there", 10)
    answer = await send(fleet, new)
    assert_undisturbed(new, answer)
    for request, stream in zip(requests, streams, strict=True):
        assert_undisturbed(request, await stream)
    assert worker.starts == starts + 1
    await leftovers.nothing_held(fleet)


async def test_a_resume_waits_no_longer_than_its_deadline(fleet: Fleet) -> None:
    request = case(timeout=2.0)
    (stream,) = await streaming(fleet, [request])
    worker = one(fleet, "worker")
    starts = worker.starts
    worker.hold_down()
    answer = await stream
    worker.let_up()
    assert answer.error["type"] == "timeout_error"
    assert (answer.status, answer.dones) == (200, 1)
    assert not answer.choices[0].ends  # no invented finish_reason
    assert not judge(request, prompt_ids_of(request), answer).problems
    await worker.restarted(starts)
    await fleet.ready()


async def test_a_frozen_worker_does_not_hold_up_a_deadline(fleet: Fleet) -> None:
    """504 before the first byte; streams and plain answers alike, whatever is frozen."""
    for role in ("worker", "tokenizer", "detokenizer"):
        instance = one(fleet, role)
        instance.send(signal.SIGSTOP)
        try:
            for stream in (True, False):
                answer = await send(fleet, case(timeout=0.5, stream=stream))
                error = answer.error["type"]
                assert error == "timeout_error", (role, stream, answer)
                assert answer.status == 504 or (stream and role != "tokenizer")
        finally:
            instance.send(signal.SIGCONT)
    await fleet.ready()
    await leftovers.nothing_held(fleet)


async def test_texts_wait_for_the_only_detokenizer(fleet: Fleet) -> None:
    """Plain ones, ones with log-probabilities, whose spelling it also knows, and stop strings."""
    text = "a prompt with a stop string"
    ids = prompt_ids_of(case(text))
    late = expect(ids, 150).text[120:123]
    requests = [
        case(),
        case("with log-probabilities", logprobs=2),
        case("two of them", n=2, max_tokens=60),
        case(text, stop=[late]),
    ]
    streams = await streaming(fleet, requests)
    detokenizer = one(fleet, "detokenizer")
    starts = detokenizer.starts
    detokenizer.kill()
    for request, stream in zip(requests, streams, strict=True):
        assert_undisturbed(request, await stream)
    assert detokenizer.starts == starts + 1
    await leftovers.nothing_held(fleet)


async def test_with_a_hold_all_tokenizers_may_be_gone_for_five_seconds(fleet: Fleet) -> None:
    tokenizer = one(fleet, "tokenizer")
    running = case("one that streams meanwhile", 350)
    (stream,) = await streaming(fleet, [running])
    tokenizer.hold_down()
    began = time.monotonic()
    requests = [case(f"number {number}", 10) for number in range(4)]
    waiting = [asyncio.create_task(send(fleet, request)) for request in requests]
    ids = case([1, 2, 3], 10)  # type: ignore[arg-type]  # ids need no tokenizer
    answer = await send(fleet, ids)
    assert len(answer.choices[0].ids) == 10
    await asyncio.sleep(max(0.0, 5 - (time.monotonic() - began)))  # that they are gone
    assert not any(task.done() for task in waiting)
    tokenizer.let_up()
    for request, task in zip(requests, waiting, strict=True):
        assert_undisturbed(request, await task)
    assert_undisturbed(running, await stream)


async def test_a_request_that_outlives_its_moves_ends_with_one_error(fleet: Fleet) -> None:
    """Three moves; the fourth loss ends it."""
    request = case(max_tokens=1000)
    (stream,) = await streaming(fleet, [request])
    worker = one(fleet, "worker")
    gateway = one(fleet, "gateway")
    for _ in range(4):

        async def is_running() -> bool:
            return (await worker.metrics()).get('shoal_worker_handles{model_name="byte"}') == 1

        await until(is_running, PATIENCE, "the request runs again")
        starts = worker.starts
        worker.kill()
        await worker.restarted(starts)
    answer = await stream
    assert answer.error["type"] == "service_unavailable_error"
    assert "moved 3 times" in answer.error["message"]
    assert answer.dones == 1
    assert not answer.choices[0].ends
    expected = judge(request, prompt_ids_of(request), answer)
    assert (expected.lost, expected.doubled) == (0, 0)
    assert (await get(gateway.address, "/livez"))[0] == 200


async def test_overload_is_told_at_once_and_passes(fleet: Fleet) -> None:
    """Some run, some wait, the rest hear 429 meanwhile; a worker's death changes nothing."""
    requests = [case(f"number {number}", 100) for number in range(60)]
    tasks = [asyncio.create_task(send(fleet, request)) for request in requests]
    by_task = dict(zip(tasks, requests, strict=True))
    first_done: list[int] = []
    killed = False
    for task in asyncio.as_completed(tasks):
        answer = await task
        first_done.append(answer.status)
        if answer.status == 200 and not killed:
            killed = True
            one(fleet, "worker").kill()
    refused = [task.result() for task in tasks if task.result().status == 429]
    served = [task for task in tasks if task.result().status == 200]
    assert len(refused) + len(served) == len(tasks)
    assert len(served) >= 16
    assert refused
    assert set(first_done[: len(refused)]) == {429}  # before any of the others was through
    assert all(answer.error["code"] == "overloaded" for answer in refused)
    for task in served:
        assert_undisturbed(by_task[task], task.result())
    await fleet.ready()
    for number in range(8):
        again = case(f"after it, number {number}", 10)
        assert_undisturbed(again, await send(fleet, again))
    await leftovers.nothing_held(fleet)


@pytest.mark.parametrize("role", ["worker", "detokenizer"])
async def test_a_drained_service_finishes_its_work_and_a_second_signal_ends_it(
    fleet: Fleet, role: str
) -> None:
    """SIGTERM: the stream goes on there. A second: the process ends, and the stream elsewhere."""
    instance = one(fleet, role)
    request = case(max_tokens=250)
    (stream,) = await streaming(fleet, [request])
    starts = instance.starts
    instance.send(signal.SIGTERM, exits=(128 + signal.SIGTERM,))

    async def drains() -> bool:
        return not await instance.is_ready()

    await until(drains, PATIENCE, f"{instance.name} drains")
    instance.send(signal.SIGTERM)
    await instance.restarted(starts)
    assert_undisturbed(request, await stream)
    await fleet.ready()


async def test_a_gateway_lets_its_streams_finish(fleet: Fleet) -> None:
    gateway = one(fleet, "gateway")
    request = case(max_tokens=100)
    (stream,) = await streaming(fleet, [request])
    address, starts = gateway.address, gateway.starts
    gateway.send(signal.SIGTERM, exits=(0,))

    async def drains() -> bool:
        return (await get(address, "/readyz?scope=gateway"))[0] == 503

    await until(drains, PATIENCE, "the gateway says that it drains")
    late = await ask(address, request.path, request.body, EAGER)
    assert late.status == 503
    assert_undisturbed(request, await stream)
    await gateway.restarted(starts)
    await fleet.ready()


async def test_a_stream_that_outlives_the_drain_ends_with_one_error(fleet: Fleet) -> None:
    gateway = one(fleet, "gateway")
    request = case(max_tokens=2000)
    (stream,) = await streaming(fleet, [request])
    starts = gateway.starts
    gateway.send(signal.SIGTERM, exits=(0,))
    answer = await stream
    assert answer.error["type"] == "service_unavailable_error", json.dumps(answer.error)
    assert answer.dones == 1
    await gateway.restarted(starts)
    await fleet.ready()
    await leftovers.nothing_held(fleet)


async def test_a_second_signal_ends_a_gateway_at_once(fleet: Fleet) -> None:
    gateway = one(fleet, "gateway")
    (stream,) = await streaming(fleet, [case(max_tokens=2000)])
    address, starts = gateway.address, gateway.starts
    gateway.send(signal.SIGTERM, exits=(128 + signal.SIGTERM,))

    async def drains() -> bool:
        return (await get(address, "/readyz?scope=gateway"))[0] == 503

    await until(drains, PATIENCE, "the gateway drains")
    gateway.send(signal.SIGTERM)
    with pytest.raises((Unanswered, OSError, EOFError)):
        await stream
    await gateway.restarted(starts)
    await fleet.ready()
    await leftovers.nothing_held(fleet)  # the worker has given the lost gateway's request up
