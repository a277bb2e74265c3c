"""Inference.Session over a real channel: many generations on one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from services.common import rpc
from services.gateway import grpc_session
from services.gateway.app import SERVICE
from services.gateway.servicer import InferenceServicer
from tests.gateway.core.conftest import Rig, make_rig
from tests.gateway.core.fakes import expected_ids, expected_text

Start = inference_pb2.SessionStart
Request = inference_pb2.SessionRequest
Sampling = common_pb2.SamplingParams


class Session:
    """A client's side: what came is sorted by generation, and can be waited for."""

    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        self.call: Any = stub.Session()  # type: ignore[call-arg]  # it is written to
        self.updates: dict[int, list[inference_pb2.SessionUpdate]] = {}
        self.refused: list[inference_pb2.SessionRefusal] = []
        self.num_messages = 0

    async def send(self, starts: Iterable[Start] = (), cancels: Sequence[int] = ()) -> None:
        await self.call.write(Request(starts=starts, cancels=cancels))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                message = await self.call.read()
                assert message, "the session ended"
                self._add(message)

    async def finish(self) -> grpc.StatusCode:
        """Half-closes, and reads to the end."""
        await self.call.done_writing()
        async with asyncio.timeout(30):
            while message := await self.call.read():
                self._add(message)
            code: grpc.StatusCode = await self.call.code()
            return code

    def _add(self, message: inference_pb2.SessionResponse) -> None:
        self.num_messages += 1
        self.refused.extend(message.refused)
        for update in message.updates:
            updates = self.updates.setdefault(update.id, [])
            assert not any(earlier.WhichOneof("end") for earlier in updates), "after the end"
            updates.append(update)

    def ended(self, *ids: int) -> bool:
        return all(self.updates.get(i) and self.updates[i][-1].WhichOneof("end") for i in ids)

    def error(self, generation_id: int) -> common_pb2.Error:
        assert self.updates[generation_id][-1].WhichOneof("end") == "error"
        return self.updates[generation_id][-1].error

    def pieces(self, generation_id: int) -> list[inference_pb2.GenerationPiece]:
        return [piece for update in self.updates[generation_id] for piece in update.pieces]

    def text(self, generation_id: int) -> str:
        return "".join(piece.text for piece in self.pieces(generation_id))

    def accepted(self, generation_id: int) -> list[bool]:
        return [update.accepted for update in self.updates.get(generation_id, ())]


@asynccontextmanager
async def session_of(
    rig: Rig, tmp_path: Path, *, unread_timeout: float = 60.0
) -> AsyncIterator[tuple[Session, InferenceServicer]]:
    server = rpc.Server([SERVICE], public=True)
    servicer = InferenceServicer(rig.core, unread_timeout=unread_timeout)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.grpc)
    address = await server.start(f"unix:{tmp_path}/gateway")
    # Without probes its window stays at 64 KiB, so that a client that does not read is felt.
    options = (("grpc.http2.bdp_probe", 0),)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        session = Session(inference_pb2_grpc.InferenceStub(channel))
        yield session, servicer
        session.call.cancel()
    await server.stop(0)


@pytest.fixture
async def session(rig: Rig, tmp_path: Path) -> AsyncIterator[Session]:
    async with session_of(rig, tmp_path) as (session, _):
        yield session


def start(
    generation_id: int, text: str = "hello", max_tokens: int = 10, **options: Any
) -> inference_pb2.SessionStart:
    deadline_ms = options.pop("deadline_ms", None)
    sampling = Sampling(max_tokens=max_tokens, **options.pop("sampling", {}))
    request = inference_pb2.GenerateRequest(
        text=text, options=inference_pb2.GenerationOptions(sampling=sampling, **options)
    )
    return Start(id=generation_id, generate=request, deadline_ms=deadline_ms)


