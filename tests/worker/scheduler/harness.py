"""A scheduler on the fake engine, with its clock, its clients and its books in view."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.common.errors import ShoalError
from services.worker.core import (
    Batch,
    EngineInfo,
    FinishReason,
    Matcher,
    PendingStep,
    SamplingParams,
    StepResult,
    TokenLogprobs,
)
from services.worker.engine.fake import FakeModel, fake_tokens
from services.worker.scheduler.request import Commands, FinishedRequest, StepOutput, Submission
from services.worker.scheduler.scheduler import Scheduler

EOS = 257
VOCAB = 259
ALLOWED = list(range(32, 127))

Schedule = Literal["prefill-first", "decode-first", "mixed"]
Cache = Literal["radix", "none"]
Cost = Callable[[Batch], float]


def make_info(
    *,
    page_size: int = 4,
    num_pages: int = 256,
    max_model_len: int = 512,
    max_prefill_tokens: int = 32,
) -> EngineInfo:
    return EngineInfo(
        model="fake",
        fingerprint="fake",
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        max_prefill_tokens=max_prefill_tokens,
        eos_token_ids=frozenset({EOS}),
    )


class LazyEngine:
    """The fake model, computing a step as late as can be: when its result is asked for.

    Until then the batch is in flight, so whatever the scheduler gives away too early is
    there to be found.
    """

    def __init__(self, info: EngineInfo, num_slots: int) -> None:
        self.info = info
        self.batches: list[Batch] = []  # every one launched
        self.in_flight: deque[_LazyStep] = deque()
        self._model = FakeModel(info, num_slots, ALLOWED)

    def launch(self, batch: Batch) -> PendingStep:
        self.batches.append(batch)
        step = _LazyStep(self, batch)
        self.in_flight.append(step)
        return step

    def compute_next(self) -> None:
        step = self.in_flight.popleft()
        step.value = self._model.compute(step.batch)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class _LazyStep:
    def __init__(self, engine: LazyEngine, batch: Batch) -> None:
        self.batch = batch
        self.value: StepResult | None = None
        self._engine = engine

    def result(self) -> StepResult:
        while self.value is None:
            self._engine.compute_next()
        return self.value


class TimedEngine(LazyEngine):
    """Says of each step that it took what `cost` makes of its batch, and sums that up."""

    def __init__(self, info: EngineInfo, num_slots: int, cost: Cost) -> None:
        super().__init__(info, num_slots)
        self.clock = 0.0
        self._cost = cost

    def compute_next(self) -> None:
        step = self.in_flight[0]
        super().compute_next()
        assert step.value is not None
        step.value = dataclasses.replace(step.value, duration=self._cost(step.batch))
        self.clock += step.value.duration


@dataclass
class Client:
    """What one request was and what came of it."""

    submission: Submission
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    accepted: bool = False
    error: ShoalError | None = None
    finished: FinishedRequest | None = None
    cached_tokens: int | None = None  # set when it starts, once

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    @property
    def reason(self) -> FinishReason | None:
        return self.finished.reason if self.finished else None

    def oracle(self, num_tokens: int) -> list[int]:
        """The first tokens that the model gives to this prompt, resumed ones left out."""
        resumed = len(self.submission.resume_ids)
        return fake_tokens(self.submission.prompt_ids, resumed + num_tokens, ALLOWED)[resumed:]


class Harness:
    """Drives a scheduler step by step and checks its books after every one."""

    def __init__(
        self,
        info: EngineInfo | None = None,
        *,
        schedule: Schedule = "mixed",
        cache: Cache = "radix",
        max_running: int = 8,
        max_queue: int = 1000,
        overlap: bool = True,
        engine: LazyEngine | None = None,
    ) -> None:
        self.engine = engine or LazyEngine(info or make_info(), max_running)
        self.scheduler = Scheduler(
            self.engine,
            schedule=schedule,
            cache=cache,
            max_running_requests=max_running,
            max_queue=max_queue,
            overlap=overlap,
        )
        self.now = 0.0
        self.clients: dict[int, Client] = {}
        self._submits: list[Submission] = []
        self._aborts: list[int] = []

    def submit(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int = 8,
        *,
        sampling: SamplingParams | None = None,
        resume_ids: Sequence[int] = (),
        timeout: float | None = None,
        priority: int = 0,
        salt: str = "",
        matcher: Matcher | None = None,
    ) -> Client:
        """Queues a submission for the next step."""
        submission = Submission(
            len(self.clients),
            list(prompt_ids),
            sampling or SamplingParams(max_tokens=max_tokens),
            list(resume_ids),
            timeout,
            priority,
            salt,
            matcher,
        )
        client = self.clients[submission.handle] = Client(submission)
        self._submits.append(submission)
        return client

    def abort(self, client: Client) -> None:
        """Queues an abort for the next step."""
        self._aborts.append(client.submission.handle)

    def step(self, *, flush_cache: bool = False) -> StepOutput:
        """One step, its news handed to the clients, the books checked."""
        commands = Commands(self._submits, self._aborts, int(flush_cache))
        self._submits, self._aborts = [], []
        self.now += 0.01
        output = self.scheduler.step(commands, self.now)
        self._deliver(output)
        self.check()
        return output

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left to do, then checks that nothing is held."""
        self.step()
        for _ in range(max_steps):
            if self.scheduler.idle:
                break
            self.step()
        assert self.scheduler.idle
        self.check_idle()

    def check(self) -> None:
        """The books balance, and what a batch in flight uses is not free."""
        self.scheduler.check_integrity()
        kv = self.scheduler._residents.kv
        for step in self.engine.in_flight:
            used = set(step.batch.page_tables.ravel().tolist()) - {kv.num_pages}
            assert not any(kv.is_free(page) for page in used)

    def check_idle(self) -> None:
        """Nobody holds a page or a slot, and every request was answered."""
        gauges = self.scheduler.gauges()
        assert gauges.num_locked_pages == gauges.num_in_flight_pages == 0
        assert gauges.num_running == gauges.num_waiting == gauges.num_requests == 0
        assert gauges.num_free_pages + gauges.num_evictable_pages == gauges.num_pages
        assert all(client.ended for client in self.clients.values())

    def check_tokens(self) -> None:
        """Every client's tokens are exactly the oracle's, as far as they go."""
        for client in self.clients.values():
            assert client.tokens == client.oracle(len(client.tokens))

    def _deliver(self, output: StepOutput) -> None:
        for handle in output.accepted:
            self.clients[handle].accepted = True
        for handle, entries in output.prompt_logprobs.items():
            assert self.clients[handle].prompt_logprobs is None
            assert not self.clients[handle].tokens
            self.clients[handle].prompt_logprobs = entries
        for handle, token in output.tokens:
            assert not self.clients[handle].ended
            self.clients[handle].tokens.append(token)
        for handle, entries in output.logprobs.items():
            self.clients[handle].logprobs += entries
        for handle, cached_tokens in output.started:
            assert self.clients[handle].cached_tokens is None
            self.clients[handle].cached_tokens = cached_tokens
        for handle, error in output.rejected:
            assert not self.clients[handle].ended
            self.clients[handle].error = error
        for finished in output.finished:
            assert not self.clients[finished.handle].ended
            self.clients[finished.handle].finished = finished
