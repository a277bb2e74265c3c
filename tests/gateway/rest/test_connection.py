"""Clients that send too much, too slowly or nothing: cut off, and nobody else the worse."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from services.gateway import link
from services.gateway.connection import ConnectionLimits, GuardedConnection
from services.gateway.domain import Chunk
from tests.gateway.rest.fake import FakeGateway, words
from tests.gateway.rest.helpers import CHAT, chat_body

Address = tuple[str, int]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

READ_TIMEOUT = 0.5
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps(chat_body()).encode()
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture
def limits() -> ConnectionLimits:
    return ConnectionLimits(max_header_bytes=4096, read_timeout=READ_TIMEOUT, max_connections=5)


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """All until the server hangs up, also where a late byte of ours met a closed socket."""
    pieces = []
    async with asyncio.timeout(20):
        with suppress(ConnectionResetError):
            while piece := await reader.read(65_536):
                pieces.append(piece)
    return b"".join(pieces)


async def _trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A byte every now and then, until the server hangs up."""
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(READ_TIMEOUT / 20)


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def _code(answer: bytes) -> str:
    found: str = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
    return found


@pytest.mark.parametrize(
    ("start", "rest"),
    [(b"", HEAD), (HEAD, b"X: " + b"y" * 1000), (HEAD + b"Content-Length: 999\r\n\r\n", BODY)],
    ids=["line", "headers", "body"],
)
async def test_a_request_that_trickles_in_is_cut_off(
    address: Address, start: bytes, rest: bytes
) -> None:
    async with connected(address) as (reader, writer):
        writer.write(start)
        trickling = asyncio.create_task(_trickle(writer, rest))
        answer = await _rest(reader)
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)
    assert _status(answer) == 408
    assert _code(answer) == "timeout"


@pytest.mark.parametrize("start", [b"", b"\r\n"])
async def test_a_connection_that_asks_nothing_is_closed(address: Address, start: bytes) -> None:
    async with connected(address) as (reader, writer):
        writer.write(start)
        answer = await _rest(reader)
    assert answer == b"" or _status(answer) == 408


async def test_empty_lines_between_requests_are_no_life(address: Address) -> None:
    async with connected(address) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        trickling = asyncio.create_task(_trickle(writer, b"\r\n" * 5000))
        assert (await _rest(reader)).endswith(b"}")
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)


async def test_a_long_answer_is_no_slow_request(address: Address, gateway: FakeGateway) -> None:
    hold = asyncio.Event()
    gateway.script = lambda request: [hold, *words("done")]
    async with connected(address) as (reader, writer):
        body = json.dumps(chat_body(stream=True)).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        writer.write(HEAD)  # the beginning of the next one, behind it
        await asyncio.sleep(3 * READ_TIMEOUT)
        hold.set()
        async with asyncio.timeout(20):
            answer = await reader.readuntil(b"[DONE]\n\n")
        assert b"done" in answer
        assert b" 408 " in await _rest(reader)  # the next one never came


@pytest.mark.parametrize("end", [b"", b"no http\r\n"], ids=["leaves", "is refused"])
async def test_all_requests_of_a_client_that_pipelined_are_told_that_it_is_gone(
    address: Address, gateway: FakeGateway, end: bytes
) -> None:
    hold = asyncio.Event()
    gateway.script = lambda request: [Chunk(0, "begun", [1]), hold, *words("done")]
    body = json.dumps(chat_body(stream=True)).encode()
    post = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with connected(address) as (reader, writer):
        writer.write(post + post)
        await reader.readuntil(b"begun")
        writer.write(end)
        if end:
            assert b"HTTP" not in await _rest(reader)
    (first,) = gateway.generations
    async with asyncio.timeout(20):
        await first.closed.wait()
    assert first.write(0, "late") is False


@pytest.mark.parametrize(
    "end", [b"no http\r\n", b"GET /livez HTTP/1.1\r\nX: " + b"x" * 5000], ids=["400", "431"]
)
async def test_a_stream_that_is_cut_off_at_its_start_is_seen_to_have_begun(
    address: Address, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr(link, "_HEAD_SECONDS", 600.0)  # the head still waits when it is cut off
    gateway.script = lambda request: [asyncio.Event()]
    async with connected(address) as (reader, writer):
        writer.write(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n" + b'{"prompt": "a"}'
        )
        async with asyncio.timeout(20):
            await gateway.starting.wait()
            await gateway.generations[0].reached.wait()
        writer.write(end)
        answer = await _rest(reader)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"\r\n\r\n")


async def test_a_client_that_pipelined_while_it_is_answered_is_seen_to_leave(
    address: Address, gateway: FakeGateway
) -> None:
    gateway.hold_start = asyncio.Event()
    async with connected(address) as (_, writer):
        writer.write(REQUEST)
        async with asyncio.timeout(20):
            await gateway.starting.wait()
        writer.write(REQUEST)
        await writer.drain()
    async with asyncio.timeout(20):
        await gateway.start_cancelled.wait()


