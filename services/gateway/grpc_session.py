"""shoal.v1.Inference.Session: many generations on one stream.

    reader -- starts, cancels --> a task a generation -- parked chunks --> writer --> client

Only the writer waits for the client. A generation's task parks one chunk a choice here and
waits until the writer has taken them; what comes meanwhile merges in the generation, whose
own cap ends it if that grows too large. So each message has the news of all generations,
and a client that does not read costs no more than the caps.

Knows nothing of prompts, and of a generation only how to read it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from protos import common_pb2, inference_pb2
from services.common.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    Overloaded,
    ShoalError,
    Unavailable,
)
from services.common.wire import error_to_proto
from services.gateway import from_proto
from services.gateway.domain import Chunk, Generation, Usage

log = logging.getLogger(__name__)

MAX_LIVE = 4096  # generations of one session
MAX_REFUSALS = 4096  # that a client may leave unread
_MESSAGE_BYTES = 1 << 20  # at which a message is full; the last update may exceed it
_RETRY_SECONDS = 1.0

Start = inference_pb2.SessionStart
Begin = Callable[[Start], AbstractAsyncContextManager[Generation]]
Write = Callable[[inference_pb2.SessionResponse], Awaitable[None]]


class InferenceSession:
    """One client's generations, by the ids it gave them.

    `begin` starts a generation and gives it up at the end; it may raise ShoalError, which is
    then that generation's end, and no more.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin_generation = begin
        self._live: dict[int, _Live] = {}  # until its end is in a message
        self._news: dict[_Live, None] = {}  # those with something to send, in order
        self._refused: deque[inference_pb2.SessionRefusal] = deque()
        self._dirty = asyncio.Event()
        self._half_closed = False
        self._ending = False

    async def run(
        self, requests: AsyncIterator[inference_pb2.SessionRequest], write: Write
    ) -> None:
        """Serves the client until its side has ended and its generations too.

        Gives up what is left when it is cancelled, or `write` raises. Raises Overloaded if
        the client reads no refusals, Unavailable if `end_when_idle` ended it.
        """
        reader = asyncio.create_task(self._read(requests))
        writer = asyncio.create_task(self._write(write))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                reader.result()
            await writer
        finally:
            await self._close(reader, writer)

    def end_when_idle(self) -> None:
        """Ends the stream once no generation is left, whether or not the client's side has."""
        self._ending = True
        self._dirty.set()

    # -- the client's side

    async def _read(self, requests: AsyncIterator[inference_pb2.SessionRequest]) -> None:
        async for request in requests:
            for start in request.starts:
                self._begin(start)
            for generation_id in request.cancels:
                if (live := self._live.get(generation_id)) is not None:
                    live.task.cancel()
        self._half_closed = True
        self._dirty.set()

    def _begin(self, start: Start) -> None:
        if start.id in self._live:
            self._refuse(start.id, InvalidRequest(f"id {start.id} is in use", param="id"))
        elif len(self._live) >= MAX_LIVE:
            message = f"a session may have {MAX_LIVE} generations"
            self._refuse(start.id, Overloaded(message, retry_after=_RETRY_SECONDS))
        else:
            live = self._live[start.id] = _Live(start.id, self._tell)
            live.task = asyncio.create_task(live.run(self._begin_generation, start))
            live.task.add_done_callback(partial(self._finish, live))

    def _refuse(self, generation_id: int, error: ShoalError) -> None:
        if len(self._refused) >= MAX_REFUSALS:
            raise Overloaded(f"{MAX_REFUSALS} refusals wait for the client to read them")
        self._refused.append(
            inference_pb2.SessionRefusal(id=generation_id, error=error_to_proto(error))
        )
        self._dirty.set()

    # -- the writer

    async def _write(self, write: Write) -> None:
        while True:
            await self._dirty.wait()
            message = self._take()
            if not self._news:
                self._dirty.clear()
            if message.updates or message.refused:
                await write(message)
            if not (self._live or self._refused):
                if self._half_closed:
                    return
                if self._ending:
                    raise Unavailable("this gateway is shutting down", retry_after=_RETRY_SECONDS)

    def _take(self) -> inference_pb2.SessionResponse:
        """What is new, as far as it fits a message."""
        message = inference_pb2.SessionResponse(refused=self._refused)
        self._refused.clear()
        size = 0
        while self._news and size < _MESSAGE_BYTES:
            live = next(iter(self._news))
            del self._news[live]
            update = live.take()
            size += update.ByteSize()
            if update.WhichOneof("end"):
                del self._live[live.id]
            elif live.has_news:
                self._news[live] = None
            message.updates.append(update)
        return message

    def _tell(self, live: _Live) -> None:
        self._news[live] = None
        self._dirty.set()

    # -- ends

    def _finish(self, live: _Live, task: asyncio.Task[Usage]) -> None:
        if task.cancelled():
            live.end = Cancelled("the client cancelled the generation")
        elif (fault := task.exception()) is None:
            live.end = task.result()
        elif isinstance(fault, ShoalError):
            live.end = fault
        else:
            log.error("fault in a generation of a session", exc_info=fault)
            live.end = InternalError("internal error")
        self._tell(live)

    async def _close(self, *tasks: asyncio.Task[None]) -> None:
        """Gives everything up; no task is left."""
        left = [*tasks, *(live.task for live in self._live.values())]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class _Live:
    """One generation: its task, and the news that the writer has not taken."""

    task: asyncio.Task[Usage]

    def __init__(self, generation_id: int, tell: Callable[[_Live], None]) -> None:
        self.id = generation_id
        self.end: Usage | ShoalError | None = None
        self._tell = tell
        self._accepted = False
        self._prompt_logprobs: deque[list[common_pb2.TokenLogprobs]] = deque()
        self._chunks: list[Chunk] = []
        self._taken: asyncio.Future[None] | None = None

    @property
    def has_news(self) -> bool:
        return bool(self._prompt_logprobs or self._chunks or self.end is not None)

    async def run(self, begin: Begin, start: Start) -> Usage:
        """Starts the generation and parks its chunks; returns the counts at its end."""
        async with begin(start) as generation:
            self._accepted = True
            self._tell(self)
            first = True
            async for chunk in generation:
                if first:
                    first = False
                    self._prompt_logprobs.extend(
                        from_proto.prompt_logprobs(generation.prompt_logprobs)
                    )
                await self._park(chunk)
            return generation.usage

    async def _park(self, chunk: Chunk) -> None:
        """Leaves a chunk for the writer, once it has taken an earlier one of that choice."""
        if any(parked.index == chunk.index for parked in self._chunks):
            self._taken = asyncio.get_running_loop().create_future()
            await self._taken
        self._chunks.append(chunk)
        self._tell(self)

    def take(self) -> inference_pb2.SessionUpdate:
        """The news, as far as they fit a message: of a long prompt's scores a part only."""
        update = inference_pb2.SessionUpdate(id=self.id, accepted=self._accepted)
        self._accepted = False
        if self._prompt_logprobs:
            update.prompt_logprobs.extend(self._prompt_logprobs.popleft())
        if self._prompt_logprobs:
            return update
        update.pieces.extend(map(from_proto.piece, self._chunks))
        self._chunks.clear()
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(None)
        if isinstance(self.end, Usage):
            update.usage.CopyFrom(from_proto.usage(self.end))
        elif self.end is not None:
            update.error.CopyFrom(error_to_proto(self.end))
        return update
