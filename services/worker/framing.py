"""Protobuf messages on a byte stream: each after its length, four bytes, little-endian.

The stream is the agent's socket to rank 0; what names it to the rank is here too.

The rank's side is a plain socket that never blocks unless asked to (`FrameSocket`), the
agent's side asyncio streams (`read_message`, `write_message`). What the messages mean is
not known here.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from typing import TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

CONFIG_ENV = "SHOAL_RANK_CONFIG"  # the worker's configuration, as JSON
SOCKET_ENV = "SHOAL_RANK_SOCKET"  # the path of the agent's socket

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 256 << 20  # equal to the gRPC limit: what came in can be passed on
_RECEIVE_BYTES = 1 << 20
_MOST_AT_ONCE = 8 << 20


def encode(message: Message) -> bytes:
    """A message with its length before it."""
    body = message.SerializeToString()
    return _LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader, cls: type[M]) -> M:
    """The next message. Raises EOFError (asyncio.IncompleteReadError) when the peer is gone,
    ValueError for a length over the limit."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    _check_length(length)
    return cls.FromString(await reader.readexactly(length))


def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Queues a message; `writer.drain()` waits for room."""
    writer.write(encode(message))


class FrameSocket:
    """Messages over a non-blocking stream socket, for a process without an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = memoryview(b"")

    @property
    def congested(self) -> bool:
        """Bytes of an earlier message still wait for the peer to read."""
        return len(self._outgoing) > 0

    def receive(self, cls: type[M]) -> list[M]:
        """Every message that has arrived in full, without waiting.

        Reads until the socket is empty, which a busy peer may have filled again meanwhile,
        but not much more than `_MOST_AT_ONCE`. Raises EOFError when the peer is gone,
        ValueError for a length over the limit.
        """
        size = 0
        while size < _MOST_AT_ONCE and (chunk := self._receive_chunk()) is not None:
            if not chunk and size:
                break  # what came before it is taken first; the next call tells
            if not chunk:
                raise EOFError("the peer closed the connection")
            self._incoming += chunk
            size += len(chunk)
        return self._take_messages(cls)

    def send(self, message: Message) -> None:
        """Queues a message and sends what the socket takes at once.

        Raises EOFError when the peer is gone.
        """
        self._outgoing = memoryview(bytes(self._outgoing) + encode(message))
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes at once. Raises EOFError when the peer is gone."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._sock.send(self._outgoing) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the peer closed the connection") from error

    def wait(self, timeout: float | None, *fds: int) -> None:
        """Blocks until something arrived, here or at one of some other descriptors, or queued
        bytes can be sent, or time is up (seconds)."""
        writers = [self._sock] if self._outgoing else []
        readers: list[socket.socket | int] = [self._sock, *fds]
        select.select(readers, writers, [], timeout)

    def wait_writable(self, timeout: float | None) -> None:
        """Blocks until queued bytes can be sent, or time is up (seconds)."""
        select.select([], [self._sock], [], timeout)

    def close(self) -> None:
        """Closes the socket; unsent bytes are lost."""
        self._sock.close()

    def _receive_chunk(self) -> bytes | None:
        """Bytes that have arrived; None if there are none, empty if the peer is gone."""
        try:
            return self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""

    def _take_messages(self, cls: type[M]) -> list[M]:
        messages: list[M] = []
        offset, end = 0, len(self._incoming)
        while end - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, offset)
            _check_length(length)
            start = offset + _LENGTH.size
            if end - start < length:
                break
            offset = start + length
            messages.append(cls.FromString(bytes(self._incoming[start:offset])))
        del self._incoming[:offset]
        return messages


def _check_length(length: int) -> None:
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
