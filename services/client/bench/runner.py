"""Sends the jobs of a run, closed loop or open, and records each request.

In a closed loop a fixed number of jobs is in flight. In an open loop each is sent when it is
due, whatever the server does; the due time is kept, so a wait is never hidden.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from services.client.answer import Answer, Clock, Failure
from services.client.bench.config import BenchConfig
from services.client.bench.jobs import Job, Turn
from services.client.bench.record import Record, Schedule
from services.client.connection import Pool

OnRecord = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Asker:
    """Makes requests of turns and sends them to one model."""

    config: BenchConfig
    model: str
    path: str
    pool: Pool

    async def ask(self, history: Sequence[dict[str, str]], turn: Turn, keep_text: bool) -> Answer:
        """The answer to a turn after a history. Raises Failure."""
        return await self.pool.post(
            self.path,
            self.body(history, turn),
            timeout=self.config.timeout,
            keep_text=keep_text,
        )

    def body(self, history: Sequence[dict[str, str]], turn: Turn) -> bytes:
        """The request's JSON."""
        config = self.config
        body: dict[str, Any] = {"model": self.model, "stream": True}
        messages = [*history, {"role": "user", "content": turn.text}]
        if config.endpoint == "chat":
            body["messages"] = messages
        else:
            body["prompt"] = "\n".join(message["content"] for message in messages)
        body["max_tokens"] = turn.max_tokens
        if config.stream_usage:
            body["stream_options"] = {"include_usage": True}
        if config.ignore_eos:
            body["ignore_eos"] = True
        if config.temperature is not None:
            body["temperature"] = config.temperature
        return json.dumps({**body, **config.extra}).encode()


@dataclass(slots=True)
class Runner:
    """One run; `records` has what has ended so far, `in_flight` counts what has not."""

    asker: Asker
    clock: Clock
    on_record: OnRecord
    records: list[Record]
    in_flight: int = 0
    start: float = 0.0

    async def closed(self, jobs: Sequence[Job], concurrency: int) -> None:
        """Has `concurrency` jobs in flight until there are no more."""
        self.start = self.clock()
        numbered = iter(enumerate(jobs))
        lanes = [self._lane(numbered) for _ in range(min(concurrency, len(jobs)))]
        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(lane)

    async def open(
        self, jobs: Sequence[Job], times: Sequence[float], concurrency: int | None
    ) -> None:
        """Sends each job at its time, in seconds from now; at most `concurrency` at once."""
        self.start = self.clock()
        slots = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        async with asyncio.TaskGroup() as group:
            for number, (job, at) in enumerate(zip(jobs, times, strict=True)):
                due_at = self.start + at
                wait = due_at - self.clock()
                await asyncio.sleep(max(0.0, wait))
                group.create_task(self._job(number, job, due_at, slots))

    async def _lane(self, jobs: Iterator[tuple[int, Job]]) -> None:
        for number, job in jobs:
            await self._job(number, job, None, nullcontext())

    async def _job(
        self,
        number: int,
        job: Job,
        due_at: float | None,
        slots: AbstractAsyncContextManager[None],
    ) -> None:
        """Sends the turns one after another; gives up the job where one fails."""
        history: list[dict[str, str]] = []
        for index, turn in enumerate(job.turns):
            now = self.clock()
            place = Schedule(number, index, self.start, now if due_at is None else due_at, now)
            async with slots:
                answer = await self._turn(place, history, turn, more=index + 1 < len(job.turns))
            if answer is None:
                return
            if index + 1 < len(job.turns):
                history.append({"role": "user", "content": turn.text})
                history.append({"role": "assistant", "content": answer})
                think = self.asker.config.think_time
                due_at = None if due_at is None else self.clock() + think
                await asyncio.sleep(think)

    async def _turn(
        self, place: Schedule, history: Sequence[dict[str, str]], turn: Turn, *, more: bool
    ) -> str | None:
        """The answer's text, if there are more turns to come; None if it failed."""
        sent_at = self.clock()
        self.in_flight += 1
        try:
            answer = await self.asker.ask(history, turn, keep_text=more)
        except Failure as error:
            self._keep(place.failure(sent_at, self.clock(), error.kind, str(error)))
            return None
        finally:
            self.in_flight -= 1
        self._keep(place.record(answer))
        return answer.text

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self.on_record(record)
