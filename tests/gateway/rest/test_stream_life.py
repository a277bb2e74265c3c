"""Streams over real sockets: errors, silence, and clients that leave."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import httpx
import pytest

from services.common.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    Overloaded,
    PeerLost,
    ShoalError,
    Unavailable,
)
from services.gateway.config import GatewayConfig
from services.gateway.domain import Chunk, TextWriter
from tests.gateway.rest.conftest import KEEPALIVE
from tests.gateway.rest.fake import FakeGateway, FakeGeneration, words
from tests.gateway.rest.helpers import (
    CHAT,
    COMPLETIONS,
    chat_body,
    chat_text,
    choices_of,
    completion_body,
    error_of,
    events,
)

PATIENCE = 5.0


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (ContextLengthExceeded.of(9, 8, param="messages"), 400, None),
        (Overloaded("full", retry_after=0.2), 429, "1"),
        (Unavailable("no worker is ready", retry_after=4.2), 503, "5"),
        (Unavailable("draining"), 503, None),
        (DeadlineExceeded("too late"), 504, None),
    ],
)
async def test_error_before_the_first_byte_is_a_status(
    client: httpx.AsyncClient,
    gateway: FakeGateway,
    error: ShoalError,
    status: int,
    retry_after: str | None,
) -> None:
    gateway.refusal = error
    for stream in (False, True):
        response = await client.post(CHAT, json=chat_body(stream=stream))
        answer = error_of(response, status)
        assert answer["message"] == error.message
        assert answer["code"] == error.status.code
        assert response.headers.get("retry-after") == retry_after


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        error = error_of(await client.post(CHAT, json=chat_body(model="nope", stream=stream)), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_error_after_the_first_byte_is_an_event(
    client: httpx.AsyncClient, gateway: FakeGateway, path: str
) -> None:
    gateway.script = lambda request: [Chunk(0, "a", [1]), PeerLost("the worker was lost")]
    body = chat_body(stream=True, stream_options={"include_usage": True})
    stream = events(await client.post(path, json={**body, "prompt": "hi"}))
    assert stream[-1]["error"] == {
        "message": "the worker was lost",
        "type": "service_unavailable_error",
        "param": None,
        "code": "unavailable",
    }
    assert all(choice["finish_reason"] is None for choice in choices_of(stream))
    assert not any(event.get("usage") for event in stream)
    assert gateway.generations[0].closed.is_set()


async def test_plain_error_late(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: [Chunk(0, "a", [1]), DeadlineExceeded("too late")]
    assert error_of(await client.post(CHAT, json=chat_body()), 504)["message"] == "too late"
    assert gateway.generations[0].closed.is_set()


async def test_fault_tells_nothing_but_is_logged(
    client: httpx.AsyncClient, gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.script = lambda request: [Chunk(0, "a", [1]), KeyError("secret")]
    response = await client.post(CHAT, json=chat_body())
    assert error_of(response, 500)["message"] == "internal error"
    assert response.headers["x-request-id"]
    stream = await client.post(CHAT, json=chat_body(stream=True))
    assert events(stream)[-1]["error"]["message"] == "internal error"
    assert "secret" not in response.text + stream.text
    faults = [record for record in caplog.records if record.name == "services.gateway.generating"]
    assert len(faults) == 2
    assert all(record.exc_info for record in faults)


async def test_headers_come_before_the_first_token(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    first = asyncio.Event()
    gateway.script = lambda request: [first, *words("a")]
    async with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
        assert response.status_code == 200
        first.set()
        await response.aread()
    assert chat_text(events(response)) == "a"


async def test_silent_stream_gets_comments(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    first = asyncio.Event()
    gateway.script = lambda request: [first, *words("a", "b")]
    began = asyncio.get_running_loop().time()
    async with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
        pieces = response.aiter_text()
        assert await anext(pieces) == ": keep-alive\n\n"
        assert await anext(pieces) == ": keep-alive\n\n"
        assert asyncio.get_running_loop().time() - began >= 2 * KEEPALIVE
        first.set()
        rest = "".join([piece async for piece in pieces])
    assert rest.startswith("data: ")
    assert rest.endswith("data: [DONE]\n\n")


async def test_events_are_not_held_back(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gates = [asyncio.Event() for _ in range(3)]
    gateway.script = lambda request: [
        step
        for gate, chunk in zip(gates, words("a", "b", "c"), strict=True)
        for step in (gate, chunk)
    ]
    async with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
        lines = response.aiter_lines()
        for gate, text in zip(gates, "abc", strict=True):
            gate.set()
            async for line in lines:
                if line.startswith("data: ") and f'"content":"{text}"' in line:
                    break
        assert [line async for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_leaves_no_garbage_in_cycles(
    client: httpx.AsyncClient, gateway: FakeGateway, stream: bool
) -> None:
    """Its frames hold the body, which would stay until a collection of the oldest objects."""
    refusals: list[weakref.ref[ShoalError]] = []

    async def start(request: object) -> FakeGeneration:
        error = Overloaded("full")
        refusals.append(weakref.ref(error))
        raise error

    gateway.start = start  # type: ignore[method-assign]
    gc.disable()
    try:
        for _ in range(3):
            error_of(await client.post(CHAT, json=chat_body(stream=stream)), 429)
        assert [refusal() for refusal in refusals[:2]] == [None, None]
    finally:
        gc.enable()


async def send_raw(
    address: tuple[str, int], path: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request over a socket of its own, its answer unread."""
    reader, writer = await asyncio.open_connection(*address)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (COMPLETIONS, completion_body())])
