"""Where requests with a grammar wait until it is compiled; the others pass at once.

Rank 0's loop lets all commands through the gate before the scheduler sees them. The
scheduler is given a request together with its matcher, and knows nothing of compiling.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass, replace

from services.common.errors import InvalidRequest, ShoalError
from services.worker.core import EngineInfo, FinishReason, Grammar
from services.worker.grammar.cache import GrammarCache
from services.worker.grammar.compiler import LibraryMatcher
from services.worker.scheduler.request import (
    Commands,
    FinishedRequest,
    StepOutput,
    Submission,
)
from services.worker.scheduler.stats import GrammarStats


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request whose grammar is not compiled yet."""

    submission: Submission
    grammar: Grammar
    future: Future[LibraryMatcher]
    since: float


class GrammarGate:
    """Holds requests back until their grammar is there. `fd` is readable when one may be."""

    def __init__(self, cache: GrammarCache, info: EngineInfo) -> None:
        self._cache = cache
        self._info = info
        self._waiting: dict[int, _Waiting] = {}  # by handle, in order of arrival
        self.fd, self._wake_fd = os.pipe()
        for fd in (self.fd, self._wake_fd):
            os.set_blocking(fd, False)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def holds(self, handle: int) -> bool:
        """Whether a request waits here."""
        return handle in self._waiting

    @property
    def stats(self) -> GrammarStats:
        return self._cache.stats

    def take(self, commands: Commands, now: float) -> tuple[Commands, StepOutput]:
        """The commands for the scheduler, and the answers to those that end here.

        `now` is the caller's clock, in seconds.
        """
        self._drain()  # also for nobody: a wake-up that stays would keep the idle loop awake
        output = StepOutput()
        if not self._waiting and not any(s.sampling.grammar for s in commands.submits):
            return commands, output
        ready: list[Submission] = []
        for submission in commands.submits:
            if submission.sampling.grammar is None:
                ready.append(submission)
            else:
                self._hold(submission, submission.sampling.grammar, now, output)
        aborts = [handle for handle in commands.aborts if not self._abort(handle, output)]
        ready += self._release(now, output)
        return replace(commands, submits=ready, aborts=aborts), output

    def _hold(
        self, submission: Submission, grammar: Grammar, now: float, output: StepOutput
    ) -> None:
        try:
            future = self._cache.get(grammar)
        except ShoalError as error:
            output.rejected.append((submission.handle, error))
            return
        self._waiting[submission.handle] = _Waiting(submission, grammar, future, now)
        if not future.done():
            future.add_done_callback(self._wake)

    def _wake(self, future: Future[LibraryMatcher]) -> None:
        try:
            os.write(self._wake_fd, b"\0")
        except BlockingIOError:
            return  # full of wake-ups already

    def _abort(self, handle: int, output: StepOutput) -> bool:
        """Ends a request if it waits here."""
        waiting = self._waiting.pop(handle, None)
        if waiting is None:
            return False
        if all(other.future is not waiting.future for other in self._waiting.values()):
            self._cache.forget(waiting.grammar)
        output.finished.append(FinishedRequest(handle, FinishReason.ABORT, None))
        return True

    def _release(self, now: float, output: StepOutput) -> list[Submission]:
        """The requests whose grammar is there, in order of arrival; those without are refused."""
        ready = []
        for waiting in [w for w in self._waiting.values() if w.future.done()]:
            submission = waiting.submission
            del self._waiting[submission.handle]
            try:
                matcher = self._matcher(waiting)
            except ShoalError as error:
                output.rejected.append((submission.handle, error))
                continue
            timeout = submission.timeout
            if timeout is not None:
                timeout = max(0.0, timeout - (now - waiting.since))
            ready.append(replace(submission, timeout=timeout, matcher=matcher))
        return ready

    def _matcher(self, waiting: _Waiting) -> LibraryMatcher:
        """A matcher that stands where the output does, which another worker may have begun.

        Raises ShoalError if there is none.
        """
        matcher = waiting.future.result().copy()
        emitted = [int(token) for token in waiting.submission.resume_ids]
        if emitted and emitted[-1] in self._info.eos_token_ids:
            emitted.pop()  # it ended there
        known = all(0 <= token < self._info.vocab_size for token in emitted)
        if not known or not matcher.accepts(emitted):
            raise InvalidRequest("The output so far breaks the grammar.", param="resume_ids")
        return matcher

    def _drain(self) -> None:
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return
