"""Several prompts of one call as one generation.

Choice i of prompt p becomes choice p * n + i, and the counts are summed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from services.gateway.domain import (
    Chunk,
    Gateway,
    Generation,
    GenerationRequest,
    TextWriter,
    Usage,
)

_MAX_WAITING_CHUNKS = 256  # beyond these a slow client's text waits in the core, which has a cap


class FanOut:
    """The generations of one call. `aclose` gives all of them up."""

    def __init__(self, generations: Sequence[Generation], n: int) -> None:
        self.generations = generations
        self.n = n
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def usage(self) -> Usage:
        """Counts of all prompts and choices, each prompt once."""
        each = [generation.usage for generation in self.generations]
        if len(each) == 1:
            return each[0]
        return Usage(
            sum(usage.prompt_tokens for usage in each),
            sum(usage.completion_tokens for usage in each),
            sum(usage.cached_tokens for usage in each),
        )

    @property
    def ended(self) -> bool:
        """No chunk follows those that were taken, as far as is known here."""
        return len(self.generations) == 1 and self.generations[0].ended

    def __aiter__(self) -> AsyncIterator[Chunk]:
        if len(self.generations) == 1:
            return self.generations[0].__aiter__()
        return self._merge()

    def send_text_to(self, write: TextWriter) -> None:
        """Offers a shorter way for text; where several generations are merged it is not used."""
        if len(self.generations) == 1:
            self.generations[0].send_text_to(write)

    async def aclose(self) -> None:
        """Gives every generation up; harmless after the end."""
        for pump in self._pumps:
            pump.cancel()
        try:
            if self._pumps:
                await asyncio.gather(*self._pumps, return_exceptions=True)
        finally:  # also when the caller is cancelled meanwhile
            await _close(self.generations)

    async def _merge(self) -> AsyncIterator[Chunk]:
        """Chunks in the order in which they come; one task a prompt feeds them in."""
        chunks: asyncio.Queue[Chunk | asyncio.Task[None]] = asyncio.Queue()
        room = asyncio.Semaphore(_MAX_WAITING_CHUNKS)

        async def pump(generation: Generation, offset: int) -> None:
            async for chunk in generation:
                chunk.index += offset
                await room.acquire()
                chunks.put_nowait(chunk)

        for position, generation in enumerate(self.generations):
            task = asyncio.create_task(pump(generation, position * self.n))
            task.add_done_callback(chunks.put_nowait)
            self._pumps.append(task)
        running = len(self._pumps)
        while running:
            item = await chunks.get()
            if isinstance(item, asyncio.Task):
                item.result()  # raises what ended it
                running -= 1
            else:
                room.release()
                yield item


async def start_all(gateway: Gateway, requests: Sequence[GenerationRequest]) -> FanOut:
    """Starts every request, or none: if one is refused the others are given up.

    Raises:
        ShoalError: what `Gateway.start` raised first.
    """
    if len(requests) == 1:
        return FanOut([await gateway.start(requests[0])], requests[0].n)
    starts = [asyncio.create_task(gateway.start(request)) for request in requests]
    whole: FanOut | None = None
    try:
        whole = FanOut(await asyncio.gather(*starts), requests[0].n)
        return whole
    finally:
        if whole is None:  # one was refused, or the client left
            for start in starts:
                start.cancel()
            try:
                await asyncio.gather(*starts, return_exceptions=True)
            finally:  # also when cancelled again: what has not started by now never will
                await _close([start.result() for start in starts if _succeeded(start)])


async def _close(generations: Iterable[Generation]) -> None:
    """One after the other in this task: tasks of their own could be cancelled before they run."""
    for generation in generations:
        await generation.aclose()


def _succeeded(task: asyncio.Task[Generation]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
