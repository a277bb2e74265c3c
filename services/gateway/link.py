"""What an endpoint may ask of the connection below ASGI: to write at once, to hear of its end.

`services.gateway.connection` puts a `Link` among the extensions of each request's scope; below
other servers there is none, and ASGI's own messages must do.
"""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

LINK = "shoal.link"  # the extension, a dict with the `Link` as "link"


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

    def tell_gone(self) -> None:
        """The client has left."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        call, self._on_gone = self._on_gone, None
        if call is not None:
            call()
