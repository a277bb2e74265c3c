"""What the sessions of both roles have in common: who is connected, and what is in flight.

A session ends when the client leaves or falls silent, or when the process has drained.
Knows nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from services.common.rpc import IDLE_PEER_TIMEOUT_SECONDS, Outbox
from services.common.session import serve_client

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


class Sessions:
    """The open sessions of one process, what they have in flight, and whether it drains.

    While it drains, what still arrives is done: it was sent before the client knew.
    """

    def __init__(self, *, peer_timeout: float = IDLE_PEER_TIMEOUT_SECONDS) -> None:
        self.peer_timeout = peer_timeout
        self.draining = False
        self.work = 0  # jobs or open texts
        self._outboxes: set[Outbox[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __len__(self) -> int:
        return len(self._outboxes)

    def change_work(self, difference: int) -> None:
        """Counts jobs or texts that began, or (negative) that are over."""
        self.work += difference
        if self.work:
            self._idle.clear()
        else:
            self._idle.set()

    async def idle(self) -> None:
        """Returns when nothing is in flight."""
        await self._idle.wait()

    def drain(self) -> None:
        """Tells every client to send no new work."""
        self.draining = True
        for outbox in self._outboxes:
            outbox.notify()

    def end(self) -> None:
        """Ends every session once what it has pending is written."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def serve(
        self,
        outbox: Outbox[A],
        requests: AsyncIterator[Q],
        receive: Callable[[Q], None],
        write: Callable[[A], Awaitable[None]],
    ) -> None:
        """Serves one client until it leaves or the sessions are ended.

        `receive` takes a message and must not wait; `write` sends one. Raises Unavailable
        if the client falls silent or does not read, and what `receive` raises.
        """
        self._outboxes.add(outbox)
        try:
            await serve_client(
                outbox, requests, receive, write, self._ended, peer_timeout=self.peer_timeout
            )
        finally:
            self._outboxes.discard(outbox)
