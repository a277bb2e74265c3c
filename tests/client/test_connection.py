"""Connections of the load client against a server that does exactly what a test says."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from services.client.answer import Answer, Failure
from services.client.connection import Origin, Pool
from services.client.endpoint import Endpoint
from tests.certificates import Authority
from tests.client.stub import (
    DONE,
    HEAD,
    LAST_CHUNK,
    HandClock,
    Handler,
    Timeline,
    chunk,
    event,
    said,
    stub_server,
    timed,
    usage,
)

REFUSED = b'{"error":{"message":"the queue is full"}}'


def sends(*parts: bytes, close: bool = False) -> Handler:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if close:
            writer.close()

    return answer


async def ask(handler: Handler, *, timeout: float = 10.0) -> Answer:
    async with stub_server(handler) as stub:
        pool = Pool(Origin.of(stub.url, {"X-Team": "blue"}))
        try:
            return await pool.post("/v1/chat/completions", b"{}", timeout=timeout, keep_text=True)
        finally:
            pool.close()


async def test_times_are_those_of_the_clock_and_counts_the_servers() -> None:
    clock = HandClock()
    async with stub_server(timed(clock, [Timeline((0.5, 0.25, 0.125))])) as stub:
        pool = Pool(Origin.of(stub.url), clock)
        answer = await pool.post("/v1/chat/completions", b"{}", keep_text=True)
        pool.close()
    assert answer.sent_at == 100.0
    assert answer.arrivals == [100.5, 100.75, 100.875]
    assert (answer.first_at, answer.last_at, answer.ended_at) == (100.5, 100.875, 100.875)
    assert (answer.tokens, answer.text, answer.num_events) == (3, "w0 w1 w2 ", 4)


async def test_a_role_alone_is_no_first_token_and_usage_counts_tokens() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    body = role + said("ab", "stop") + usage(7, 5, cached=4) + DONE
    answer = await ask(sends(HEAD, chunk(body), LAST_CHUNK))
    assert len(answer.arrivals) == 1
    assert (answer.tokens, answer.finish_reason) == (5, "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_without_usage_events_with_text_count() -> None:
    answer = await ask(sends(HEAD, chunk(said("a") + said("b") + DONE), LAST_CHUNK))
    assert (answer.usage, answer.tokens) == (None, 2)


async def test_a_body_may_end_with_its_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
    answer = await ask(sends(head, said("a") + DONE, close=True))
    assert answer.text == "a"


async def test_connections_are_used_again_and_headers_sent() -> None:
    async with stub_server(sends(HEAD, chunk(said("a") + DONE), LAST_CHUNK)) as stub:
        pool = Pool(Origin.of(stub.url, {"X-Team": "blue"}))
        for _ in range(3):
            await pool.post("/v1/completions", b'{"n": 1}')
        await asyncio.gather(*(pool.post("/v1/completions", b"{}") for _ in range(2)))
        pool.close()
    assert stub.connections == 2
    assert stub.bodies[0] == {"n": 1}
    assert b"\r\nX-Team: blue\r\n" in stub.heads[0]


async def test_a_connection_that_was_closed_while_idle_is_no_failure() -> None:
    async with stub_server(sends(HEAD, chunk(said("a") + DONE), LAST_CHUNK, close=True)) as stub:
        pool = Pool(Origin.of(stub.url))
        answers = [await pool.post("/v1/completions", b"{}") for _ in range(5)]
        pool.close()
    assert [answer.tokens for answer in answers] == [1] * 5


@pytest.mark.parametrize(
    ("handler", "kind", "sentence"),
    [
        (
            sends(b"HTTP/1.1 429 X\r\ncontent-length: 41\r\n\r\n" + REFUSED),
            "http 429",
            "the queue is full",
        ),
        (
            sends(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"),
            "http 502",
            "answered 502",
        ),
        (sends(HEAD, chunk(said("a")), LAST_CHUNK), "cut off", "without"),
        (sends(HEAD, chunk(said("a")), close=True), "cut off", "ended without"),
        (
            sends(HEAD, chunk(said("a") + event({"error": {"message": "the worker was lost"}}))),
            "error event",
            "the worker was lost",
        ),
        (sends(HEAD, chunk(b"data: {oops\n\n")), "error event", "no chunk"),
        (sends(b"SSH-2.0-OpenSSH_9.6\r\n"), "bad answer", "does not speak HTTP"),
    ],
)
async def test_each_failure_has_its_kind(handler: Handler, kind: str, sentence: str) -> None:
    with pytest.raises(Failure, match=sentence) as failure:
        await ask(handler)
    assert failure.value.kind == kind


async def test_a_server_that_hangs_is_a_timeout() -> None:
    with pytest.raises(Failure, match=r"within 0\.05 s") as failure:
        await ask(sends(HEAD, chunk(said("a"))), timeout=0.05)
    assert failure.value.kind == "timeout"


async def test_nobody_there_is_a_failure_to_connect() -> None:
    pool = Pool(Origin("127.0.0.1", 9))
    with pytest.raises(Failure, match="cannot connect") as failure:
        await pool.post("/v1/completions", b"{}")
    assert failure.value.kind == "connect"


async def test_tls_takes_the_authority_that_was_named_and_no_other(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    files = authority.issue("server")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files.cert, files.key)
    handler = sends(HEAD, chunk(said("a") + DONE), LAST_CHUNK)
    async with stub_server(handler, tls=tls) as stub:
        trusting = Pool(Origin.of(stub.url, tls=Endpoint(stub.url, ca=authority.ca).trust()))
        assert (await trusting.post("/v1/completions", b"{}")).tokens == 1
        trusting.close()
        with pytest.raises(Failure, match="cannot connect") as failure:
            await Pool(Origin.of(stub.url)).post("/v1/completions", b"{}")
    assert failure.value.kind == "connect"


async def test_after_a_failure_the_pool_still_serves() -> None:
    answers = iter([sends(HEAD, close=True), sends(HEAD, chunk(said("a") + DONE), LAST_CHUNK)])

    async def each(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await next(answers)(body, writer)

    async with stub_server(each) as stub:
        pool = Pool(Origin.of(stub.url))
        with pytest.raises(Failure):
            await pool.post("/v1/completions", b"{}")
        assert (await pool.post("/v1/completions", b"{}")).tokens == 1
        pool.close()
