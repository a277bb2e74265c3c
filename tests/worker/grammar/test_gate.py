"""Requests wait at the gate for their grammar, and others do not."""

from __future__ import annotations

import select
from collections.abc import Iterator
from concurrent.futures import Future
from unittest.mock import Mock

import pytest

from services.common.errors import InvalidRequest
from services.worker.core import FinishReason, Grammar, SamplingParams
from services.worker.grammar.cache import GrammarCache
from services.worker.grammar.compiler import LibraryMatcher
from services.worker.grammar.gate import GrammarGate
from services.worker.scheduler.request import Commands, StepOutput, Submission
from tests.worker.scheduler.harness import EOS, make_info

TIMEOUT = 120.0


@pytest.fixture
def gate() -> Iterator[GrammarGate]:
    cache = GrammarCache("byte", size=8, seconds=1.0)
    yield GrammarGate(cache, make_info())
    cache.close()


def request(
    handle: int, pattern: str | None, *, resume: bytes = b"", timeout: float | None = None
) -> Submission:
    grammar = None if pattern is None else Grammar("regex", pattern)
    sampling = SamplingParams(grammar=grammar)
    return Submission(handle, [1], sampling, list(resume), timeout)


def take_when_ready(gate: GrammarGate, now: float = 0.0) -> tuple[list[Submission], StepOutput]:
    """What passes once all that wait have been compiled."""
    passed: list[Submission] = []
    answers = StepOutput()
    while gate.num_waiting:
        select.select([gate.fd], [], [], TIMEOUT)
        commands, output = gate.take(Commands(), now)
        passed += commands.submits
        answers.rejected += output.rejected
    return passed, answers


def test_only_those_with_a_grammar_wait(gate: GrammarGate) -> None:
    commands, output = gate.take(Commands([request(1, "ab"), request(2, None)], [7]), 0.0)
    assert [s.handle for s in commands.submits] == [2]
    assert (list(commands.aborts), bool(output)) == ([7], False)
    passed, _ = take_when_ready(gate)
    assert [s.handle for s in passed] == [1]
    assert passed[0].matcher is not None
    commands, _ = gate.take(Commands([request(3, "ab")]), 0.0)
    assert [s.handle for s in commands.submits] == [3], "a compiled grammar lets it pass at once"


def test_a_bad_grammar_is_a_rejection_and_the_rest_of_the_deadline_goes_on(
    gate: GrammarGate,
) -> None:
    gate.take(Commands([request(1, "(a"), request(2, "ok", timeout=5.0)]), 10.0)
    passed, answers = take_when_ready(gate, now=12.0)
    assert [handle for handle, _ in answers.rejected] == [1]
    assert isinstance(answers.rejected[0][1], InvalidRequest)
    assert passed[0].timeout == 3.0


def test_an_abort_ends_a_request_that_waits(gate: GrammarGate) -> None:
    gate.take(Commands([request(1, "a?" * 30_000), request(2, "x"), request(3, "x")]), 0.0)
    commands, output = gate.take(Commands(aborts=[2]), 0.0)
    assert list(commands.aborts) == []
    assert [(f.handle, f.reason) for f in output.finished] == [(2, FinishReason.ABORT)]
    passed, answers = take_when_ready(gate)
    assert [s.handle for s in passed] == [3]
    assert [handle for handle, _ in answers.rejected] == [1]


def test_a_grammar_that_nobody_waits_for_any_more_wakes_the_loop_once() -> None:
    future: Future[LibraryMatcher] = Future()
    future.set_running_or_notify_cancel()
    gate = GrammarGate(Mock(get=Mock(return_value=future)), make_info())
    gate.take(Commands([request(1, "ab")]), 0.0)
    gate.take(Commands(aborts=[1]), 0.0)
    future.set_exception(InvalidRequest("too late"))
    assert select.select([gate.fd], [], [], TIMEOUT)[0]
    gate.take(Commands(), 0.0)
    assert not select.select([gate.fd], [], [], 0)[0], "an idle rank would never rest"


@pytest.mark.parametrize(
    ("resume", "fits"), [(b"", True), (b"a", True), (b"ab", True), (b"b", False), (b"abc", False)]
)
def test_a_resume_takes_the_grammar_up_where_it_was(
    gate: GrammarGate, resume: bytes, fits: bool
) -> None:
    gate.take(Commands([request(1, "ab", resume=resume)]), 0.0)
    passed, answers = take_when_ready(gate)
    assert len(passed) == fits
    assert len(answers.rejected) == (not fits)


def test_a_resume_may_have_ended_already(gate: GrammarGate) -> None:
    ended = Submission(1, [1], request(1, "ab").sampling, [*b"ab", EOS])
    gate.take(Commands([ended]), 0.0)
    passed, _ = take_when_ready(gate)
    assert len(passed) == 1
