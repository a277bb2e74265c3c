"""A fleet that is full: turns between tenants, honest refusals, and nothing kept afterwards.

Real workers with the fake engine, so that what is full is a scheduler and not a script.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from services.common.errors import DeadlineExceeded, Overloaded, Unavailable
from services.gateway import admission as admission_module
from services.gateway.admission import Admission
from services.gateway.config import GatewayConfig, parse_weights
from services.gateway.core import Core
from services.gateway.domain import GenerationRequest, Grammar
from tests.gateway.core.conftest import collect, request
from tests.gateway.core.fakes import Activity, FakeDetokenizer, FakeTokenizer, serving
from tests.worker.agent_client import agent

RUNNING = 8  # requests that a worker runs at once; one more may wait there


@asynccontextmanager
async def full_fleet(
    directory: Path,
    *worker_flags: str,
    workers: int = 1,
    step_ms: float = 2.0,
    **options: Any,
) -> AsyncIterator[tuple[Core, CollectorRegistry]]:
    """A core in front of real workers."""
    activity = Activity()
    tokenizer = FakeTokenizer(directory / "t", activity)
    detokenizer = FakeDetokenizer(directory / "d", activity)
    async with AsyncExitStack() as stack:
        addresses = []
        for number in range(workers):
            home = directory / f"w{number}"
            home.mkdir()
            flags = (
                *("--model=byte", f"--fake-step-ms={step_ms}"),
                *(f"--max-running-requests={RUNNING}", "--served-model-name=fake"),
                *worker_flags,
            )
            await stack.enter_async_context(agent(home, *flags, settings={}))
            addresses.append(f"unix:{home}/worker.sock")
        await stack.enter_async_context(serving(tokenizer, detokenizer))
        config = GatewayConfig(
            worker_addresses=tuple(addresses),
            tokenizer_addresses=(tokenizer.server.address,),
            detokenizer_addresses=(detokenizer.server.address,),
            **options,
        )
        registry = CollectorRegistry()
        core = Core(config, registry)
        running = asyncio.create_task(core.run())
        try:
            async with asyncio.timeout(30):
                seen = -1
                while len(core.fleet.workers.ready) < workers or core.fleet.missing():
                    seen = await core.fleet.change(seen)
            yield core, registry
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def finish(core: Core, wanted: GenerationRequest, order: list[str]) -> None:
    """Runs a request to its end and notes whose it was."""
    generation = await core.start(wanted)
    async for _ in generation:
        pass
    order.append(wanted.tenant)


def of(tenant: str, number: int, **changes: Any) -> GenerationRequest:
    return request(f"{tenant}{number}", tenant=tenant, ignore_eos=True, **changes)


def gauge(registry: CollectorRegistry, name: str, **labels: str) -> float:
    value = registry.get_sample_value(name, labels)
    assert value is not None, name
    return value


@pytest.mark.integration
async def test_a_flood_does_not_keep_the_other_tenant_out(tmp_path: Path) -> None:
    async with full_fleet(tmp_path) as (core, registry):
        order: list[str] = []
        flood = [asyncio.create_task(finish(core, of("a", n), order)) for n in range(500)]
        async with asyncio.timeout(60):
            while len(order) < 20:  # the flood has the fleet
                await asyncio.wait(
                    [t for t in flood if not t.done()], return_when="FIRST_COMPLETED"
                )
        assert gauge(registry, "shoal_gateway_requests_queued") > 400
        before = len(order)
        few = [asyncio.create_task(finish(core, of("b", n), order)) for n in range(20)]
        async with asyncio.timeout(120):
            await asyncio.gather(*few)
            served = Counter(order[before:])
            print(f"while b's 20 were served: {served['a']} of a's")
            # One of each in turn, and what ran or came while b's prompts were encoded.
            assert served["b"] == 20
            assert served["a"] <= 20 + 6 * RUNNING  # in order of arrival it would be 480
            await asyncio.gather(*flood)
        assert Counter(order) == {"a": 500, "b": 20}
        assert gauge(registry, "shoal_gateway_requests_queued") == 0
        assert gauge(registry, "shoal_gateway_queue_seconds_count") > 400
        assert gauge(registry, "shoal_gateway_handles", peer="worker") == 0


@pytest.mark.integration
async def test_weights_are_kept_while_both_wait(tmp_path: Path) -> None:
    async with full_fleet(tmp_path, tenant_weights=("a=3",)) as (core, _):
        order: list[str] = []
        tasks = [
            asyncio.create_task(finish(core, of(tenant, number), order))
            for number in range(120)
            for tenant in "ab"
        ]
        async with asyncio.timeout(120):
            await asyncio.gather(*tasks)
        share = Counter(order[2 * RUNNING : 2 * RUNNING + 100])["a"]
        print(f"weight 3 of 4: {share} of 100")
        assert 65 <= share <= 85


@pytest.mark.integration
async def test_a_full_queue_refuses_at_once_and_recovers_wholly(tmp_path: Path) -> None:
    async with full_fleet(tmp_path, step_ms=20.0, admission_queue=40) as (core, registry):
        order: list[str] = []
        refusals: list[Overloaded] = []
        started = time.monotonic()

        async def attempt(number: int) -> None:
            try:
                await finish(core, of("a", number, max_tokens=20), order)
            except Overloaded as error:
                assert not order, "a refusal came after a whole generation"
                refusals.append(error)

        async with asyncio.timeout(120):
            tasks = [asyncio.create_task(attempt(number)) for number in range(500)]
            while len(refusals) < 500 - 40 - RUNNING - 1:
                await asyncio.wait(
                    [t for t in tasks if not t.done()], return_when="FIRST_COMPLETED"
                )
            print(f"{len(refusals)} of 500 refused in {time.monotonic() - started:.2f} s")
            await asyncio.gather(*tasks)
            assert len(order) + len(refusals) == 500
            assert len(order) >= 40 + RUNNING
            assert all(1 <= (error.retry_after or 0) <= 60 for error in refusals)
            for number in range(10):
                await finish(core, of("a", number, max_tokens=2), order)
        assert gauge(registry, "shoal_gateway_requests_queued") == 0
        assert core.num_requests == 0


@pytest.mark.integration
async def test_grammars_that_take_long_keep_nobody_out_of_an_idle_engine(tmp_path: Path) -> None:
    async with full_fleet(tmp_path, "--grammar-timeout=20") as (core, registry):
        order: list[str] = []
        (worker,) = core.fleet.workers.ready
        submit, full = worker.submit, asyncio.Event()

        def watched(*request: Any) -> Any:
            submission = submit(*request)
            if worker.load > RUNNING:
                full.set()
            return submission

        worker.submit = watched  # type: ignore[method-assign,assignment]
        slow = [
            asyncio.create_task(finish(core, of("a", n, grammar=_takes_seconds(n)), order))
            for n in range(4 * RUNNING)
        ]
        async with asyncio.timeout(60):
            await full.wait()
            for number in range(2 * RUNNING):
                await finish(core, of("b", number), order)
        assert order == ["b"] * 2 * RUNNING
        assert not any(task.done() for task in slow)
        assert gauge(registry, "shoal_gateway_requests_queued") == 0
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert gauge(registry, "shoal_gateway_handles", peer="worker") == 0


def _takes_seconds(number: int) -> Grammar:
    """One to be compiled by itself, until memory or time ends it."""
    return Grammar("regex", "a?" * 30_000 + "b" * number, "regex")


@pytest.mark.integration
async def test_one_prefix_shared_by_all_spreads_over_three_workers(tmp_path: Path) -> None:
    """By each worker's load in the mean over the time in which others wait.

    Not over the requests that are sent: who has just lost many at once is looked at with each
    that takes their place, and would seem idle next to one that is slow.
    """
    async with full_fleet(tmp_path, workers=3, step_ms=5.0) as (core, registry):
        loads: Counter[str] = Counter()  # times seconds
        _watch(core, loads)
        order: list[str] = []
        prompt = "one prompt shared by all " * 20
        tasks = [
            asyncio.create_task(
                finish(core, request(f"{prompt}{n}", ignore_eos=True, max_tokens=5 + n % 20), order)
            )
            for n in range(300)
        ]
        async with asyncio.timeout(120):
            await asyncio.gather(*tasks)
        most = max(loads.values()) * len(loads) / sum(loads.values())
        print(f"300 requests with one prefix: the busiest has {most:.2f} times the mean load")
        assert len(loads) == 3
        assert most <= 1.25
        assert gauge(registry, "shoal_gateway_prefixes") > 0


def _watch(core: Core, loads: Counter[str]) -> None:
    """Adds up the workers' loads over time, from request to request, while others wait."""
    since, last = time.monotonic(), dict[str, int]()

    def watch(submit: Callable[..., Any]) -> Callable[..., Any]:
        def watched(message: Any, sink: Any) -> Any:
            nonlocal since, last
            now = time.monotonic()
            loads.update({address: load * (now - since) for address, load in last.items()})
            submission = submit(message, sink)
            assert all(worker.load <= RUNNING + 1 for worker in core.fleet.workers.ready)
            waiting = core.admission.num_waiting
            ready = core.fleet.workers.ready if waiting else ()
            since, last = now, {worker.address: worker.load for worker in ready}
            return submission

        return watched

    for worker in core.fleet.workers.ready:
        worker.submit = watch(worker.submit)  # type: ignore[method-assign]


