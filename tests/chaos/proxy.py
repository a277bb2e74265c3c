"""A TCP proxy that is a bad network: late, lossy, cut or reset, as it is told.

A `Link` listens on a TCP port and passes connections on to a unix socket. It knows nothing
of what goes through. Bytes are never changed, dropped or reordered while a connection
lives: TCP would repair that, so a lost packet is a pause here, and a partition silence.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import cast

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of no seconds: close sends RST


@dataclass(frozen=True, slots=True)
class Weather:
    """What a link does to what goes through it; by default nothing."""

    latency: float = 0.0  # seconds, each way
    loss: float = 0.0  # share of chunks held up as by a retransmission
    retransmission: tuple[float, float] = (0.2, 1.0)  # seconds that a lost chunk is held up
    partitioned: bool = False


CALM = Weather()


class Link:
    """One listening port and every connection through it."""

    def __init__(self, upstream: str, rng: random.Random) -> None:
        self.rng = rng
        self._upstream = upstream  # path of a unix socket
        self._weather = CALM
        self._pairs: set[_Pair] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Where it listens, `host:port`."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def weather(self) -> Weather:
        return self._weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        """Changes the weather; when a partition ends, what it held goes on its way."""
        self._weather = weather
        for pair in list(self._pairs):
            pair.resume()

    async def start(self) -> None:
        """Listens on a free port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Pair(self).near, "127.0.0.1", 0)

    def reset(self) -> int:
        """Ends every connection with RST; returns how many there were."""
        pairs = list(self._pairs)
        for pair in pairs:
            pair.abort()
        return len(pairs)

    async def stop(self) -> None:
        """Closes everything."""
        assert self._server is not None
        self._server.close()
        self.reset()
        await self._server.wait_closed()

    async def connect(self, pair: _Pair) -> None:
        """Opens the other half of a connection, or ends the first with RST."""
        try:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: pair.far, self._upstream)
        except OSError:  # nobody listens: as a closed port would answer
            pair.abort()

    def add(self, pair: _Pair) -> None:
        self._pairs.add(pair)

    def discard(self, pair: _Pair) -> None:
        self._pairs.discard(pair)


class _Pair:
    """A connection: the client's half, the service's, and a pipe each way."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.near = _Half(self)
        self.far = _Half(self)
        self._out = _Pipe(link, self.far)
        self._back = _Pipe(link, self.near)
        self._connecting: asyncio.Task[None] | None = None

    def opened(self, half: _Half) -> None:
        if half is self.near:
            self._link.add(self)
            self._connecting = asyncio.create_task(self._link.connect(self))
        else:
            self._out.resume()

    def received(self, half: _Half, data: bytes | None) -> None:
        """Bytes, or None for the end, on their way to the other half."""
        (self._out if half is self.near else self._back).feed(data)

    def congested(self, half: _Half, is_congested: bool) -> None:
        """A half takes no more: the other reads no more."""
        other = self.far if half is self.near else self.near
        other.read(not is_congested)

    def resume(self) -> None:
        self._out.resume()
        self._back.resume()

    def abort(self) -> None:
        """Ends both halves at once."""
        self._link.discard(self)
        if self._connecting is not None:
            self._connecting.cancel()
        self.near.abort()
        self.far.abort()

    def closed(self) -> None:
        if self.near.closed and self.far.closed:
            self._link.discard(self)


class _Half(asyncio.Protocol):
    """One socket of a connection."""

    def __init__(self, pair: _Pair) -> None:
        self._pair = pair
        self._transport: asyncio.Transport | None = None
        self.closed = False

    @property
    def connected(self) -> bool:
        return self._transport is not None

    def write(self, data: bytes | None) -> None:
        """Sends bytes, or closes for None."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if data is None:
            self._transport.close()
        else:
            self._transport.write(data)

    def read(self, wanted: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def abort(self) -> None:
        if self._transport is None:
            return
        connection = cast(socket.socket, self._transport.get_extra_info("socket"))
        if connection.family != socket.AF_UNIX and connection.fileno() >= 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pair.opened(self)

    def data_received(self, data: bytes) -> None:
        self._pair.received(self, data)

    def eof_received(self) -> bool:
        self._pair.received(self, None)
        return True  # the pipe closes the other half in its time, and that half this one

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._pair.received(self, None)
        self._pair.closed()

    def pause_writing(self) -> None:
        self._pair.congested(self, True)

    def resume_writing(self) -> None:
        self._pair.congested(self, False)


class _Pipe:
    """One direction of a connection: chunks in order, none before its time."""

    def __init__(self, link: Link, into: _Half) -> None:
        self._link = link
        self._into = into
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[float, bytes | None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, data: bytes | None) -> None:
        weather = self._link.weather
        if weather is CALM and not self._queue and self._into.connected:
            self._deliver(data)
            return
        delay = weather.latency
        if self._link.rng.random() < weather.loss:
            delay += self._link.rng.uniform(*weather.retransmission)
        due = self._loop.time() + delay
        if self._queue:
            due = max(due, self._queue[-1][0])
        self._queue.append((due, data))
        self.resume()

    def resume(self) -> None:
        """Delivers what is due, and comes back for the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        while self._queue and self._into.connected and not self._link.weather.partitioned:
            due, data = self._queue[0]
            if due > now:
                self._timer = self._loop.call_at(due, self.resume)
                return
            self._queue.popleft()
            self._deliver(data)

    def _deliver(self, data: bytes | None) -> None:
        self._into.write(data)
