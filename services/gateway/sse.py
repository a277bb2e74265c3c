"""Server-sent events over raw ASGI: framing, and the life of one event stream.

Nothing here knows what the events say.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Scope, Send

from services.gateway.link import LINK, Link

KEEPALIVE_SECONDS = 15.0  # under the idle limits of common proxies, 30 s and up
DONE = b"data: [DONE]\n\n"

_COMMENT = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LINE_END = re.compile(r"\r\n|\n|\r")
# Legal inside JSON, yet line ends to clients that split text by Unicode's rules.
_UNICODE_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def json_text(text: str) -> bytes:
    """Text as a JSON string that stays on one line for every reader of lines."""
    data = msgspec.json.encode(text)
    return data if text.isascii() else _one_line(data)


def json_object(fields: Mapping[str, Any]) -> bytes:
    """An object as JSON that stays on one line for every reader of lines."""
    return _one_line(msgspec.json.encode(fields))


def _one_line(data: bytes) -> bytes:
    for raw, escaped in _UNICODE_LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


def json_event(data: bytes) -> bytes:
    """An event that carries one line of JSON."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """An event with a name, that carries one line of JSON."""
    return b"event: " + name.encode() + b"\ndata: " + _one_line(data) + b"\n\n"


def text_event(text: str) -> bytes:
    """An event that carries plain text: a `data:` line for each of its lines."""
    lines = "".join(f"data: {line}\n" for line in _LINE_END.split(text))
    return f"{lines}\n".encode()


class EventStream:
    """One response of events.

    `start` sends the headers; after it `write` and `end` send whole events. A write
    waits while the client's socket is full, which is how a slow client is felt; `write_now`
    never waits, and sends nothing then.
    """

    def __init__(
        self, send: Send, scope: Scope | None = None, *, keepalive: float = KEEPALIVE_SECONDS
    ) -> None:
        self._send = send
        extensions: Mapping[str, Any] = (scope or {}).get("extensions") or {}
        self._link: Link | None = extensions[LINK]["link"] if LINK in extensions else None
        self._clock = asyncio.get_running_loop().time
        self._keepalive = keepalive
        self._last_write = self._clock()
        self._writing = False
        self.started = False
        self.ended = False

    async def start(self) -> None:
        """Sends the status and the headers, together with the first events if those come soon."""
        self.started = True
        if self._link is not None:
            self._link.hold_head()
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def write(self, events: bytes) -> None:
        """Sends one or more whole events."""
        self._writing = True
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._writing = False
        self._last_write = self._clock()

    def write_now(self, events: bytes) -> bool:
        """Sends whole events within the call; False, with nothing sent, if that cannot be now."""
        if self._writing or self._link is None or not self._link.write(events):
            return False
        self._last_write = self._clock()
        return True

    async def end(self, events: bytes = b"") -> None:
        """Sends the last events, and closes the response."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    def until_keepalive(self) -> float:
        """Seconds until a silent stream should show a sign of life."""
        return max(self._last_write + self._keepalive - self._clock(), 0.001)

    async def keep_alive(self) -> None:
        """Sends a comment if the stream is open and has been silent for long."""
        silent = self._clock() - self._last_write >= self._keepalive
        if not silent:
            return
        self._last_write = self._clock()
        if self.started and not self.ended and not self._writing:
            await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