async def test_a_request_that_waits_can_leave_or_run_out_of_time(tmp_path: Path) -> None:
    workers = [_Full()]
    queue = Admission(lambda model: workers, 10, {}, lambda seconds: None)
    waiting = [asyncio.create_task(queue.enter("m", request())) for _ in range(3)]
    await asyncio.sleep(0)
    assert queue.num_waiting == 3
    waiting[0].cancel()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await queue.enter("m", request())
    await asyncio.wait([waiting[0]])
    assert queue.num_waiting == 2
    workers[0].room = 1
    queue.on_load(workers[0])
    assert await waiting[1]
    assert queue.num_waiting == 1
    queue.on_load(workers[0])
    assert await waiting[2]


async def test_one_who_was_called_and_left_holds_nobody_up() -> None:
    workers = [_Full()]
    queue = Admission(lambda model: workers, 10, {}, lambda seconds: None)
    first, second = (asyncio.create_task(queue.enter("m", request())) for _ in range(2))
    await asyncio.sleep(0)
    workers[0].room = 1
    queue.on_load(workers[0])
    first.cancel()  # after its turn was called, before it ran
    await asyncio.wait([first])
    assert await asyncio.wait_for(second, 5)


async def test_an_idle_fleet_never_queues() -> None:
    workers = [_Full(), _Full(room=1)]
    queue = Admission(lambda model: workers, 10, {}, lambda seconds: None)
    assert await queue.enter("m", request()) is False
    assert await Admission(lambda model: [], 0, {}, print).enter("m", request()) is False


