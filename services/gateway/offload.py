"""Work on large requests, off the event loop, so that it stalls no other stream.

A thread shares the interpreter with the loop but gives way every few milliseconds, as long
as no single call into C takes long: lists of millions are handled in slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

LARGE_BYTES = 256 * 1024  # about 2 ms of decoding
LARGE_COUNT = 1024  # messages, about 10 ms of conversion
_SLICE = 16_384  # ids, about 1 ms


async def sized(size: int, limit: int, work: Callable[[], T]) -> T:
    """What `work` returns, done in a thread if `size` is above the limit."""
    if size <= limit:
        return work()
    return await asyncio.to_thread(work)


def slices(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """The values in slices that can each be handled at once."""
    return (values[at : at + _SLICE] for at in range(0, len(values), _SLICE))
