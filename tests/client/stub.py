"""A server of event streams that does exactly what a test says, on a clock that the test owns."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def said(text: str, finish: str | None = None) -> bytes:
    """A chat chunk."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def usage(prompt: int, output: int, cached: int | None = None) -> bytes:
    """The last chunk, with the counts."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": counts})


def chunk(data: bytes) -> bytes:
    """As a chunked body has it."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class HandClock:
    """A clock that moves when it is told to, and tells when it is read."""

    def __init__(self) -> None:
        self.now = 100.0
        self.was_read = asyncio.Event()

    def __call__(self) -> float:
        self.was_read.set()
        return self.now


Handler = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Stub:
    """Where it listens, and what it was asked."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def stub_server(
    handler: Handler, models: Sequence[str] = ("stub",), tls: ssl.SSLContext | None = None
) -> AsyncIterator[Stub]:
    """Serves /v1/models, and has `handler` answer every POST on its kept-alive connection."""
    stub = Stub()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stub.connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                stub.heads.append(head)
                if head.startswith(b"GET"):
                    cards = json.dumps({"data": [{"id": name} for name in models]}).encode()
                    line = f"content-length: {len(cards)}\r\n\r\n".encode()
                    writer.write(b"HTTP/1.1 200 OK\r\n" + line + cards)
                    continue
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                stub.bodies.append(json.loads(await reader.readexactly(length)))
                await handler(stub.bodies[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    scheme = "https" if tls else "http"
    stub.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield stub
    finally:
        server.close()


@dataclass(frozen=True)
class Timeline:
    """An answer: seconds before each of its pieces of text, on the hand clock."""

    delays: tuple[float, ...]
    prompt_tokens: int = 10


def timed(clock: HandClock, timelines: Sequence[Timeline]) -> Handler:
    """Answers the requests one after another, each by its timeline.

    The clock stands still until the client has read what was sent: times are exact.
    """
    left = iter(timelines)

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        timeline = next(left)
        head = HEAD
        for number, delay in enumerate(timeline.delays):
            clock.now += delay
            clock.was_read.clear()
            writer.write(head + chunk(said(f"w{number} ")))
            head = b""
            await clock.was_read.wait()
        end = usage(timeline.prompt_tokens, len(timeline.delays)) + DONE
        writer.write(chunk(end) + LAST_CHUNK)

    return answer
