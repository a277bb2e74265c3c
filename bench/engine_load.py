"""Loads for `bench.engine`: what is submitted to a scheduler, and when each token came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from services.worker.core import Batch, Engine, EngineInfo, PendingStep, SamplingParams, StepResult
from services.worker.scheduler.request import Commands, Submission
from services.worker.scheduler.scheduler import Scheduler
from services.worker.scheduler.stats import Counters


@dataclass(slots=True)
class Served:
    """What came of a load: when it began and ended, and the moments of each request's tokens."""

    started: float
    seconds: float = 0.0
    moments: dict[int, list[float]] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.moments.values())) / self.seconds

    @property
    def bubble_share(self) -> float:
        """Of the time, how much the engine stood idle with work waiting."""
        return self.counters.bubble / self.seconds

    def mean_first_token(self) -> float:
        """Seconds from the load's begin to a request's first token, on average."""
        firsts = [moments[0] - self.started for moments in self.moments.values()]
        return sum(firsts) / len(firsts)


def submission(handle: int, prompt_ids: Sequence[int], max_tokens: int) -> Submission:
    """A greedy request that goes on to its last token."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Submission(handle, prompt_ids, sampling)


def random_prompt(engine: Engine, length: int, seed: int) -> list[int]:
    """Ids that are ordinary tokens of any vocabulary."""
    ids = np.random.default_rng(seed).integers(10, engine.info.vocab_size, length)
    return [int(token) for token in ids]


def serve(scheduler: Scheduler, submissions: Sequence[Submission]) -> Served:
    """Submits everything at once and steps until all is done."""
    served = Served(time.perf_counter())
    _step(scheduler, Commands(submissions), served)
    while not scheduler.idle:
        _step(scheduler, Commands(), served)
    served.seconds = time.perf_counter() - served.started
    served.counters = scheduler.counters
    return served


def gaps_around(
    scheduler: Scheduler, streams: Sequence[Submission], long: Submission, settle: int
) -> tuple[list[float], list[float], float]:
    """The gaps between tokens of running streams before a long prompt comes, and until its first
    token; and how long that took. Before it come `settle` tokens of each stream, of which the first
    tenth is not measured: `settle` should be as many as come during, since the longest of few gaps
    and of many are not to be compared."""
    served = Served(time.perf_counter())
    _step(scheduler, Commands(streams), served)
    while not _all_have(served, streams, settle // 10):
        _step(scheduler, Commands(), served)
    begun = time.perf_counter()
    while not _all_have(served, streams, settle):
        _step(scheduler, Commands(), served)
    came = time.perf_counter()
    _step(scheduler, Commands([long]), served)
    while long.handle not in served.moments:
        _step(scheduler, Commands(), served)
    done = served.moments[long.handle][0]
    reached = {stream.handle: len(served.moments[stream.handle]) for stream in streams}
    while any(len(served.moments[handle]) <= count for handle, count in reached.items()):
        _step(scheduler, Commands(), served)
    scheduler.step(Commands(aborts=[row.handle for row in (*streams, long)]), 0.0)
    while not scheduler.idle:
        scheduler.step(Commands(), 0.0)
    rows = [served.moments[stream.handle] for stream in streams]
    before = [b - a for row in rows for a, b in _pairs(row) if begun <= a and b <= came]
    during = [b - a for row in rows for a, b in _pairs(row) if a <= done and b > came]
    return before, during, done - came


def _pairs(moments: Sequence[float]) -> list[tuple[float, float]]:
    return list(pairwise(moments))


def _all_have(served: Served, streams: Sequence[Submission], count: int) -> bool:
    return all(len(served.moments.get(stream.handle, ())) >= count for stream in streams)


def _step(scheduler: Scheduler, commands: Commands, served: Served) -> None:
    output = scheduler.step(commands, 0.0)
    now = time.perf_counter()
    for handle, _ in output.tokens:
        served.moments.setdefault(handle, []).append(now)


class NoEngine:
    """Answers every batch with zeros, at once: what is left is the scheduler's own work."""

    def __init__(self) -> None:
        self.info = EngineInfo("none", "none", 50_000, 4096, 16, 60_000, 8192, frozenset())

    def launch(self, batch: Batch) -> PendingStep:
        return _Done(StepResult(np.zeros(batch.num_rows, np.int32)))

    def check(self) -> None:
        """Nothing can be lost."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class _Done:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


def scheduler_seconds(num_running: int, steps: int) -> float:
    """CPU seconds of the scheduler for a step of so many decode rows."""
    scheduler = Scheduler(NoEngine(), max_running_requests=num_running)
    submits = [submission(n, list(range(n, n + 500)), 3000) for n in range(num_running)]
    scheduler.step(Commands(submits), 0.0)
    # Until a batch is a token of each: no prompt is left then.
    decoding = (num_running, num_running)
    while (scheduler.gauges().num_running, scheduler.counters.batch_tokens) != decoding:
        scheduler.step(Commands(), 0.0)
    started = time.process_time()
    for _ in range(steps):
        scheduler.step(Commands(), 0.0)
    return (time.process_time() - started) / steps
