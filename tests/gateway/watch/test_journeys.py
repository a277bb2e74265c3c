"""Journeys of requests: what is kept of them, and how many."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from services.gateway.domain import (
    ChatPrompt,
    GenerationRequest,
    Message,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Usage,
)
from services.gateway.watch.journeys import MAX_EVENTS, MAX_REFUSED, MAX_SERVED, Journeys

SECRET = "a word of the prompt"


class Ticks:
    """A clock that is a second further at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def request(prompt: Prompt | None = None, name: str = "r") -> GenerationRequest:
    return GenerationRequest(name, "m", prompt or TextPrompt(SECRET), tenant="alice")


@pytest.fixture
def journeys() -> Journeys:
    return Journeys(Ticks())


def test_a_whole_journey(journeys: Journeys) -> None:
    journey = journeys.begin(request())
    journey.mark("encoded", tokens=12)
    journey.count_with(lambda: Usage(12, 5, 4))
    journey.mark("submitted", address="w:1")
    journey.served = True
    journey.mark_first_text()
    assert (running := journey.summary()).ended is None
    assert (running.phase, running.outcome, running.output_tokens) == ("first_text", "", 5)
    journey.mark("worker_lost", detail="gone")
    journey.mark("submitted", address="w:2")
    journey.end("length")
    summary = journey.summary()
    assert (summary.outcome, summary.worker, summary.resumes) == ("length", "w:2", 1)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (12, 4, 5)
    assert (summary.received, summary.ttft, summary.tenant) == (1.0, 3.0, "alice")
    assert [event.at for event in journey.events] == sorted(event.at for event in journey.events)


def test_nothing_comes_after_the_end(journeys: Journeys) -> None:
    journey = journeys.begin(request())
    journey.end("cancelled")
    journey.end("stop")
    journey.mark("last_text")
    assert [event.kind for event in journey.events] == ["received", "ended"]
    assert journey.summary().outcome == "cancelled"
    assert len(list(journeys)) == 1


def test_events_are_bounded_but_the_end_is_told(journeys: Journeys) -> None:
    journey = journeys.begin(request())
    for done in range(1000):
        journey.mark("prefilled", tokens=done)
    journey.end("stop")
    assert len(journey.events) == MAX_EVENTS + 1
    assert journey.left_out == 1001 - MAX_EVENTS
    assert journey.events[-1].kind == "ended"


def test_a_flood_of_refusals_does_not_push_out_what_was_served(journeys: Journeys) -> None:
    served = journeys.begin(request(name="served"))
    served.served = True
    served.end("stop")
    for _ in range(10 * MAX_REFUSED):
        journeys.begin(request(name="refused")).end("overloaded")
    kept = list(journeys)
    assert len(kept) == MAX_REFUSED + 1
    assert journeys.find(served.id) is served
    for _ in range(MAX_SERVED):
        other = journeys.begin(request())
        other.served = True
        other.end("stop")
    assert journeys.find(served.id) is None


def test_the_newest_come_first_and_names_filter(journeys: Journeys) -> None:
    first = journeys.begin(request(name="a"))
    journeys.begin(request(name="b")).end("stop")
    journeys.begin(request(name="a"))
    assert [each.request_id for each in journeys.newest(10)] == ["a", "b", "a"]
    assert [each.id for each in journeys.newest(1)] == ["3"]
    assert [each.id for each in journeys.newest(10, "a")] == ["3", "1"]
    assert journeys.find(first.id) is first


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (ChatPrompt((Message("user", SECRET),)), "chat"),
        (TextPrompt(SECRET), "text"),
        (TokenPrompt((1, 2)), "tokens"),
    ],
)
def test_it_knows_the_kind_and_keeps_no_prompt(
    journeys: Journeys, prompt: Prompt, kind: str
) -> None:
    class Generation:
        def usage(self) -> Usage:
            return Usage(1, 2, 0)

    generation = Generation()
    journey = journeys.begin(request(prompt))
    assert journey.summary().kind == kind
    journey.count_with(generation.usage)
    journey.end("stop")
    gone = weakref.ref(generation)
    del generation
    gc.collect()
    assert not any(held is prompt for held in _reachable(journey))
    assert gone() is None


def _reachable(root: object, depth: int = 3) -> Iterator[object]:
    for held in gc.get_referents(root):
        yield held
        if depth and not isinstance(held, type):
            yield from _reachable(held, depth - 1)
