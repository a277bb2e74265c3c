"""What an endpoint may ask of the connection below ASGI."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from services.gateway.link import Link

PATIENCE = 5.0


class Transport:
    """Keeps what is written, a piece a write."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.written = asyncio.Event()
        self.closed = False

    def write(self, data: bytes) -> None:
        self.pieces.append(data)
        self.written.set()

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def held() -> tuple[Any, Transport]:
    """A cycle whose head is to wait, and its transport."""
    transport = Transport()
    cycle: Any = SimpleNamespace(transport=transport)
    Link(cycle).hold_head()
    return cycle, transport


async def test_a_head_goes_out_with_what_follows_it() -> None:
    cycle, transport = held()
    cycle.transport.write(b"head ")
    assert transport.pieces == []
    cycle.transport.write(b"event ")
    cycle.transport.write(b"another")
    assert transport.pieces == [b"head event ", b"another"]
    assert cycle.transport is transport


async def test_a_head_that_nothing_follows_goes_out_by_itself_soon() -> None:
    cycle, transport = held()
    cycle.transport.write(b"head")
    async with asyncio.timeout(PATIENCE):
        await transport.written.wait()
    assert transport.pieces == [b"head"]
    cycle.transport.write(b"event")
    assert transport.pieces == [b"head", b"event"]


async def test_a_connection_that_is_closed_takes_the_head_first_and_nothing_after() -> None:
    cycle, transport = held()
    cycle.transport.write(b"head")
    cycle.transport.close()
    assert (transport.pieces, transport.closed) == ([b"head"], True)
    cycle, transport = held()
    cycle.transport.write(b"head")
    transport.close()  # by the client
    assert cycle.transport.is_closing()
    cycle.transport.write(b"event")
    assert transport.pieces == []