@pytest.mark.parametrize(
    "wish",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
        b"connection: upgrade, close\r\nupgrade: TLS/1.3\r\n",
    ],
    ids=["h2c", "websocket", "and close"],
)
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "in pieces"])
async def test_a_wish_to_upgrade_is_ignored(
    address: Address, gateway: FakeGateway, wish: bytes, apart: bool
) -> None:
    request = HEAD + wish + REQUEST.removeprefix(HEAD)
    pieces = [request[at : at + 40] for at in range(0, len(request), 40)] if apart else [request]
    async with connected(address) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        # Behind one that closes it is no fault, and not answered.
        writer.write(REQUEST.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        answers = await _rest(reader)
    expected = 1 if b"close" in wish else 2
    assert answers.count(b"HTTP/1.1 200 ") == expected
    assert answers.count(b"Hello world") == expected
    assert len(gateway.requests) == expected


async def test_connect_is_refused(address: Address) -> None:
    async with connected(address) as (reader, writer):
        writer.write(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            assert 400 <= _status(await reader.readuntil(b"\r\n")) < 500


@pytest.mark.parametrize("where", ["line", "one", "many", "endless"])
async def test_headers_have_a_limit(address: Address, where: str) -> None:
    async with connected(address) as (reader, writer):
        if where == "line":
            writer.write(b"GET /livez?" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        elif where == "one":
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 5000 + b"\r\n\r\n")
        elif where == "many":
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 900 + b"\r\n")
        else:
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 5000)
        answer = await _rest(reader)
    assert _status(answer) == 431
    assert _code(answer) == "headers_too_large"


@pytest.mark.parametrize("start", [HEAD + b"X: " + b"x" * 5000 + b"\r\n", b"no http\r\n"])
async def test_a_client_refused_while_it_sends_gets_the_answer(
    address: Address, start: bytes
) -> None:
    async with connected(address) as (reader, writer):
        writer.write(start)
        head = await reader.readuntil(b"\r\n\r\n")
        for _ in range(50):  # a reset would end this, and what was read with it
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert _status(head) in (400, 431)
        assert json.loads(await reader.read())["error"]["message"]


@pytest.mark.parametrize("limits", [ConnectionLimits(4096, read_timeout=30, max_connections=5)])
@pytest.mark.parametrize(
    ("length", "begin", "status"),
    [(10**9, b"", 413), (90_000, b"[" * 60_000, 400)],
    ids=["too large", "too deep"],
)
async def test_so_does_one_whose_body_is_refused_while_it_sends_its_last_request(
    address: Address, length: int, begin: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.connection._LINGER_SECONDS", 30)
    async with connected(address) as (reader, writer):
        writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % length + begin)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert _status(answer) == status
        assert b"connection: close\r\n" in answer
        for _ in range(20):  # a reset would end one of these writes, or the read
            writer.write(b"x" * 1000)
            await writer.drain()
        assert b'"error"' in await reader.read()


async def test_a_refused_client_is_not_listened_to_for_ever(address: Address) -> None:
    async with connected(address) as (reader, writer):
        writer.write(b"no http\r\n")
        assert _status(await reader.read()) == 400
        async with asyncio.timeout(30):
            with pytest.raises(ConnectionError):  # noqa: PT012  # some write of many fails
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.05)


async def test_large_bodies_are_no_headers(client: httpx.AsyncClient) -> None:
    body = chat_body(messages=[{"role": "user", "content": "x" * 50_000}])
    assert (await client.post(CHAT, json=body)).status_code == 200


async def test_what_is_no_http_is_said_to_be_none(address: Address) -> None:
    async with connected(address) as (reader, writer):
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # a TLS hello
        answer = await _rest(reader)
    assert _status(answer) == 400


async def test_connections_have_a_limit(address: Address) -> None:
    async with connected(address) as first:
        others = [await asyncio.open_connection(*address) for _ in range(4)]
        async with connected(address) as (reader, writer):
            writer.write(REQUEST)
            answer = await _rest(reader)
        assert _status(answer) == 503
        assert _code(answer) == "overloaded"
        for _, writer in others:
            writer.close()
        await asyncio.gather(*(w.wait_closed() for _, w in others), return_exceptions=True)
        first[1].write(REQUEST)
        assert b" 200 " in await first[0].readline()


@pytest.mark.parametrize("end", ["kept alive", "in an answer", "with its head held"])
async def test_a_closed_connection_leaves_no_garbage_in_cycles(
    address: Address, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    connections: list[weakref.ref[GuardedConnection]] = []
    made, freed = GuardedConnection.connection_made, asyncio.Event()

    def connection_made(self: GuardedConnection, transport: asyncio.Transport) -> None:
        connections.append(weakref.ref(self, lambda _: freed.set()))
        made(self, transport)

    monkeypatch.setattr(GuardedConnection, "connection_made", connection_made)
    if end == "with its head held":
        monkeypatch.setattr(link, "_HEAD_SECONDS", 600.0)
        gateway.script = lambda request: [asyncio.Event()]
    elif end == "in an answer":
        gateway.script = lambda request: [Chunk(0, "begun", [1]), asyncio.Event()]
    body = json.dumps(chat_body(stream=end != "kept alive")).encode()
    gc.disable()
    try:
        async with asyncio.timeout(20):
            async with connected(address) as (reader, writer):
                writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                if end == "kept alive":
                    await reader.readuntil(b"}]")
                elif end == "in an answer":
                    await reader.readuntil(b"begun")
                else:
                    await gateway.starting.wait()
                    await gateway.generations[0].reached.wait()
            await freed.wait()  # once its task and the transport have let go of it
    finally:
        gc.enable()


async def test_a_request_after_a_rest_is_served(address: Address) -> None:
    """The read timer does not run between requests: that is the keep-alive's."""
    async with connected(address) as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().splitlines()
                if line.startswith(b"content-length")
            )
            await reader.readexactly(length)
            await asyncio.sleep(1.5 * READ_TIMEOUT)
