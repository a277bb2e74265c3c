"""shoal.v1.Detokenizer over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from protos import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.common.text.decoder import build_decoder
from services.tokenizer import decode_servicer
from services.tokenizer.decode_servicer import _Session as DecodeSession
from services.tokenizer.metrics import DetokenizerMetrics
from services.tokenizer.session import Sessions
from tests.tokenizer.services import Service, running

Request = tokenizer_pb2.DetokenizerSessionRequest
Response = tokenizer_pb2.DetokenizerSessionResponse
Call = grpc.aio.StreamStreamCall[Request, Response]
Open = tokenizer_pb2.OpenText


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with running("detokenizer", tmp_path) as service:
        yield service


def session(service: Service) -> Call:
    return tokenizer_pb2_grpc.DetokenizerStub(service.channel).Session()  # type: ignore[call-arg]


async def read(call: Call) -> Response:
    """The next message that is no heartbeat."""
    while True:
        message = await call.read()
        assert isinstance(message, Response)
        if message.ByteSize():
            return message


async def test_decode_and_lookup(service: Service) -> None:
    stub = tokenizer_pb2_grpc.DetokenizerStub(service.channel)
    ids = [256, *"hé".encode(), 257, 0xFF]
    answer = await stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=ids))
    assert answer.text == "hé\ufffd"
    request = tokenizer_pb2.DecodeRequest(token_ids=ids, skip_special_tokens=False)
    assert (await stub.Decode(request)).text == "<bos>hé<eos>\ufffd"
    lookup = await stub.Lookup(tokenizer_pb2.LookupRequest(token_ids=[0x68, 0xFF, 257, 4000]))
    assert list(lookup.token_bytes) == [b"h", b"\xff", b"<eos>", b""]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=[259]))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_two_million_ids(service: Service) -> None:
    stub = tokenizer_pb2_grpc.DetokenizerStub(service.channel)
    answer = await stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=[0x61] * 2_000_000))
    assert len(answer.text) == 2_000_000


async def test_frames_of_ids_become_frames_of_text(service: Service) -> None:
    call = session(service)
    info = (await read(call)).info
    assert (info.model, info.vocab_size) == ("byte", 259)
    await call.write(
        Request(
            opens=[Open(handle=1), Open(handle=2)],
            handles=[1, 2, 3],
            counts=[2, 3, 1],
            token_ids=[*b"hi", *"aé".encode(), 99],
        )
    )
    frame = await read(call)
    assert list(frame.handles) == [1, 2]  # nobody opened 3
    assert list(frame.texts) == ["hi", "aé"]
    assert list(frame.ids_consumed) == [2, 3]
    await call.write(Request(handles=[1], counts=[1], token_ids=[0xC3], ends=[1, 7], closes=[2]))
    frame = await read(call)
    assert list(zip(frame.handles, frame.texts, frame.ids_consumed, strict=True)) == [
        (1, "", 3),
        (1, "\ufffd", 3),
    ]
    (ended,) = frame.ended
    assert (ended.handle, ended.HasField("stop"), ended.ids_consumed) == (1, False, 3)


async def test_stop_strings_end_a_text_once(service: Service) -> None:
    call = session(service)
    await read(call)
    options = common_pb2.TextOptions(stop=["END"])
    await call.write(
        Request(
            opens=[Open(handle=1, options=options)], handles=[1], counts=[3], token_ids=[*b"xEN"]
        )
    )
    frame = await read(call)
    assert (list(frame.texts), list(frame.held_chars)) == (["x"], [2])
    await call.write(Request(handles=[1], counts=[3], token_ids=[*b"Dyz"], ends=[1]))
    await call.write(Request(handles=[1], counts=[1], token_ids=[*b"q"]))
    frame = await read(call)
    assert list(frame.texts) == [""]
    (ended,) = frame.ended
    assert (ended.stop, ended.ids_consumed) == ("END", 4)
    # Nothing more is said of it; the handle may be used again.
    await call.write(Request(opens=[Open(handle=1)], handles=[1], counts=[1], token_ids=[*b"n"]))
    assert list((await read(call)).texts) == ["n"]
    call.cancel()


async def test_a_text_is_taken_over_from_another_instance(service: Service) -> None:
    call = session(service)
    await read(call)
    opening = Open(handle=5, replay_ids="aé🙂".encode()[:-1], skip_chars=1)
    await call.write(Request(opens=[opening], handles=[5], counts=[1], token_ids=[0x82]))
    frame = await read(call)
    assert "".join(frame.texts) == "é🙂"
    assert list(frame.ids_consumed) == [6, 7]
    call.cancel()


async def test_frames_that_do_not_add_up_end_the_session(service: Service) -> None:
    for bad in (Request(handles=[1]), Request(handles=[1], counts=[2], token_ids=[1])):
        call = session(service)
        await read(call)
        await call.write(bad)
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_open_texts_finish_before_a_drained_process_ends(tmp_path: Path) -> None:
    async with running("detokenizer", tmp_path) as service:
        call = session(service)
        await read(call)
        await call.write(Request(opens=[Open(handle=1)], handles=[1], counts=[1], token_ids=[97]))
        await read(call)
        service.stop.set()
        assert (await read(call)).draining
        await call.write(Request(handles=[1], counts=[1], token_ids=[98]))
        assert list((await read(call)).texts) == ["b"]
        assert not service.task.done()
        await call.write(Request(ends=[1]))
        frame = await read(call)
        while not frame.ended:
            frame = await read(call)
        while isinstance(await call.read(), Response):
            pass
        assert await call.code() == grpc.StatusCode.OK


async def test_a_client_that_leaves_leaves_nothing(tmp_path: Path) -> None:
    async with running("detokenizer", tmp_path, drain_timeout=30) as service:
        call = session(service)
        await read(call)
        await call.write(
            Request(
                opens=[Open(handle=i) for i in range(1_000)],
                handles=[1],
                counts=[1],
                token_ids=[97],
            )
        )
        await read(call)
        call.cancel()
        # Drains at once, since no text is open; `running` awaits the end.


async def test_a_frame_that_fails_half_way_leaves_no_work_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions, decoder = Sessions(), build_decoder("byte").session()
    metrics = DetokenizerMetrics(CollectorRegistry(), sessions)
    client = DecodeSession(decoder, sessions, metrics)

    def fault(handle: int, token_ids: list[int]) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(decoder, "feed", fault)
    with pytest.raises(RuntimeError, match="a fault"):
        client.receive(Request(opens=[Open(handle=1)], handles=[1], counts=[1], token_ids=[97]))
    assert sessions.work == 1
    client.close()
    assert sessions.work == 0
    await sessions.idle()


async def test_an_empty_stop_string_fails_its_text_alone(service: Service) -> None:
    call = session(service)
    await read(call)
    bad = common_pb2.TextOptions(stop=["end", ""])
    await call.write(
        Request(
            opens=[Open(handle=1), Open(handle=2, options=bad)],
            handles=[1, 2],
            counts=[2, 1],
            token_ids=[*b"hi", 33],
        )
    )
    frame = await read(call)
    assert (list(frame.handles), list(frame.texts)) == ([1], ["hi"])
    (ended,) = frame.ended
    assert (ended.handle, ended.error.code) == (2, common_pb2.ERROR_CODE_INVALID_ARGUMENT)
    assert ended.error.param == "stop"
    await call.write(Request(ends=[1, 2]))
    frame = await read(call)
    assert [ended.handle for ended in frame.ended] == [1]
    call.cancel()


async def test_open_texts_are_bounded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_servicer, "MAX_OPEN_TEXTS", 10)
    call = session(service)
    await read(call)
    await call.write(Request(opens=[Open(handle=handle) for handle in range(12)]))
    frame = await read(call)
    codes = {ended.handle: ended.error.code for ended in frame.ended}
    overloaded = common_pb2.ERROR_CODE_OVERLOADED
    assert codes == {10: overloaded, 11: overloaded}
    assert all(ended.error.retry_after_ms for ended in frame.ended)
    await call.write(Request(closes=[0], opens=[Open(handle=12)]))
    frame = await read(call)
    assert [ended.handle for ended in frame.ended] == [12]  # opens come before closes
    await call.write(
        Request(opens=[Open(handle=13)], handles=[13, 5], counts=[1, 1], token_ids=b"ab")
    )
    frame = await read(call)
    assert (list(frame.handles), list(frame.texts)) == ([13, 5], ["a", "b"])
    call.cancel()
