"""The worker's RPCs against an agent without an engine and a client of plain calls."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from protos import common_pb2, engine_pb2, worker_pb2
from services.common import session
from services.worker.servicer import WorkerServicer
from tests.worker.test_agent_map import Bench


class SlowClient:
    """A call whose messages are taken in when the test says so."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.waits = asyncio.Event()
        self.messages: list[worker_pb2.WorkerGenerateResponse] = []

    def time_remaining(self) -> float | None:
        return None

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def write(self, message: worker_pb2.WorkerGenerateResponse) -> None:
        self.waits.set()
        await self.reads.wait()
        self.messages.append(message)


async def test_the_last_message_of_generate_waits_for_a_slow_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "FLUSH_SECONDS", 0.01)
    bench, client = Bench(), SlowClient()
    request = worker_pb2.WorkerGenerateRequest(submit=worker_pb2.Submit(prompt_ids=[1]))
    call = asyncio.ensure_future(cast(Any, WorkerServicer(bench.agent)).Generate(request, client))
    await asyncio.sleep(0)  # lets the call submit
    frame = bench.obey()
    (handle,) = frame.accepted
    frame.handles.append(handle)
    frame.counts.append(1)
    frame.token_ids.append(7)
    frame.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_LENGTH)
    bench.agent.handle_event(engine_pb2.EngineEvent(step=frame))
    await client.waits.wait()
    done, _ = await asyncio.wait([call], timeout=0.1)  # ten times what a flush may take
    assert not done
    client.reads.set()
    await call
    (message,) = client.messages
    assert message.token_ids == [7]
    assert message.finished.reason == common_pb2.FINISH_REASON_LENGTH
