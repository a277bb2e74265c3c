"""How the server of a stream serves one client: it reads and writes at once, and ends.

The reader never waits for the writer. Knows nothing of what the messages mean, nor of
who else is connected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from google.protobuf.message import Message

from services.common.errors import ShoalError, Unavailable
from services.common.rpc import Outbox

FLUSH_SECONDS = 1.0  # for the last messages of a session that ends in order

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


async def send_headers(context: Any) -> None:
    """Begins a call's answer before its first message.

    A first write that is cut short would leave the headers in doubt, and then no status
    could be sent.
    """
    await context.send_initial_metadata(())


def in_time(
    write: Callable[[A], Awaitable[None]], seconds: float, lost: type[ShoalError] = Unavailable
) -> Callable[[A], Awaitable[None]]:
    """A writer that raises `lost` for a client which takes nothing of a message.

    Needs `send_headers` first.
    """

    async def write_in_time(message: A) -> None:
        try:
            async with asyncio.timeout(seconds):
                await write(message)
        except TimeoutError:
            raise lost(f"the client read nothing for {seconds:g} s")

    return write_in_time


async def serve_client(
    outbox: Outbox[A],
    requests: AsyncIterator[Q],
    receive: Callable[[Q], None],
    write: Callable[[A], Awaitable[None]],
    ended: asyncio.Future[None],
    *,
    peer_timeout: float,
) -> None:
    """Serves one client until it leaves or `ended` is done.

    `receive` takes a message and must not wait; `write` sends one. Raises Unavailable if
    the client says or reads nothing for `peer_timeout` seconds, and what `receive`, `write`
    and `ended` raise.
    """
    reader = _read(requests, receive, peer_timeout)
    await run_session(outbox, in_time(write, peer_timeout), ended, reader)


async def run_session(
    outbox: Outbox[A],
    write: Callable[[A], Awaitable[None]],
    ended: asyncio.Future[None],
    *others: Coroutine[Any, Any, None],
) -> None:
    """Runs an outbox, and coroutines beside it, until one of them or `ended` is done.

    A session that `ended` ends in order may still write what is pending. Raises what ended
    it, Unavailable if the client does not read the rest in time.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in (outbox.run(write), *others)]
    try:
        await asyncio.wait({*tasks, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        if ended.done():
            ended.result()
            await _flush(outbox)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _flush(outbox: Outbox[A]) -> None:
    try:
        async with asyncio.timeout(FLUSH_SECONDS):
            await outbox.flushed()
    except TimeoutError:
        raise Unavailable(f"the client did not read the last messages within {FLUSH_SECONDS:g} s")


async def _read(
    requests: AsyncIterator[Q], receive: Callable[[Q], None], peer_timeout: float
) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(peer_timeout) as silence:
            async for request in requests:
                silence.reschedule(loop.time() + peer_timeout)
                receive(request)
    except TimeoutError:
        raise Unavailable(f"the client was silent for {peer_timeout:g} s")