async def test_many_generations_on_one_stream(rig: Rig, session: Session) -> None:
    prompts = {i: f"prompt {i}" for i in range(100)}
    await session.send(start(i, text) for i, text in prompts.items())
    assert await session.finish() is grpc.StatusCode.OK
    for i, text in prompts.items():
        assert session.text(i) == expected_text(text, 10)
        ids = [token for piece in session.pieces(i) for token in piece.token_ids]
        assert ids == expected_ids(text, 10)
        assert session.accepted(i).count(True) == 1
        assert session.accepted(i)[0]
        assert session.updates[i][-1].usage.completion_tokens == 10
        assert session.pieces(i)[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert session.num_messages < 300, "each of 1,000 tokens came alone"
    await rig.settled()


async def test_a_chat_and_several_choices(rig: Rig, session: Session) -> None:
    chat = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content="hi")])
    options = inference_pb2.GenerationOptions(sampling=Sampling(max_tokens=5), n=3)
    request = inference_pb2.ChatRequest(chat=chat, options=options)
    await session.send([Start(id=0, chat=request)])
    assert await session.finish() is grpc.StatusCode.OK
    for index in range(3):
        text = "".join(piece.text for piece in session.pieces(0) if piece.index == index)
        assert text == expected_text("<user>hi", 5)
    assert session.updates[0][-1].usage.completion_tokens == 15
    await rig.settled()


async def test_a_cancelled_generation_ends_alone(rig: Rig, session: Session) -> None:
    await session.send([start(1, max_tokens=900), start(2, "other")])
    await session.until(lambda: session.updates.get(1) and session.pieces(1))
    await session.send(cancels=[1, 77])  # 77 is unknown
    await session.until(lambda: session.ended(1, 2))
    assert session.error(1).code == common_pb2.ERROR_CODE_CANCELLED
    assert session.text(2) == expected_text("other", 10)
    await rig.until(lambda: rig.worker.aborts)
    await session.send([start(1)], cancels=[2])  # the id is free again; 2 is over
    session.updates.clear()
    assert await session.finish() is grpc.StatusCode.OK
    assert session.text(1) == expected_text("hello", 10)
    await rig.settled()


async def test_a_start_and_its_cancel_in_one_message(rig: Rig, session: Session) -> None:
    await session.send([start(1)], cancels=[1])
    assert await session.finish() is grpc.StatusCode.OK
    assert session.error(1).code == common_pb2.ERROR_CODE_CANCELLED
    await rig.settled()


async def test_a_duplicate_id_is_refused_alone(rig: Rig, session: Session) -> None:
    rig.worker.auto = False
    await session.send([start(5), start(5, "twin")])
    await session.until(lambda: session.refused and session.updates.get(5))
    (refusal,) = session.refused
    assert (refusal.id, refusal.error.code) == (5, common_pb2.ERROR_CODE_INVALID_ARGUMENT)
    assert refusal.error.param == "id"
    rig.worker.auto = True
    assert await session.finish() is grpc.StatusCode.OK
    assert session.text(5) == expected_text("hello", 10)
    assert len(rig.worker.submits) == 1
    await rig.settled()


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (Start(id=1), common_pb2.ERROR_CODE_INVALID_ARGUMENT, "request"),
        (
            Start(id=1, generate=inference_pb2.GenerateRequest()),
            common_pb2.ERROR_CODE_INVALID_ARGUMENT,
            "prompt",
        ),
        (
            Start(id=1, chat=inference_pb2.ChatRequest()),
            common_pb2.ERROR_CODE_INVALID_ARGUMENT,
            "messages",
        ),
        (start(1, n=10**9), common_pb2.ERROR_CODE_INVALID_ARGUMENT, "n"),
        (start(1, model="nope"), common_pb2.ERROR_CODE_NOT_FOUND, "model"),
        (start(1, "x" * 1000), common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, "prompt"),
        (start(1, sampling={"top_p": 0}), common_pb2.ERROR_CODE_INVALID_ARGUMENT, "top_p"),
        (
            start(1, sampling={"grammar": common_pb2.Grammar()}),
            common_pb2.ERROR_CODE_INVALID_ARGUMENT,
            "grammar",
        ),
    ],
)
async def test_a_bad_start_fails_alone(
    rig: Rig, session: Session, bad: Start, code: common_pb2.ErrorCode.ValueType, param: str
) -> None:
    await session.send([bad, start(2)])
    assert await session.finish() is grpc.StatusCode.OK
    error = session.error(1)
    assert (error.code, error.param) == (code, param)
    assert session.accepted(1) == [False]
    assert session.text(2) == expected_text("hello", 10)
    rig.assert_nothing_left()


async def test_an_overload_is_the_generations_own(tmp_path: Path) -> None:
    async with make_rig(tmp_path, max_requests=2) as rig, session_of(rig, tmp_path) as (session, _):
        rig.worker.auto = False
        await session.send(start(i) for i in range(3))
        await session.until(lambda: session.ended(2))
        assert session.error(2).code == common_pb2.ERROR_CODE_OVERLOADED
        assert session.error(2).retry_after_ms > 0
        rig.worker.auto = True
        assert await session.finish() is grpc.StatusCode.OK
        assert session.text(0) == session.text(1) == expected_text("hello", 10)


