"""The public gRPC API over a real channel."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

import grpc
import grpc.aio
import pytest

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from services.common import rpc
from services.common.errors import Overloaded, ShoalError
from services.gateway.app import SERVICE
from services.gateway.servicer import InferenceServicer
from tests.gateway.core.conftest import Rig
from tests.gateway.core.fakes import expected_ids, expected_text

Options = inference_pb2.GenerationOptions
Sampling = common_pb2.SamplingParams


@dataclass
class Client:
    rig: Rig
    stub: inference_pb2_grpc.InferenceAsyncStub


@pytest.fixture
async def client(rig: Rig, tmp_path: Path) -> AsyncIterator[Client]:
    server = rpc.Server([SERVICE], public=True)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(rig.core), server.grpc)
    address = await server.start(f"unix:{tmp_path}/gateway")
    async with rpc.open_channel(address) as channel:
        yield Client(rig, inference_pb2_grpc.InferenceStub(channel))
    await server.stop(0)


def generate(text: str = "hello", **options: object) -> inference_pb2.GenerateRequest:
    options.setdefault("sampling", Sampling(max_tokens=10))
    return inference_pb2.GenerateRequest(text=text, options=Options(**options))  # type: ignore[arg-type]


async def test_generate(client: Client) -> None:
    answers = [answer async for answer in client.stub.Generate(generate())]
    pieces = [piece for answer in answers for piece in answer.pieces]
    assert "".join(piece.text for piece in pieces) == expected_text("hello", 10)
    assert [i for piece in pieces for i in piece.token_ids] == expected_ids("hello", 10)
    assert pieces[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert [answer.HasField("usage") for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert answers[-1].usage.completion_tokens == 10
    await client.rig.settled()


async def test_chat(client: Client) -> None:
    chat = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content="hi")])
    call = client.stub.Chat(
        inference_pb2.ChatRequest(chat=chat, options=Options(sampling=Sampling(max_tokens=5)))
    )
    text = "".join([piece.text async for answer in call for piece in answer.pieces])
    assert text == expected_text("<user>hi", 5)


async def test_token_ids_and_logprobs(client: Client) -> None:
    request = inference_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=map(ord, "hello")),
        options=Options(sampling=Sampling(max_tokens=3, logprobs=0), n=2),
    )
    pieces = [piece async for answer in client.stub.Generate(request) for piece in answer.pieces]
    for index in range(2):
        logprobs = [entry for p in pieces if p.index == index for entry in p.logprobs]
        assert [entry.token_id for entry in logprobs] == expected_ids("hello", 3)


@pytest.mark.parametrize(
    ("request_message", "code", "param"),
    [
        (inference_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        (
            generate(sampling=Sampling(temperature=3)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
        (generate(n=0), grpc.StatusCode.INVALID_ARGUMENT, "n"),
        (generate("x" * 1000), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        (generate(model="nope"), grpc.StatusCode.NOT_FOUND, "model"),
    ],
)
async def test_errors(
    client: Client,
    request_message: inference_pb2.GenerateRequest,
    code: grpc.StatusCode,
    param: str,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        [answer async for answer in client.stub.Generate(request_message)]
    assert error.value.code() is code
    trailers = dict(cast("list[tuple[str, str]]", error.value.trailing_metadata() or ()))
    assert trailers["shoal-error-param"] == param
    client.rig.assert_nothing_left()


async def test_cancel_aborts_the_work(client: Client) -> None:
    call = client.stub.Generate(generate(sampling=Sampling(max_tokens=900)))
    await anext(aiter(call))
    call.cancel()
    await client.rig.until(lambda: client.rig.worker.aborts)
    await client.rig.settled()


async def test_the_deadline_aborts_the_work(client: Client) -> None:
    client.rig.worker.auto = False
    with pytest.raises(grpc.aio.AioRpcError) as error:
        [answer async for answer in client.stub.Generate(generate(), timeout=0.2)]
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await client.rig.until(lambda: client.rig.worker.aborts)
    await client.rig.settled()
    (submit,) = client.rig.worker.submits
    assert 0 < submit.deadline_ms <= 200


async def test_the_simple_calls(client: Client) -> None:
    stub = client.stub
    tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(text="abc"))
    assert (list(tokens.token_ids), tokens.max_model_len) == ([97, 98, 99], 1000)
    text = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[97, 98]))
    assert text.text == "ab"
    models = await stub.ListModels(inference_pb2.ListModelsRequest())
    assert [(card.id, card.max_model_len) for card in models.models] == [("fake", 1000)]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Tokenize(inference_pb2.TokenizeRequest())
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("model", ["", "fake"])
async def test_tokenize_outlives_the_last_worker(client: Client, model: str) -> None:
    rig = client.rig
    rig.tokenizer.hold = True
    call = client.stub.Tokenize(inference_pb2.TokenizeRequest(model=model, text="abc"))
    await rig.until(lambda: rig.tokenizer.jobs)
    rig.core.fleet.workers._apply(frozenset())  # its address goes while the text is encoded
    assert not rig.core.models()
    rig.tokenizer.answer_held()
    answer = await call
    assert (list(answer.token_ids), answer.max_model_len) == ([97, 98, 99], 1000)


async def test_the_trace_context_reaches_the_worker(client: Client) -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    metadata = (("traceparent", traceparent), ("tracestate", "vendor=1"))
    [answer async for answer in client.stub.Generate(generate(), metadata=metadata)]
    submit = client.rig.worker.submits[0]
    assert (submit.traceparent, submit.tracestate) == (traceparent, "vendor=1")


async def test_a_refusal_leaves_no_garbage_in_cycles(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames hold the request, which would stay until a collection of the oldest objects."""
    refusals: list[weakref.ref[ShoalError]] = []

    class Refusal(Overloaded):
        def __init__(self) -> None:
            super().__init__("full")
            refusals.append(weakref.ref(self))

    async def start(request: object) -> NoReturn:
        raise Refusal

    monkeypatch.setattr(client.rig.core, "start", start)
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError, match="full"):
                _ = [answer async for answer in client.stub.Generate(generate())]
        assert [refusal() for refusal in refusals[:2]] == [None, None]
    finally:
        gc.enable()
