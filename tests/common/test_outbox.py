"""The outbox of a session: merging, heartbeats, flushing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from protos import worker_pb2
from services.common import rpc
from services.common.rpc import Outbox

Request = worker_pb2.WorkerSessionRequest


class Wire:
    """A write side that takes one message at a time and can be made to wait."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[list[int]] = asyncio.Queue()
        self.open = asyncio.Event()
        self.open.set()
        self.busy = asyncio.Event()

    async def write(self, message: Request) -> None:
        self.busy.set()
        await self.open.wait()
        self.busy.clear()
        self.written.put_nowait(list(message.aborts))


@asynccontextmanager
async def running(outbox: Outbox[Request], wire: Wire) -> AsyncIterator[None]:
    task = asyncio.create_task(outbox.run(wire.write))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def add(outbox: Outbox[Request], *aborts: int) -> None:
    outbox.pending.aborts.extend(aborts)
    outbox.notify()


async def test_what_is_added_before_a_write_goes_in_one_message() -> None:
    outbox, wire = Outbox(Request), Wire()
    async with running(outbox, wire):
        add(outbox, 1)
        add(outbox, 2)
        assert await wire.written.get() == [1, 2]


async def test_what_is_added_too_soon_after_a_write_waits_and_merges() -> None:
    outbox, wire = Outbox(Request, interval=0.2), Wire()
    async with running(outbox, wire):
        add(outbox, 1)
        assert await wire.written.get() == [1]
        started = asyncio.get_running_loop().time()
        add(outbox, 2)
        for _ in range(20):
            await asyncio.sleep(0)
        too_late = not wire.written.empty()  # this process was not run for longer than that
        add(outbox, 3)
        assert await wire.written.get() == ([2] if too_late else [2, 3])
        assert asyncio.get_running_loop().time() - started > 0.1


async def test_what_is_added_during_a_write_merges_into_the_next() -> None:
    outbox, wire = Outbox(Request), Wire()
    wire.open.clear()
    async with running(outbox, wire):
        add(outbox, 1)
        await wire.busy.wait()
        add(outbox, 2)
        add(outbox, 3)
        wire.open.set()
        assert await wire.written.get() == [1]
        assert await wire.written.get() == [2, 3]


async def test_flushed_waits_for_everything_added() -> None:
    outbox, wire = Outbox(Request), Wire()
    await outbox.flushed()  # nothing added yet
    wire.open.clear()
    async with running(outbox, wire):
        add(outbox, 1)
        await wire.busy.wait()
        add(outbox, 2)
        flushed = asyncio.create_task(outbox.flushed())
        await asyncio.sleep(0)
        assert not flushed.done()
        wire.open.set()
        await flushed
        assert [wire.written.get_nowait() for _ in range(2)] == [[1], [2]]


async def test_silence_makes_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "IDLE_HEARTBEAT_SECONDS", 0.01)
    outbox, wire = Outbox(Request), Wire()
    async with running(outbox, wire):
        assert await wire.written.get() == []
        assert await wire.written.get() == []
        add(outbox, 5)
        while (message := await wire.written.get()) == []:
            pass
        assert message == [5]


async def test_a_busy_session_beats_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "HEARTBEAT_SECONDS", 0.01)
    outbox, wire = Outbox(Request, busy=lambda: True), Wire()
    async with running(outbox, wire):
        assert await wire.written.get() == []


async def test_a_session_that_becomes_busy_while_it_is_silent_beats_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(rpc, "IDLE_HEARTBEAT_SECONDS", 3600.0)
    asked = asyncio.Event()
    busy = False

    def is_busy() -> bool:
        asked.set()
        return busy

    outbox, wire = Outbox(Request, busy=is_busy), Wire()
    async with running(outbox, wire):
        await asked.wait()
        assert wire.written.empty()
        busy = True
        assert await wire.written.get() == []


async def test_a_broken_wire_ends_the_writer() -> None:
    async def broken(message: Request) -> None:
        raise ConnectionError

    outbox = Outbox(Request)
    add(outbox, 1)
    with pytest.raises(ConnectionError):
        await outbox.run(broken)