async def test_a_deadline_ends_its_generation_after_what_there_was(
    rig: Rig, session: Session
) -> None:
    rig.worker.auto = False
    await session.send([start(1, max_tokens=900, deadline_ms=500), start(2), start(3)])
    await rig.until(lambda: len(rig.worker.running) == 3)
    rig.worker.step(4)
    await session.until(lambda: session.ended(1))
    assert session.error(1).code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    assert session.text(1) == expected_text("hello", 4)
    assert not session.ended(2)
    rig.worker.auto = True
    assert await session.finish() is grpc.StatusCode.OK
    assert session.text(2) == expected_text("hello", 10)
    await rig.settled()


async def test_a_cancelled_call_gives_everything_up(rig: Rig, session: Session) -> None:
    await session.send(start(i, max_tokens=900) for i in range(8))
    await session.until(lambda: all(session.updates.get(i) for i in range(8)))
    session.call.cancel()
    await rig.until(lambda: len(rig.worker.aborts) == 8)
    await rig.settled()


async def test_a_slow_client_loses_generations_that_pile_up(tmp_path: Path) -> None:
    async with make_rig(tmp_path, max_buffer_bytes=100) as rig, session_of(rig, tmp_path) as (s, _):
        await s.send(start(i, max_tokens=900) for i in range(100))
        await rig.until(lambda: len(rig.worker.aborts) == 100)  # though nothing was read
        await s.until(lambda: s.ended(*range(100)))
        for i in range(100):
            assert s.error(i).code == common_pb2.ERROR_CODE_CANCELLED
            assert expected_text("hello", 900).startswith(s.text(i))
        await s.send([start(1, "later")])
        s.updates.clear()
        assert await s.finish() is grpc.StatusCode.OK
        assert s.text(1) == expected_text("later", 10)
        await rig.settled()


async def test_a_client_that_never_reads_loses_the_stream(tmp_path: Path) -> None:
    async with (
        make_rig(tmp_path) as rig,
        session_of(rig, tmp_path, unread_timeout=0.3) as (session, servicer),
    ):
        await session.send(start(i, max_tokens=900) for i in range(100))
        await rig.until(lambda: rig.worker.submits)
        await rig.until(lambda: not servicer._sessions)
        await rig.settled()
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # it wakes up: what came, and why
            await session.until(lambda: False)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert caught.value.details() == "the client read nothing for 0.3 s"
        assert session.num_messages


async def test_too_many_generations_are_refused(
    rig: Rig, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_session, "MAX_LIVE", 4)
    rig.worker.auto = False
    await session.send(start(i) for i in range(6))
    await session.until(lambda: len(session.refused) == 2)
    assert [refusal.id for refusal in session.refused] == [4, 5]
    assert session.refused[0].error.code == common_pb2.ERROR_CODE_OVERLOADED
    rig.worker.auto = True
    assert await session.finish() is grpc.StatusCode.OK
    assert all(session.text(i) == expected_text("hello", 10) for i in range(4))


async def test_unread_refusals_end_the_session(rig: Rig, session: Session) -> None:
    await session.send(Start(id=1, generate=start(1, max_tokens=900).generate) for _ in range(5000))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await session.until(lambda: False)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await rig.settled()


async def test_a_shutdown_ends_an_idle_session(rig: Rig, tmp_path: Path) -> None:
    async with session_of(rig, tmp_path) as (session, servicer):
        await session.send([start(1)])
        await session.until(lambda: session.updates.get(1))
        servicer.end_sessions()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.until(lambda: False)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert session.text(1) == expected_text("hello", 10)
        assert session.ended(1)


async def test_an_empty_session(rig: Rig, session: Session) -> None:
    await session.call.write(Request())
    assert await session.finish() is grpc.StatusCode.OK
    assert session.num_messages == 0


async def test_a_fault_of_ours_is_the_generations_own(
    rig: Rig, session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: object) -> None:
        raise ValueError("/a/secret/path")

    monkeypatch.setattr(rig.core, "start", fail)
    await session.send([start(1)])
    assert await session.finish() is grpc.StatusCode.OK
    assert session.error(1).code == common_pb2.ERROR_CODE_INTERNAL
    assert session.error(1).message == "internal error"
    assert "/a/secret/path" in caplog.text
