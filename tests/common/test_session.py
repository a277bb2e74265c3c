"""How a session ends, and what it says of why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from services.common import session
from services.common.errors import Unavailable
from services.common.rpc import Outbox
from services.common.session import serve_client


class Client:
    """Says what it is given, then nothing; reads when it may."""

    def __init__(self, *words: str, leaves: bool = False) -> None:
        self.reads = asyncio.Event()
        self.read: list[str] = []
        self.heard: list[str] = []
        self.outbox = Outbox(StringValue)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._words = words
        self._leaves = leaves

    async def requests(self) -> AsyncIterator[StringValue]:
        for word in self._words:
            yield StringValue(value=word)
        if not self._leaves:
            await asyncio.Event().wait()

    async def write(self, message: StringValue) -> None:
        await self.reads.wait()
        self.read.append(message.value)

    def say(self, word: str) -> None:
        self.outbox.pending.value = word
        self.outbox.notify()

    async def serve(self, peer_timeout: float) -> None:
        await serve_client(
            self.outbox,
            self.requests(),
            lambda request: self.heard.append(request.value),
            self.write,
            self.ended,
            peer_timeout=peer_timeout,
        )


async def test_a_client_that_leaves_has_been_heard() -> None:
    client = Client("a", "b", leaves=True)
    await client.serve(10)
    assert client.heard == ["a", "b"]


async def test_silence_is_called_silence() -> None:
    with pytest.raises(Unavailable, match=r"the client was silent for 0\.05 s"):
        await Client("a").serve(0.05)


async def test_a_client_that_does_not_read_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(*"abc")
    client.say("hello")

    async def talk() -> AsyncIterator[StringValue]:
        while True:
            yield StringValue()
            await asyncio.sleep(0)

    monkeypatch.setattr(client, "requests", talk)
    with pytest.raises(Unavailable, match=r"the client read nothing for 0\.2 s"):
        await client.serve(0.2)


async def test_an_end_in_order_waits_for_the_last_messages_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client()
    client.reads.set()
    client.say("goodbye")
    client.ended.set_result(None)
    await client.serve(10)
    assert client.read == ["goodbye"]
    monkeypatch.setattr(session, "FLUSH_SECONDS", 0.05)
    slow = Client()
    slow.say("goodbye")
    slow.ended.set_result(None)
    with pytest.raises(Unavailable, match=r"did not read the last messages within 0\.05 s"):
        await slow.serve(10)
