"""Threads that encode, apart from the event loop, and short prompts apart from long.

    prompts --> at once, on the event loop, if tiny
            --> short queue --> num_threads threads, a batch each
            --> long queue  --> one thread, one prompt at a time

A tiny prompt takes less time than to hand it to a thread and back. Prompts that queue up
while the threads are busy are encoded in one batch. A long prompt delays no short one: the
library works without the GIL and, with TOKENIZERS_PARALLELISM=false, in the thread that
calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from services.common.errors import ShoalError
from services.tokenizer.dialect import ReasoningState
from services.tokenizer.encoder import Encoder, Prepared

TINY_CHARACTERS = 1_024  # some 0.2 ms, most of it Python's
LONG_CHARACTERS = 16_384  # about 4,000 tokens, some 15 ms of encoding
MAX_AT_ONCE = 64  # tiny prompts in a turn of the event loop
_MAX_BATCH = 64
_MAX_BATCH_CHARACTERS = 4 * LONG_CHARACTERS

Prepare = Callable[[Encoder], Prepared]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One prompt's ids, and what it says about the reasoning that follows."""

    token_ids: list[int]
    reasoning: ReasoningState = "unknown"


@dataclass(slots=True)
class _Job:
    """One prompt on its way. A done `answer` (a cancelled one) needs no encoding."""

    prepare: Prepare
    size: int
    answer: asyncio.Future[Encoded]


class Lanes:
    """Encodes prompts with one encoder. Belongs to one event loop; an async context."""

    def __init__(self, encoder: Encoder, num_threads: int) -> None:
        self.encoder = encoder
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads + 1, thread_name_prefix="encode")
        self._short: asyncio.Queue[_Job] = asyncio.Queue()
        self._long: asyncio.Queue[_Job] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_at_once = 0  # prompts in this turn of the event loop

    async def __aenter__(self) -> Lanes:
        lanes = [*[self._short] * self._num_threads, self._long]
        self._tasks = [asyncio.create_task(self._serve(lane)) for lane in lanes]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(self, prepare: Prepare, size: int) -> Encoded:
        """The ids of a prompt of about `size` characters, at once if it is tiny and the turn
        allows it; cancelling gives the job up.

        Raises ShoalError for the prompt's own faults.
        """
        if size > TINY_CHARACTERS or not self.claim_turn(1):
            return await self.encode_in_thread(prepare, size)
        [outcome] = self.encode_at_once([prepare])
        if isinstance(outcome, ShoalError):
            raise outcome
        return outcome

    async def encode_in_thread(self, prepare: Prepare, size: int) -> Encoded:
        """As `encode`, and never on the event loop."""
        answer: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        lane = self._long if size > LONG_CHARACTERS else self._short
        lane.put_nowait(_Job(prepare, size, answer))
        return await answer

    def claim_turn(self, num_prompts: int) -> int:
        """Takes this turn of the event loop, which has heartbeats to send, for tiny prompts;
        returns how many of them may be encoded in it."""
        if not self._num_at_once:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        claimed = min(num_prompts, MAX_AT_ONCE - self._num_at_once)
        self._num_at_once += claimed
        return claimed

    def encode_at_once(self, prepares: Sequence[Prepare]) -> list[Encoded | ShoalError]:
        """The ids of tiny prompts that `claim_turn` allowed, or each one's own fault. Raises
        a fault that is no prompt's own."""
        return _encode(self.encoder, prepares)

    def _begin_turn(self) -> None:
        self._num_at_once = 0

    async def _serve(self, lane: asyncio.Queue[_Job]) -> None:
        while True:
            jobs = [await lane.get()]
            size = jobs[0].size
            while len(jobs) < _MAX_BATCH and size < _MAX_BATCH_CHARACTERS and not lane.empty():
                jobs.append(lane.get_nowait())
                size += jobs[-1].size
            await self._run([job for job in jobs if not job.answer.done()])

    async def _run(self, jobs: Sequence[_Job]) -> None:
        """Encodes a batch. If it fails as a whole, its jobs are tried one by one, so that
        one prompt's fault is its own."""
        if not jobs:
            return
        work = asyncio.get_running_loop().run_in_executor(
            self._pool, _encode, self.encoder, [job.prepare for job in jobs]
        )
        await asyncio.wait([work])
        fault = work.exception()
        if fault is not None and len(jobs) > 1:
            for job in jobs:
                await self._run([job])
            return
        outcomes = [fault] if fault is not None else work.result()
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.answer.done():
                continue
            if isinstance(outcome, BaseException):
                job.answer.set_exception(outcome)
            else:
                job.answer.set_result(outcome)


def _encode(encoder: Encoder, prepares: Sequence[Prepare]) -> list[Encoded | ShoalError]:
    """Each prompt's ids or its own fault. On a thread of the pool, or on the loop's if tiny."""
    prepared: list[Prepared | ShoalError] = []
    for prepare in prepares:
        try:
            prepared.append(prepare(encoder))
        except ShoalError as error:
            prepared.append(error)
    ids = iter(encoder.encode([item for item in prepared if isinstance(item, Prepared)]))
    return [
        item if isinstance(item, ShoalError) else Encoded(next(ids), item.reasoning)
        for item in prepared
    ]
