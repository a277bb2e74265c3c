"""shoal.v1.Tokenizer over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.common.rpc import Outbox
from services.tokenizer import encode_servicer
from services.tokenizer.encoder import Encoder, Prepared
from tests.tokenizer.services import Service, running

Request = tokenizer_pb2.TokenizerSessionRequest
Response = tokenizer_pb2.TokenizerSessionResponse
Call = grpc.aio.StreamStreamCall[Request, Response]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with running("tokenizer", tmp_path) as service:
        yield service


def chat(*contents: str, **fields: Any) -> tokenizer_pb2.EncodeRequest:
    messages = [common_pb2.ChatMessage(role="user", content=text) for text in contents]
    return tokenizer_pb2.EncodeRequest(chat=common_pb2.ChatPrompt(messages=messages, **fields))


def text(value: str) -> tokenizer_pb2.EncodeRequest:
    return tokenizer_pb2.EncodeRequest(text=value)


def session(service: Service) -> Call:
    return tokenizer_pb2_grpc.TokenizerStub(service.channel).Session()  # type: ignore[call-arg]


async def read(call: Call) -> Response:
    """The next message that is no heartbeat."""
    while True:
        message = await call.read()
        assert isinstance(message, Response)
        if message.ByteSize():
            return message


async def read_to_the_end(call: Call) -> None:
    while isinstance(await call.read(), Response):
        pass


async def results(call: Call, count: int) -> dict[int, tokenizer_pb2.EncodeResult]:
    found: dict[int, tokenizer_pb2.EncodeResult] = {}
    while len(found) < count:
        found.update({result.handle: result for result in (await read(call)).results})
    return found


async def test_encode(service: Service) -> None:
    stub = tokenizer_pb2_grpc.TokenizerStub(service.channel)
    assert (await stub.Encode(text("hi"))).token_ids == [256, 104, 105]
    request = tokenizer_pb2.EncodeRequest(
        text="hi", add_special_tokens=False, return_token_strs=True
    )
    response = await stub.Encode(request)
    assert list(response.token_ids) == [104, 105]
    assert list(response.token_strs) == ["h", "i"]
    ids = list((await stub.Encode(chat("hi"))).token_ids)
    assert ids == [256, *b"user: hi\nassistant: "]
    raw = tokenizer_pb2.EncodeRequest(token_ids=common_pb2.TokenIds(ids=[3, 258]))
    assert list((await stub.Encode(raw)).token_ids) == [3, 258]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (tokenizer_pb2.EncodeRequest(), "prompt"),
        (tokenizer_pb2.EncodeRequest(token_ids=common_pb2.TokenIds(ids=[259])), "prompt"),
        (tokenizer_pb2.EncodeRequest(chat=common_pb2.ChatPrompt()), "messages"),
        (chat("hi", tools_json="{"), "tools"),
        (chat("hi", tools_json="{}"), "tools"),
        (chat("hi", template_kwargs_json="[]"), "chat_template_kwargs"),
        (chat("hi", template_kwargs_json='{"messages": 1}'), "chat_template_kwargs"),
        (chat("hi", template_kwargs_json="[" * 5000), "chat_template_kwargs"),
    ],
)
async def test_bad_requests_name_the_field(
    service: Service, request_: tokenizer_pb2.EncodeRequest, param: str
) -> None:
    stub = tokenizer_pb2_grpc.TokenizerStub(service.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Encode(request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    trailers: Any = caught.value.trailing_metadata()
    assert dict(trailers)["shoal-error-param"] == param


async def test_a_session_answers_many_jobs_each_by_its_handle(service: Service) -> None:
    call = session(service)
    info = (await read(call)).info
    assert (info.model, info.vocab_size, info.has_chat_template) == ("byte", 259, True)
    assert info.epoch
    assert list(info.eos_token_ids) == [257]
    jobs = [tokenizer_pb2.EncodeJob(handle=i, request=text(str(i))) for i in range(200)]
    jobs[7].request.CopyFrom(tokenizer_pb2.EncodeRequest())
    await call.write(Request(jobs=jobs))
    found = await results(call, 200)
    assert found[7].error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    for i in set(range(200)) - {7}:
        assert list(found[i].response.token_ids) == [256, *str(i).encode()]
    # The session has outlived the fault, and the handle may be used again.
    await call.write(Request(jobs=[tokenizer_pb2.EncodeJob(handle=7, request=text("x"))]))
    assert list((await results(call, 1))[7].response.token_ids) == [256, ord("x")]


async def test_a_handle_in_flight_cannot_be_used_again(service: Service) -> None:
    call = session(service)
    await read(call)
    job = tokenizer_pb2.EncodeJob(handle=1, request=text("a"))
    await call.write(Request(jobs=[job, job]))
    seen = list((await read(call)).results)
    while len(seen) < 2:
        seen += (await read(call)).results
    assert sorted(result.WhichOneof("outcome") or "" for result in seen) == ["error", "response"]


async def test_jobs_in_flight_are_bounded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_servicer, "MAX_JOBS", 3)
    call = session(service)
    await read(call)
    jobs = [tokenizer_pb2.EncodeJob(handle=handle, request=text("a")) for handle in range(5)]
    await call.write(Request(jobs=jobs))
    answers = await results(call, 5)
    codes = [answers[handle].error.code for handle in range(5)]
    assert codes == [0, 0, 0, *[common_pb2.ERROR_CODE_OVERLOADED] * 2]


async def test_cancelled_jobs_are_not_answered(service: Service) -> None:
    call = session(service)
    await read(call)
    job = tokenizer_pb2.EncodeJob(handle=1, request=text("a"))
    # The job begins and is cancelled within one message.
    await call.write(Request(jobs=[job], cancels=[1, 99]))
    await call.write(Request(jobs=[tokenizer_pb2.EncodeJob(handle=2, request=text("b"))]))
    assert set(await results(call, 1)) == {2}


async def test_a_silent_client_is_dropped_and_a_heartbeat_keeps_it(tmp_path: Path) -> None:
    async with running("tokenizer", tmp_path, peer_timeout=2.5) as service:
        silent, lively = session(service), session(service)
        heartbeats = asyncio.create_task(Outbox(Request, busy=lambda: True).run(lively.write))
        await read(silent)
        await read(lively)
        with pytest.raises(grpc.aio.AioRpcError, match="silent") as caught:
            await read_to_the_end(silent)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        heartbeats.cancel()
        await asyncio.wait([heartbeats])
        await lively.write(Request(jobs=[tokenizer_pb2.EncodeJob(handle=1, request=text("a"))]))
        assert set(await results(lively, 1)) == {1}


async def test_draining_is_told_and_ends_the_session(tmp_path: Path) -> None:
    async with running("tokenizer", tmp_path) as service:
        call = session(service)
        await read(call)
        await call.write(Request(jobs=[tokenizer_pb2.EncodeJob(handle=1, request=text("a"))]))
        await results(call, 1)
        service.stop.set()
        assert (await read(call)).draining
        await read_to_the_end(call)
        assert await call.code() == grpc.StatusCode.OK


async def test_the_tiny_jobs_of_a_message_are_encoded_together_and_a_fault_is_its_own(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []

    def encode(self: Encoder, prepared: Sequence[Prepared]) -> list[list[int]]:
        batches.append(len(prepared))
        if any(item.text == "fault" for item in prepared):
            raise RuntimeError("a fault")
        return original(self, prepared)

    original = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", encode)
    call = session(service)
    await read(call)
    prompts = {1: text("a"), 2: text("fault"), 3: chat("b"), 4: tokenizer_pb2.EncodeRequest()}
    jobs = [tokenizer_pb2.EncodeJob(handle=h, request=request) for h, request in prompts.items()]
    await call.write(Request(jobs=[jobs[0], jobs[2]]))
    assert len(await results(call, 2)) == 2
    assert batches == [2]
    await call.write(Request(jobs=jobs))
    answers = await results(call, 4)
    assert batches == [2, 3, 3, 1, 1, 1]  # the second time in a thread, and there one by one
    codes = [answers[handle].error.code for handle in range(1, 5)]
    assert codes == [
        0, common_pb2.ERROR_CODE_INTERNAL, 0, common_pb2.ERROR_CODE_INVALID_ARGUMENT
    ]  # fmt: skip
