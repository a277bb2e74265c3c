"""HTTP/1.1 connections that read event streams at a few microseconds an event.

A load client must not be what is measured, and a general one spends 50 to 100 us an event.
A `Connection` sends one request at a time and stamps what comes with its clock; a `Pool` has
as many as are in use. No redirects and no content encoding: neither is asked for.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from services.client.answer import Answer, Clock, Failure, Reader
from services.client.endpoint import ApiError, error_text

_CONNECT_SECONDS = 10.0
_MAX_ERROR_BYTES = 65536


@dataclass(frozen=True)
class Origin:
    """Scheme, host and port of a server, and the headers of every request to it."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, url: str, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
    ) -> Origin:
        """The origin of a URL; `tls` is whom to trust if it is https."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        trust = tls or ssl.create_default_context() if secure else None
        return cls(parts.hostname or "", port, trust, headers or {})

    def post(self, path: str, body: bytes) -> bytes:
        """A whole request with a JSON body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode("utf-8") + body


class Connection(asyncio.Protocol):
    """One connection; make it with `connect`."""

    def __init__(self) -> None:
        self.usable = True  # for another request
        self.touched = False  # whether anything came since the last request
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._refusal = bytearray()  # the body of an answer that is no stream

    @classmethod
    async def connect(cls, origin: Origin) -> Connection:
        """Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, protocol = await loop.create_connection(
                cls,
                origin.host,
                origin.port,
                ssl=origin.tls,
                server_hostname=origin.host if origin.tls else None,
            )
        return protocol

    async def exchange(self, request: bytes, reader: Reader) -> Answer:
        """Sends a request and returns when its stream has ended. Raises Failure."""
        assert self._transport is not None, "connected"
        self._reader, self._status, self.touched = reader, 0, False
        self._refusal.clear()
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._reader = self._ended = None
        return reader.answer

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self.touched = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(Failure("bad answer", f"what answers does not speak HTTP/1.1: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._reader is not None and self._status == 200 and error is None:
            self.on_message_complete()  # a body without a length ends with its connection
        self._fail(Failure("cut off", f"the connection was lost: {error or 'closed'}"))

    # -- httptools

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._reader is None:
            return
        if self._status == 200:
            self._reader.feed(data)
        elif len(self._refusal) < _MAX_ERROR_BYTES:
            self._refusal += data

    def on_message_complete(self) -> None:
        reader, ended = self._reader, self._ended
        if reader is None or ended is None or ended.done():
            return
        self.usable = self.usable and self._parser.should_keep_alive()
        if self._status != 200:
            text = error_text(bytes(self._refusal), self._status)
            ended.set_exception(Failure(f"http {self._status}", text))
            return
        try:
            reader.close()
        except (ApiError, Failure) as error:
            self._fail(error)
        else:
            ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Ends the request in flight, and the connection, which is of no more use."""
        self.close()
        if self._ended is None or self._ended.done():
            return
        if isinstance(error, ApiError):
            error = Failure("error event", str(error))
        self._ended.set_exception(error)


class Pool:
    """Connections to one origin: as many as requests are in flight, each used again."""

    def __init__(self, origin: Origin, clock: Clock = time.perf_counter) -> None:
        self._origin = origin
        self._clock = clock
        self._free: list[Connection] = []
        self._all: set[Connection] = set()

    async def post(
        self, path: str, body: bytes, *, timeout: float | None = None, keep_text: bool = False
    ) -> Answer:
        """Sends a request; its time runs from here, so it has the making of a connection in it.

        Raises:
            Failure: whatever went wrong; after `timeout` seconds its kind is "timeout".
        """
        request = self._origin.post(path, body)
        reader = Reader(self._clock, keep_text=keep_text)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    connection, fresh = await self._take()
                    try:
                        return await connection.exchange(request, reader)
                    except Failure:
                        # A server may close what is idle just when it is used: not its failure.
                        if fresh or connection.touched:
                            raise
                    finally:
                        self._put_back(connection)
        except TimeoutError:
            raise Failure("timeout", f"no whole answer within {timeout:g} s")
        except OSError as error:
            raise Failure("connect", f"cannot connect: {error.strerror or error}")

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    async def _take(self) -> tuple[Connection, bool]:
        while self._free:
            connection = self._free.pop()
            if connection.usable:
                return connection, False
            self._all.discard(connection)
        try:
            connection = await Connection.connect(self._origin)
        except TimeoutError:
            raise OSError(f"no connection within {_CONNECT_SECONDS:g} s")
        self._all.add(connection)
        return connection, True

    def _put_back(self, connection: Connection) -> None:
        if connection.usable:
            self._free.append(connection)
        else:
            self._all.discard(connection)
