"""What an endpoint may ask of the connection below ASGI: to write at once, to hear of its end.

`services.gateway.connection` puts a `Link` among the extensions of each request's scope; below
other servers there is none, and ASGI's own messages must do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

LINK = "shoal.link"  # the extension, a dict with the `Link` as "link"

_HEAD_SECONDS = 0.05  # that the head of an answer may wait for what follows it


class Link:
    """One request's exchange with its client."""

    __slots__ = ("_cycle", "_on_gone")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._on_gone: Callable[[], None] | None = None

    @property
    def answered(self) -> bool:
        """The whole answer has been written."""
        return bool(self._cycle.response_complete)

    @property
    def answering(self) -> bool:
        """A part of the answer has been written."""
        return bool(self._cycle.response_started) and not self.answered

    def hold_head(self) -> None:
        """The head of the answer, which must be what is sent next, waits a moment for what
        follows it: a short answer is one write then."""
        self._cycle.transport = _HeldHead(self._cycle)  # type: ignore[assignment]

    def release_head(self) -> None:
        """The head waits no longer, if it does."""
        held: object = self._cycle.transport
        if isinstance(held, _HeldHead):
            held.release()

    def write(self, piece: bytes) -> bool:
        """Sends a piece of the body that is not empty, as a chunk, between ASGI's messages.

        False, with nothing sent, while the client's socket is full, before the headers, and
        once the client has left or the response has ended.
        """
        cycle = self._cycle
        if (
            cycle.flow.write_paused
            or cycle.disconnected
            or cycle.transport.is_closing()
            or cycle.response_complete
            or not cycle.chunked_encoding
        ):
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def when_gone(self, call: Callable[[], None] | None) -> None:
        """Calls back once, when the client leaves before its answer ends, or has left; with
        None never. Call it once the body has been read: what else the client sends is read
        from now on, for only so is its end noticed."""
        self._on_gone = call
        if call is None:
            return
        if self._cycle.disconnected:
            self.tell_gone()
        else:
            self._cycle.flow.resume_reading()

    def release(self) -> None:
        """The answer has been written: the scope forgets the link, lest both be garbage in a
        cycle."""
        self._cycle.scope.pop("extensions", None)

    def leave(self, transport: asyncio.Transport) -> None:
        """The connection has ended: nothing waits to be sent, and `transport`, which is closed,
        is all that is left of it."""
        self.release_head()
        self._cycle.transport = transport

    def tell_gone(self) -> None:
        """The client has left."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        call, self._on_gone = self._on_gone, None
        if call is not None:
            call()


class _HeldHead:
    """In the place of a cycle's transport: keeps the first thing written until the second."""

    __slots__ = ("_cycle", "_head", "_timer", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head = b""
        self._timer = asyncio.get_running_loop().call_later(_HEAD_SECONDS, self.release)

    def write(self, data: bytes) -> None:
        if self._head:
            self.release(data)
        else:
            self._head = data

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.release()
        self._transport.close()

    def release(self, data: bytes = b"") -> None:
        """Writes what was kept, and more, and gives the transport its place back."""
        self._timer.cancel()
        self._cycle.transport = self._transport
        if not self._transport.is_closing() and (self._head or data):
            self._transport.write(self._head + data)