async def test_client_leaves_before_the_start(
    address: tuple[str, int], gateway: FakeGateway, path: str, body: dict[str, Any], stream: bool
) -> None:
    gateway.hold_start = asyncio.Event()
    _, writer = await send_raw(address, path, {**body, "stream": stream})
    async with asyncio.timeout(PATIENCE):
        await gateway.starting.wait()
        writer.close()
        await gateway.start_cancelled.wait()


@pytest.mark.parametrize("config", [GatewayConfig(max_body_bytes=4_000_000)])
async def test_a_client_with_a_large_body_leaves(
    address: tuple[str, int], gateway: FakeGateway
) -> None:
    """Reading was paused by the last piece of its body, and must go on for its end to be seen."""
    gateway.hold_start = asyncio.Event()
    reader, writer = await asyncio.open_connection(*address)
    data = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 3_000_000}])).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        await reader.readuntil(b"100 Continue\r\n\r\n")  # it waits for the body now
        writer.write(data)
        await gateway.starting.wait()
        writer.close()
        await gateway.start_cancelled.wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_client_leaves_during_generation(
    address: tuple[str, int], gateway: FakeGateway, stream: bool, prompt: Any
) -> None:
    gateway.script = lambda request: [Chunk(0, "a", [1]), asyncio.Event()]
    body = completion_body(prompt=prompt, stream=stream)
    reader, writer = await send_raw(address, COMPLETIONS, body)
    async with asyncio.timeout(PATIENCE):
        await gateway.starting.wait()
        if stream:
            await reader.readuntil(b"data: ")
        for generation in gateway.generations:
            await generation.reached.wait()
        writer.close()
        for generation in gateway.generations:
            await generation.closed.wait()
    assert len(gateway.generations) == len(gateway.requests)


async def test_client_that_never_reads_is_held_back_and_freed(
    address: tuple[str, int], gateway: FakeGateway
) -> None:
    """Its socket fills, the generation is not pulled any more, and leaving frees it."""
    pulled = 0

    class Endless:
        prompt_token_ids = (1,)
        prompt_logprobs = None
        ended = False
        closed = asyncio.Event()

        def __aiter__(self) -> Endless:
            return self

        async def __anext__(self) -> Chunk:
            nonlocal pulled
            pulled += 1
            await asyncio.sleep(0)
            return Chunk(0, "x" * 50_000, [1])

        def send_text_to(self, write: TextWriter) -> None:
            pass

        async def aclose(self) -> None:
            self.closed.set()

    async def start(request: object) -> Endless:
        return Endless()

    gateway.start = start  # type: ignore[method-assign, assignment]
    _, writer = await send_raw(address, CHAT, chat_body(stream=True))
    async with asyncio.timeout(PATIENCE):
        seen = -1
        while pulled != seen or not pulled:
            seen = pulled
            await asyncio.sleep(0.1)
        assert pulled > 1
        writer.transport.abort()
        await Endless.closed.wait()


async def test_slow_client_aborted_by_the_core(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.script = lambda request: [Chunk(0, "a", [1]), Cancelled("the client reads too slowly")]
    stream = events(await client.post(CHAT, json=chat_body(stream=True)))
    assert stream[-1]["error"]["code"] == "cancelled"
