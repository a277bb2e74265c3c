"""What the sessions of both roles have in common: who is connected, and how one ends.

A session reads and writes at once; the reader never waits for the writer. It ends when
the client leaves or falls silent, or when the process has drained. Knows nothing of what
the messages mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from services.common.errors import Unavailable
from services.common.rpc import IDLE_PEER_TIMEOUT_SECONDS, Outbox

_FLUSH_SECONDS = 1.0  # for the last messages of a session that ends in order

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
        self._ended = asyncio.Event()

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
        self._ended.set()

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
        tasks = [
            asyncio.create_task(outbox.run(write)),
            asyncio.create_task(self._read(requests, receive)),
            asyncio.create_task(self._ended.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if self._ended.is_set():
                async with asyncio.timeout(_FLUSH_SECONDS):
                    await outbox.flushed()
        except TimeoutError:
            raise Unavailable(f"the client was silent for {self.peer_timeout:g} s")
        finally:
            self._outboxes.discard(outbox)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Q], receive: Callable[[Q], None]) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.peer_timeout) as silence:
            async for request in requests:
                silence.reschedule(loop.time() + self.peer_timeout)
                receive(request)