async def test_a_queue_whose_workers_stay_away_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "PATIENCE_SECONDS", 0.05)
    workers = [_Full()]
    queue = Admission(lambda model: workers, 10, {}, lambda seconds: None)
    waiting = asyncio.create_task(queue.enter("m", request()))
    await asyncio.sleep(0)
    gone = workers.pop()
    queue.on_change()
    workers.append(gone)
    queue.on_change()  # it came back in time
    await asyncio.sleep(0.1)
    assert not waiting.done()
    workers.clear()
    queue.on_change()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting, 5)


async def test_the_wait_of_those_who_left_ends_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "PATIENCE_SECONDS", 0.05)
    workers = [_Full()]
    queue = Admission(lambda model: workers, 10, {}, lambda seconds: None)
    left = asyncio.create_task(queue.enter("m", request()))
    await asyncio.sleep(0)
    gone = workers.pop()
    queue.on_change()
    left.cancel()
    await asyncio.wait([left])
    workers.append(gone)
    queue.on_change()
    waiting = asyncio.create_task(queue.enter("m", request()))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    gone.room = 1
    queue.on_load(gone)
    assert await asyncio.wait_for(waiting, 5)


async def test_nobody_queues_for_workers_that_went_while_one_was_called() -> None:
    workers = [_Full()]
    queue = Admission(lambda model: workers, 10, {}, lambda seconds: None)
    called = asyncio.create_task(queue.enter("m", request()))
    await asyncio.sleep(0)
    workers[0].room = 1
    queue.on_load(workers[0])
    workers.clear()
    queue.on_change()
    async with asyncio.timeout(5):
        assert await queue.enter("m", request()) is False  # before the other has run
    assert await called


class _Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_retry_after_follows_the_pace_of_the_queue() -> None:
    clock, worker = _Clock(), _Full()
    queue = Admission(lambda model: [worker], 4, {}, lambda seconds: None, clock)
    waiting = [asyncio.create_task(queue.enter("m", request())) for _ in range(4)]
    await asyncio.sleep(0)
    assert queue.retry_after("m", request()) == 1  # nothing is known of its pace
    worker.room = 1
    queue.on_load(worker)
    worker.room = 0
    await waiting[0]
    clock.now += 0.75
    assert queue.retry_after("m", request()) == 4 * 0.75  # three wait, and then it
    waiting += [asyncio.create_task(queue.enter("m", request())) for _ in range(2)]
    with pytest.raises(Overloaded) as error:
        await asyncio.gather(*waiting)
    assert error.value.retry_after == 5 * 0.75
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_retry_after_counts_choices() -> None:
    clock, worker = _Clock(), _Full()
    queue = Admission(lambda model: [worker], 100, {}, lambda seconds: None, clock)
    first = asyncio.create_task(queue.enter("m", replace(request(), n=10)))
    last = asyncio.create_task(queue.enter("m", replace(request(), n=90)))
    await asyncio.sleep(0)
    worker.room = 10
    queue.on_load(worker)
    worker.room = 0
    await first
    clock.now += 0.5  # in which 10 choices were let go; 90 wait
    assert queue.retry_after("m", replace(request(), n=1)) == 91 * 0.5 / 10
    assert queue.retry_after("m", replace(request(), n=40)) == 130 * 0.5 / 10
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)


@pytest.mark.integration
async def test_a_deadline_ends_the_wait(tmp_path: Path) -> None:
    async with full_fleet(tmp_path, step_ms=50.0) as (core, registry):
        running = [await core.start(of("a", n, max_tokens=900)) for n in range(RUNNING + 1)]
        with pytest.raises(DeadlineExceeded):
            await core.start(of("a", 100, timeout=0.3))
        assert gauge(registry, "shoal_gateway_requests_queued") == 0
        for generation in running:
            await generation.aclose()
        await collect(await core.start(of("a", 101)))


class _Full:
    """A worker as admission sees it."""

    model = "m"

    def __init__(self, room: int = 0) -> None:
        self.room = room


@pytest.mark.parametrize("text", ["a", "a=", "a=x", "a=0", "a=-1", "a=inf", "a=nan"])
def test_a_weight_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--tenant-weights"):
        parse_weights((text,))
    assert parse_weights(("a=2", "b=0.5")) == {"a": 2.0, "b": 0.5}
