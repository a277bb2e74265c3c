"""A client that reads one answer event by event, patiently or not, and keeps the times.

Speaks just enough HTTP/1.1 for Shoal's own gateway, on a socket of its own for each request,
so that a reader can be slow and a connection be reset.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

_RECEIVE_BUFFER = 4096  # small, so that a reader who stops is soon felt
_MIN_GAP = 0.1  # seconds; shorter silences are the engine's steps


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client reads: all at once, at a trickle, with one long pause, or until it leaves."""

    kind: Literal["eager", "trickle", "stop", "leave"]
    after: int = 0  # events before it stops or leaves
    pause: float = 0.0  # seconds: between events, or once
    reset: bool = False  # leaves with RST


@dataclass(slots=True)
class Choice:
    """What came of one choice."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    ends: list[tuple[str, str | int | None]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What came of one request. `gaps` are the silences longer than usual: (from, to)."""

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    prompt_ids: list[int] | None = None
    dones: int = 0
    left: bool = False
    gaps: list[tuple[float, float]] = field(default_factory=list)


class Unanswered(Exception):
    """The connection was refused, or ended before the first byte of an answer."""


async def ask(address: str, path: str, body: dict[str, Any], manner: Manner) -> Answer:
    """Sends a request and reads its answer.

    Raises Unanswered before the first byte of the answer, OSError or EOFError after it.
    """
    answer = Answer()
    try:
        reader, writer = await _connect(address, slow=manner.kind in ("trickle", "stop"))
    except OSError as error:
        raise Unanswered(str(error))
    try:
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        writer.write(head.encode() + raw)
        await _read_answer(answer, reader, body, manner)
        if answer.left and manner.reset:
            _reset(writer)
    except (OSError, EOFError) as error:
        if answer.status:
            raise
        raise Unanswered(str(error))
    finally:
        writer.close()
    return answer


async def get(address: str, path: str) -> tuple[int, str]:
    """Status and text of a GET from `host:port` or `unix:/path`; status 0 if nobody answers."""
    try:
        reader, writer = await _connect(address)
    except OSError:
        return 0, ""
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        status, length = await _read_head(reader)
        if length is not None:
            return status, (await reader.readexactly(length)).decode()
        pieces = [piece async for piece in _chunks(reader)]
        return status, b"".join(pieces).decode()
    except (OSError, EOFError):
        return 0, ""
    finally:
        writer.close()


async def _connect(
    address: str, *, slow: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    if not slow:
        return await asyncio.open_connection(host, int(port))
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    except BaseException:
        connection.close()
        raise
    return await asyncio.open_connection(sock=connection, limit=_RECEIVE_BUFFER)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _read_answer(
    answer: Answer, reader: asyncio.StreamReader, body: dict[str, Any], manner: Manner
) -> None:
    clock = asyncio.get_running_loop().time
    last = clock()
    answer.left = manner.kind == "leave" and manner.after == 0
    if answer.left:
        return
    answer.status, length = await _read_head(reader)
    if length is not None:
        whole = json.loads(await reader.readexactly(length))
        _note_gap(answer, last, clock())
        _take_body(answer, whole)
        return
    events = 0
    async for piece in _chunks(reader):
        for line in piece.split(b"\n"):
            if line.startswith(b"data: "):
                _take_event(answer, line[6:])
                events += 1
        now = clock()
        _note_gap(answer, last, now)
        if manner.kind == "leave" and events >= manner.after:
            answer.left = True
            return
        if manner.kind == "trickle" or (manner.kind == "stop" and events == manner.after):
            await asyncio.sleep(manner.pause)  # how such a client behaves
        last = clock()


def _note_gap(answer: Answer, start: float, end: float) -> None:
    if end - start > _MIN_GAP:
        answer.gaps.append((start, end))


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, int | None]:
    """The status, and the length of a body that is not chunked."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = None
    for line in head.split("\r\n"):
        if line.startswith("content-length:"):
            length = int(line.partition(":")[2])
    return int(head.split(" ", 2)[1]), length


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The pieces of a chunked body: the gateway writes whole events in each."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        piece = await reader.readexactly(size + 2)
        yield piece[:-2]


def _take_event(answer: Answer, data: bytes) -> None:
    if data == b"[DONE]":
        answer.dones += 1
        return
    assert not answer.dones, "an event after [DONE]"
    event = json.loads(data)
    if "error" in event:
        answer.error = event["error"]
        return
    for choice in event["choices"]:
        _take_choice(answer, choice, choice.get("delta", choice))
    _take_common(answer, event)


def _take_body(answer: Answer, body: dict[str, Any]) -> None:
    if "error" in body:
        answer.error = body["error"]
        return
    for choice in body["choices"]:
        _take_choice(answer, choice, choice.get("message", choice))
    _take_common(answer, body)


def _take_common(answer: Answer, event: dict[str, Any]) -> None:
    if event.get("usage"):
        answer.usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
    if event.get("prompt_token_ids"):
        answer.prompt_ids = event["prompt_token_ids"]


def _take_choice(answer: Answer, event: dict[str, Any], message: dict[str, Any]) -> None:
    choice = answer.choices.setdefault(event["index"], Choice())
    choice.text += message.get("text") or message.get("content") or ""
    choice.ids += event.get("token_ids") or ()
    if event.get("prompt_token_ids"):
        answer.prompt_ids = event["prompt_token_ids"]
    if event.get("finish_reason"):
        choice.ends.append((event["finish_reason"], event.get("stop_reason")))
    logprobs = event.get("logprobs") or {}
    choice.logprobs += logprobs.get("token_logprobs") or ()
    choice.logprobs += [item["logprob"] for item in logprobs.get("content") or ()]
