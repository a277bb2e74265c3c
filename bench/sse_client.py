"""A lean client of event streams, so that a benchmark measures the server and not its client.

One `Connection` is one kept-alive HTTP/1.1 connection that sends one request at a time and
counts the events of the answer by scanning bytes: about 3 us of CPU an event, where a general
client spends 50 to 100. It trusts the server: no redirects, no TLS, no content encoding.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import cast

_EVENT = b"data: {"
_DONE = b"data: [DONE]"
_END = b"0\r\n\r\n"  # of a chunked body
_OVERLAP = len(_DONE) - 1  # bytes that may be the begin of something whose end is still to come
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_OK = re.compile(rb"HTTP/1\.1 200 ")


class BadAnswer(Exception):
    """The server answered with anything but a whole event stream."""


@dataclass(slots=True)
class Answer:
    """What came of one request; times are `time.perf_counter` seconds.

    `tokens` is what the usage event said, 0 if there was none.
    """

    sent_at: float
    first_at: float = 0.0
    ended_at: float = 0.0
    num_events: int = 0
    tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, events), if asked for


class Connection(asyncio.Protocol):
    """One connection; make it with `connect`."""

    def __init__(self, host: str, *, keep_arrivals: bool = False) -> None:
        self._host = host
        self._keep_arrivals = keep_arrivals
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._ended: asyncio.Future[Answer] | None = None
        self._head = b""  # of the answer, while it is not whole
        self._tail = b""  # the last bytes before what comes next
        self._done = False

    @classmethod
    async def connect(cls, host: str, port: int, *, keep_arrivals: bool = False) -> Connection:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(
            lambda: cls(f"{host}:{port}", keep_arrivals=keep_arrivals), host, port
        )
        return protocol

    async def post(self, path: str, body: bytes) -> Answer:
        """Sends a request and returns when its stream has ended. Raises BadAnswer."""
        assert self._transport is not None, "connected"
        self._ended = asyncio.get_running_loop().create_future()
        self._head, self._tail, self._done = b"", b"", False
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._answer = Answer(time.perf_counter())
        self._transport.write(head.encode() + body)
        return await self._ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        answer, ended = self._answer, self._ended
        if answer is None or ended is None or ended.done():
            return
        if not self._head.endswith(b"\r\n\r\n"):
            data = self._take_head(data)
        scanned = self._tail + data
        events = scanned.count(_EVENT) - self._tail.count(_EVENT)
        if events:
            now = time.perf_counter()
            answer.first_at = answer.first_at or now
            answer.num_events += events
            if self._keep_arrivals:
                answer.arrivals.append((now, events))
            if counts := _TOKENS.findall(scanned):
                answer.tokens = int(counts[-1])
        self._done = self._done or _DONE in scanned
        if self._done and scanned.endswith(_END):
            answer.ended_at = time.perf_counter()
            self._answer = None
            ended.set_result(answer)
        self._tail = scanned[-_OVERLAP:]

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(BadAnswer(f"the connection was lost: {error}"))

    def _take_head(self, data: bytes) -> bytes:
        """Takes in what belongs to the status and headers; the rest is the body's."""
        head, blank, rest = (self._head + data).partition(b"\r\n\r\n")
        self._head = head + blank
        if blank and not _OK.match(head) and self._ended is not None:
            self._ended.set_exception(BadAnswer((head + rest)[:500].decode("utf-8", "replace")))
        return rest
