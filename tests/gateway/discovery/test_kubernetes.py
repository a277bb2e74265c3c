"""EndpointSlices of a fake API server: changes, faults, and what they must not do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.gateway.discovery.kubernetes import (
    EndpointSlices,
    KubernetesApi,
    WatchTimes,
    addresses,
)
from tests.gateway.discovery.fake_api import FakeApi, Json, endpoint, endpoint_slice

TIMES = WatchTimes(answer=2, min_round=0, first_retry=0.01, max_retry=0.05)


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


class Consumer:
    """Pulls a source all the time, as a pool does."""

    def __init__(self, source: EndpointSlices) -> None:
        self._sets: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self._source = source

    async def run(self) -> None:
        async for found in self._source.watch():
            self._sets.put_nowait(found)

    async def next(self) -> frozenset[str]:
        return await self._sets.get()

    @property
    def silent(self) -> bool:
        return self._sets.empty()


@asynccontextmanager
async def consuming(
    url: str, times: WatchTimes = TIMES, token: Path | None = None
) -> AsyncIterator[Consumer]:
    source = EndpointSlices(KubernetesApi(url, token), "llm", "worker", "grpc", times=times)
    consumer = Consumer(source)
    task = asyncio.create_task(consumer.run())
    try:
        async with asyncio.timeout(10):
            yield consumer
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def watching(
    api: FakeApi, times: WatchTimes = TIMES, token: Path | None = None
) -> AsyncIterator[Consumer]:
    async with api.serve() as url, consuming(url, times, token) as consumer:
        yield consumer


async def test_pods_come_get_ready_terminate_and_go(api: FakeApi) -> None:
    api.put(endpoint_slice("a", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False)))
    async with watching(api) as watch:
        assert await watch.next() == {"10.0.0.1:50051"}
        await api.watched()
        api.put(endpoint_slice("a", endpoint("10.0.0.1"), endpoint("10.0.0.2")))
        assert await watch.next() == {"10.0.0.1:50051", "10.0.0.2:50051"}
        api.put(endpoint_slice("b", endpoint("10.0.0.3")))
        assert await watch.next() == {"10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051"}
        api.put(
            endpoint_slice(
                "a", endpoint("10.0.0.1", ready=True, terminating=True), endpoint("10.0.0.2")
            )
        )
        assert await watch.next() == {"10.0.0.2:50051", "10.0.0.3:50051"}
        api.delete("b")
        assert await watch.next() == {"10.0.0.2:50051"}
        assert api.num_lists == 1


async def test_a_version_too_old_lists_again(api: FakeApi) -> None:
    async with watching(api) as watch:
        assert await watch.next() == frozenset()
        await api.watched()
        api.put_silently(endpoint_slice("a", endpoint("10.0.0.1")))
        api.expire()
        assert await watch.next() == {"10.0.0.1:50051"}
        assert api.num_lists == 2


async def test_a_dropped_watch_lists_again(api: FakeApi) -> None:
    async with watching(api) as watch:
        await watch.next()
        await api.watched()
        api.put_silently(endpoint_slice("a", endpoint("10.0.0.1")))
        api.drop_watches()
        assert await watch.next() == {"10.0.0.1:50051"}


async def test_a_lost_event_is_made_good_by_the_next_list(api: FakeApi) -> None:
    async with watching(api, replace(TIMES, relist=1)) as watch:
        await watch.next()
        await api.watched()
        api.put_silently(endpoint_slice("a", endpoint("10.0.0.1")))
        assert await watch.next() == {"10.0.0.1:50051"}


async def test_an_unreachable_server_keeps_the_last_set_and_returns_later() -> None:
    before, after = FakeApi(), FakeApi()
    before.put(endpoint_slice("a", endpoint("10.0.0.1")))
    after.put(endpoint_slice("a", endpoint("10.0.0.2")))
    async with AsyncExitStack() as stack:
        async with before.serve() as url:
            watch = await stack.enter_async_context(consuming(url))
            assert await watch.next() == {"10.0.0.1:50051"}
            await before.watched()
        assert watch.silent  # what was known stays in use
        async with after.serve(int(url.rpartition(":")[2])):
            assert await watch.next() == {"10.0.0.2:50051"}


@pytest.mark.parametrize("faults", [[403], [500, 503], [401, 429, 504]])
async def test_refusals_are_outlived(
    api: FakeApi, faults: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    api.put(endpoint_slice("a", endpoint("10.0.0.1")))
    api.faults = list(faults)
    async with watching(api) as watch:
        assert await watch.next() == {"10.0.0.1:50051"}
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1  # one line for an outage, not one a try
    assert str(faults[0]) in warnings[0].getMessage()


async def test_a_watch_that_ends_at_once_is_not_tried_in_a_hot_loop(api: FakeApi) -> None:
    times = replace(TIMES, min_round=60, first_retry=30, max_retry=30)
    async with watching(api, times) as watch:
        await watch.next()
        await api.watched()
        api.drop_watches()
        await asyncio.wait([asyncio.ensure_future(watch.next())], timeout=0.2)
        assert (api.num_lists, api.num_watches) == (1, 1)


async def test_the_token_is_read_for_each_round(api: FakeApi, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    async with watching(api, token=token) as watch:
        await watch.next()
        await api.watched()
        token.write_text("two\n")
        api.put_silently(endpoint_slice("a", endpoint("10.0.0.1")))
        api.drop_watches()
        await watch.next()
    assert api.tokens[0] == "Bearer one"
    assert "Bearer two" in api.tokens


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([endpoint_slice("a", endpoint("1.1.1.1", ready=None))], {"1.1.1.1:50051"}),
        (
            [
                endpoint_slice("a", endpoint("1.1.1.1")),
                endpoint_slice("b", endpoint("fd00::1"), kind="IPv6"),
            ],
            {"1.1.1.1:50051"},
        ),
        ([endpoint_slice("b", endpoint("fd00::1"), kind="IPv6")], {"[fd00::1]:50051"}),
        ([{**endpoint_slice("a", endpoint("1.1.1.1")), "ports": None}], set()),
        ([{**endpoint_slice("a"), "endpoints": None}], set()),
    ],
    ids=["ready-absent", "dual-stack", "ipv6", "no-ports", "no-endpoints"],
)
def test_slices_to_addresses(slices: list[Json], expected: set[str]) -> None:
    assert addresses(slices, "grpc") == expected
