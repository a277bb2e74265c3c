"""HTTP/2 by hand, to say what no library would say.

Frames as RFC 9113 has them, and just enough of HPACK (RFC 7541, literals without an
index) to open a gRPC call.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4


def connect(address: str, *, timeout: float = 10.0) -> socket.socket:
    """A connection to `host:port` or `unix:/path`."""
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        connection.connect(address.removeprefix("unix:"))
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout)


def frame(
    kind: int, flags: int, stream: int, payload: bytes, *, length: int | None = None
) -> bytes:
    """One frame, which may lie about its length."""
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field, as a literal that is not indexed."""
    encoded = b"\0"
    for text in (name.encode(), value.encode()):
        assert len(text) < 127, "one byte of length"
        encoded += bytes([len(text)]) + text
    return encoded


def call_headers(path: str, extra: Iterable[tuple[str, str]] = ()) -> bytes:
    """The header block that opens a gRPC call."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *extra,
    )
    return b"".join(literal(name, value) for name, value in fields)


def message(data: bytes, *, length: int | None = None, compressed: int = 0) -> bytes:
    """A gRPC message in its envelope, which may lie about its length."""
    size = len(data) if length is None else length
    return bytes([compressed]) + struct.pack(">I", size) + data


def opened(path: str, body: bytes) -> bytes:
    """A whole client side: the preface, the settings, a call and its message."""
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, call_headers(path))
        + frame(DATA, 0, 1, message(body))
    )


def drain(connection: socket.socket) -> int:
    """Reads until the peer closes or says nothing for a moment; how many bytes came."""
    total = 0
    connection.settimeout(0.2)
    try:
        while data := connection.recv(65536):
            total += len(data)
    except OSError:
        pass
    return total
