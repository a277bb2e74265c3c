"""Messages on a byte stream: whole ones only, in order, and never a wait that was not asked for."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator

import pytest

from protos import engine_pb2
from services.worker.framing import FrameSocket, encode, read_message, write_message


@pytest.fixture
def pair() -> Iterator[tuple[FrameSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    link = FrameSocket(ours)
    yield link, theirs
    link.close()
    theirs.close()


def command(*aborts: int) -> engine_pb2.EngineCommand:
    return engine_pb2.EngineCommand(aborts=aborts)


def test_messages_come_out_whole_however_they_are_cut(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    link, theirs = pair
    data = encode(command(1)) + encode(command()) + encode(command(2, 3))
    received: list[engine_pb2.EngineCommand] = []
    for index in range(len(data)):
        theirs.send(data[index : index + 1])
        received += link.receive(engine_pb2.EngineCommand)
    assert received == [command(1), command(), command(2, 3)]
    assert link.receive(engine_pb2.EngineCommand) == []


def test_a_peer_that_does_not_read_congests_but_does_not_block(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    link, theirs = pair
    message = command(*range(1_000_000))
    link.send(message)
    link.send(command(7))
    assert link.congested
    reader, received = FrameSocket(theirs), list[engine_pb2.EngineCommand]()
    while len(received) < 2:
        link.flush()
        received += reader.receive(engine_pb2.EngineCommand)
    assert received == [message, command(7)]
    assert not link.congested


def test_a_peer_that_left_is_an_end_of_file(pair: tuple[FrameSocket, socket.socket]) -> None:
    link, theirs = pair
    theirs.close()
    link.wait(5.0)
    with pytest.raises(EOFError):
        link.receive(engine_pb2.EngineCommand)
    with pytest.raises(EOFError):
        link.send(command(1))


def test_an_absurd_length_is_refused(pair: tuple[FrameSocket, socket.socket]) -> None:
    link, theirs = pair
    theirs.send(struct.pack("<I", (256 << 20) + 1))
    with pytest.raises(ValueError, match="over the limit"):
        link.receive(engine_pb2.EngineCommand)


async def test_the_agent_s_side_speaks_the_same() -> None:
    ours, theirs = socket.socketpair()
    link = FrameSocket(ours)
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    link.send(command(1, 2))
    assert await read_message(reader, engine_pb2.EngineCommand) == command(1, 2)
    write_message(writer, command(3))
    await writer.drain()
    assert link.receive(engine_pb2.EngineCommand) == [command(3)]
    link.close()
    with pytest.raises(EOFError):
        await read_message(reader, engine_pb2.EngineCommand)
    writer.close()
    await writer.wait_closed()
