"""The nouns of the scheduler: what it is told, what it keeps, what it answers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import ShoalError
from services.worker.core import (
    Admission,
    FinishReason,
    IntArray,
    Matcher,
    SamplingParams,
    TokenLogprobs,
)
from services.worker.kvcache.cache import PageTable
from services.worker.scheduler.stats import StepTimes

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as it comes in; nothing about it has been checked.

    `timeout` is how many seconds it may still wait, None for ever. `resume_ids` are
    outputs that another worker has emitted already. `matcher` is there if and only if
    `sampling` has a grammar, and stands after the `resume_ids`.
    """

    handle: int
    prompt_ids: TokenIds
    sampling: SamplingParams = field(default_factory=SamplingParams)
    resume_ids: TokenIds = ()
    timeout: float | None = None
    priority: int = 0
    cache_salt: str = ""
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Commands:
    """What came in since the last step; submissions are taken before aborts."""

    submits: Sequence[Submission] = ()
    aborts: Sequence[int] = ()
    num_flushes: int = 0  # commands to drop the prefix cache; one flush does for all


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ended. `stop_token_id` is the end-of-sequence or stop id, if one did it.

    `num_output_tokens` counts all of its output, resumed ids included.
    """

    handle: int
    reason: FinishReason
    stop_token_id: int | None
    num_output_tokens: int = 0


@dataclass(slots=True)
class StepOutput:
    """The news of one step. The lists of a handle are to be read in the order of the fields."""

    accepted: list[int] = field(default_factory=list)
    started: list[tuple[int, int]] = field(default_factory=list)  # (handle, cached tokens)
    prefilled: list[tuple[int, int]] = field(default_factory=list)  # (handle, tokens done so far)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    tokens: list[tuple[int, int]] = field(default_factory=list)  # (handle, token id), in order
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    rejected: list[tuple[int, ShoalError]] = field(default_factory=list)  # or failed later
    finished: list[FinishedRequest] = field(default_factory=list)
    num_flushes: int = 0  # commands that the pages below answer
    flushed_pages: int = 0
    steps: list[StepTimes] = field(default_factory=list)  # that ended; no news by themselves

    def __bool__(self) -> bool:
        """Whether there is any news."""
        return bool(
            self.accepted
            or self.rejected
            or self.started
            or self.prefilled
            or self.prompt_logprobs
            or self.tokens
            or self.finished
            or self.num_flushes
        )


class State(enum.Enum):
    """Where a request is. An ended one may still have a row in a batch in flight."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Request:
    """One request from acceptance to its end. Only the scheduler writes to it.

        known ids      | prompt_ids            | output_ids  |
        launched       |<----- num_computed ------>|            positions in some batch
        outputs                                |<- num_sampled ->|  those in flight included

    A request prefills while num_computed < num_prefill, the number of its prefill_ids: its ids
    when it was queued, which after a preemption include outputs. From there on each step
    computes one token. What every step asks of every request is an attribute of its own.
    """

    __slots__ = (
        "cache_salt",
        "cached_tokens",
        "deadline",
        "handle",
        "last_step",
        "matcher",
        "min_tokens",
        "num_computed",
        "num_pages",
        "num_prefill",
        "num_sampled",
        "output_ids",
        "prefill_ids",
        "priority",
        "prompt_ids",
        "prompt_logprobs",
        "queue_time",
        "resumed",
        "sampling",
        "sequence",
        "slot",
        "state",
        "stop_ids",
        "table",
    )

    def __init__(
        self,
        submission: Submission,
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        *,
        sequence: int,
        now: float,
    ) -> None:
        self.handle = submission.handle
        self.prompt_ids: IntArray = np.array(submission.prompt_ids, np.int32)
        self.output_ids = [int(token) for token in submission.resume_ids]
        self.resumed = len(self.output_ids) > 0
        self.sampling = sampling  # max_tokens clamped to the context
        self.matcher = submission.matcher  # it has taken in the output_ids
        self.min_tokens = sampling.min_tokens
        self.stop_ids = stop_ids
        self.priority = submission.priority
        self.cache_salt = submission.cache_salt
        self.sequence = sequence  # order of arrival
        self.queue_time = now
        self.deadline = None if submission.timeout is None else now + submission.timeout
        self.state = State.WAITING
        self.cached_tokens: int | None = None  # set when it first runs
        self.last_step = 0  # the last step that has a row of it
        # One entry a prompt token once complete; None if not asked for or already sent.
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.requeue()

    @property
    def token_ids(self) -> IntArray:
        """All known ids: prompt and output."""
        return np.concatenate([self.prompt_ids, np.array(self.output_ids, np.int32)])

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.num_prefill

    @property
    def admission(self) -> Admission:
        """What an engine must know when the request takes its slot."""
        return Admission(
            self.slot,
            self.prompt_ids,
            np.array(self.output_ids, np.int32),
            self.sampling,
            tuple(sorted(self.stop_ids)),
        )

    def requeue(self) -> None:
        """Makes it start over from its ids; it holds no page and no slot now."""
        self.state = State.WAITING
        self.slot = -1
        self.table: PageTable | None = None
        self.num_pages = 0  # of the table
        # With no more to come the prompt alone counts: the outputs may be more than fit.
        goes_on = 0 < len(self.output_ids) < self.sampling.max_tokens
        self.prefill_ids = self.token_ids if goes_on else self.prompt_ids
        self.num_prefill = len(self.prefill_ids)
        self.num_computed = 0
        self.num_sampled = len(self.output_ids)
        wanted = self.sampling.prompt_logprobs is not None and self.cached_tokens is None
        if wanted or self.prompt_logprobs is not None:  # a half-done list starts over
            self.prompt_logprobs = [TokenLogprobs(int(self.prompt_ids[0]), 0.0)]

    def ending(self) -> FinishReason | None:
        """Why the outputs so far are all there will be; None if more are to come."""
        count = len(self.output_ids)
        if count and self.output_ids[-1] in self.stop_ids:
            # A grammar may end before min_tokens, and then nothing but a stop id was allowed.
            early = count <= self.min_tokens and self.matcher is None
            if not early:
                return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.sampling.max_tokens else None
