"""One HTTP/1.1 connection, held to limits that its client cannot stretch.

Below ASGI, where a client can hurt by sending too much (headers without end), too slowly
(a byte a minute) or nothing at all. What a request means is not known here.

Each request's scope has a `services.gateway.link.Link` among its extensions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
)

from services.gateway.link import LINK, Link


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bytes of a request line and its headers; seconds for a whole request to arrive, and
    for a connection to send its first; connections at a time."""

    max_header_bytes: int
    read_timeout: float
    max_connections: int


# How long a client that was refused in the middle of its request is still listened to. Closed at
# once, its next packet would be answered by a reset, and most clients then lose the answer.
_LINGER_SECONDS = 2.0


_MAX_PIPELINED = 16  # requests that wait behind the one that is answered
_HOP_HEADERS = (b"connection", b"upgrade", b"http2-settings")


class _HeadersTooLarge(Exception):
    """Stops the parser."""


def _new_parser(connection: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """As uvicorn makes it: what comes after a request that closes is no fault of that request."""
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits.

    The read timer runs while a request is awaited or arrives, never while an answer is
    computed or sent: a long stream is not a slow client.
    """

    def __init__(self, limits: ConnectionLimits, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._heard = False  # anything, since the last request ended
        self._arriving = False  # a request has begun and not ended
        self._in_headers = True
        self._header_bytes = 0
        self._too_large = False
        self._refused = False  # what still comes is not looked at
        self._unanswered: list[Link] = []  # several if it pipelines

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "too many connections", "overloaded")
            self.transport.close()  # it is to take no place
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._tell_gone()
        super().connection_lost(exc)
        self._let_go()

    def _let_go(self) -> None:
        """Parts from the cycles, whose transports lead back here: else all of them would stay
        until the collector of garbage in cycles finds them."""
        for link in self._unanswered:
            link.leave(self.transport)
        self._unanswered = []
        if self.cycle is not None:
            self.cycle.transport = self.transport

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._heard = True
        if self._in_headers:
            self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        idle = self.cycle is None or self.cycle.response_complete
        if (self._arriving or idle) and not self._refused:  # not for one that came whole
            self._start_timer()
        # What is not parsed yet waits in the parser, which sets itself no limit.
        if self._in_headers and self._header_bytes > self._limits.max_header_bytes:
            self._refuse_headers()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._wants_upgrade():
                self._stay_with_http1(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _stay_with_http1(self, rest: bytes) -> None:
        """Reads a request again without its wish to upgrade, which a server may ignore (RFC 9110,
        7.8); `rest` is what followed its headers. The parser takes none of it for a body."""
        parser, version = self.parser, self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name not in _HOP_HEADERS:
                lines.append(b"%b: %b" % (name, value))
            elif name == b"connection" and b"close" in value.lower():
                lines.append(b"connection: close")
        self.parser = _new_parser(self)
        self._feed(b"\r\n".join([*lines, b"", rest]))

    def _wants_upgrade(self) -> bool:
        """The request whose headers were read asks for another protocol, and is no CONNECT."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._heard = self._arriving = True

    def on_headers_complete(self) -> None:
        self._in_headers = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._too_large = True
            raise _HeadersTooLarge
        if self._wants_upgrade():
            return  # it is read again
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # it reads the scope in a task that has not begun
            self.cycle.transport = _AnswerTransport(self)  # type: ignore[assignment]
            link = Link(self.cycle)
            self._unanswered = [*(one for one in self._unanswered if not one.answered), link]
            self.scope["extensions"] = {LINK: {"link": link}}
            if 0 < len(self.pipeline) <= _MAX_PIPELINED:  # uvicorn stops reading here
                self.flow.resume_reading()  # or the end of the client would not be seen

    def on_response_complete(self) -> None:
        for link in self._unanswered:
            if link.answered:
                link.release()
        super().on_response_complete()

    def on_message_complete(self) -> None:
        if self._wants_upgrade():
            return
        super().on_message_complete()
        self._stop_timer()
        self._in_headers, self._header_bytes = True, 0
        self._heard = self._arriving = False

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse_headers()
        else:
            self._refuse(400, "this is not HTTP/1.1", "invalid_value")

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.read_timeout, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.pipeline or (answering and self._in_headers):
            self._start_timer()  # an earlier request is being answered, as it should be
        elif not self._heard or (not self._in_headers and self.cycle.response_started):
            self.transport.close()
        else:
            seconds = self._limits.read_timeout
            self._refuse(408, f"the request did not arrive within {seconds:g} s", "timeout")

    def _refuse_headers(self) -> None:
        limit = self._limits.max_header_bytes
        self._refuse(431, f"the headers are larger than {limit} bytes", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answers in OpenAI's words and hangs up, the client's half of the connection last."""
        self._stop_timer()
        if self.transport.is_closing() or self._refused:
            return
        self._refused = True
        answering = [link for link in self._unanswered if link.answering]
        self._tell_gone()
        if answering:  # the refusal would be taken for a part of that answer
            for link in answering:
                link.release_head()  # or the client would be closed on without a word
            self.transport.close()
            return
        kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + (b"retry-after: 1\r\n" if status == 503 else b"")
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self._hang_up()

    def close_after_answer(self) -> None:
        """Closes a connection whose last answer was written, perhaps before all of the request
        had come, as with a body that is refused."""
        if not self._arriving:
            self.transport.close()
        elif not self.transport.is_closing() and not self._refused:
            self._stop_timer()
            self._refused = True
            self._hang_up()

    def _hang_up(self) -> None:
        """Closes our half of the connection, and a little later the other."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        else:  # TLS has no half of a connection
            self.transport.close()

    def _tell_gone(self) -> None:
        """To the application the client has left, with every request that has no answer yet;
        uvicorn itself tells the last one alone."""
        for link in self._unanswered:
            if not link.answered:
                link.tell_gone()


class _AnswerTransport:
    """In the place of a cycle's transport, which a cycle closes after the last answer."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, connection: GuardedConnection) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.close_after_answer
