"""What happened to each request, when: those in flight, and the last that have ended.

A journey is written by whoever does the thing, at the few moments between arrival and end
that matter; nothing is written for a token. It holds no text and no token ids. How many
are kept, and how long each may be, is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from services.gateway.domain import ChatPrompt, GenerationRequest, TextPrompt, Usage
from services.gateway.watch.shapes import EventKind, JourneyEvent, RequestSummary

MAX_EVENTS = 256
MAX_SERVED = 512  # journeys kept of those that a worker had accepted
MAX_REFUSED = 64  # and of the others, which a flood of must not push those out

_RESUMES = ("worker_lost", "worker_left", "decoder_lost", "decoder_left")
_NO_USAGE = Usage(0, 0, 0)


class Journey:
    """One request's. `clock` gives seconds."""

    __slots__ = (
        "_choices", "_clock", "_ended", "_events", "_first_text", "_kind", "_left_out", "_on_end",
        "_request_id", "_resumes", "_tenant", "_usage", "_worker", "id", "model", "served",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        request: GenerationRequest,
        clock: Callable[[], float],
        on_end: Callable[[Journey], None],
    ) -> None:
        self.id = id
        self.model = request.model
        self.served = False  # a worker has accepted it
        self._request_id = request.request_id  # and not the request, which has the prompt
        self._tenant = request.tenant
        self._choices = request.n
        self._kind = _kind(request)
        self._clock = clock
        self._on_end = on_end
        self._usage: Callable[[], Usage] = lambda: _NO_USAGE
        self._events = [JourneyEvent("received", clock())]
        self._left_out = 0
        self._worker = ""
        self._resumes = 0
        self._first_text: float | None = None
        self._ended: float | None = None

    # -- what is written

    def mark(
        self, kind: EventKind, choice: int = 0, *, address: str = "", tokens: int = 0,
        detail: str = "",
    ) -> None:  # fmt: skip
        """Something happened, now. Nothing is added after the end."""
        if self._ended is not None:
            return
        if kind == "submitted":
            self._worker = address
        elif kind in _RESUMES:
            self._resumes += 1
        if len(self._events) >= MAX_EVENTS:
            self._left_out += 1
            return
        self._events.append(JourneyEvent(kind, self._clock(), choice, address, tokens, detail))

    def mark_first_text(self) -> None:
        """The client got its first text."""
        self._first_text = self._clock()
        self.mark("first_text")

    def count_with(self, usage: Callable[[], Usage]) -> None:
        """Asks `usage` for the token counts from now to the end."""
        self._usage = usage

    def end(self, outcome: str) -> None:
        """It is over; only the first call counts."""
        if self._ended is not None:
            return
        final = self._usage()
        self._usage = lambda: final  # and keeps nothing else of the request
        self._ended = self._clock()
        self._events.append(
            JourneyEvent("ended", self._ended, tokens=final.completion_tokens, detail=outcome)
        )
        self._on_end(self)

    # -- what is read

    @property
    def events(self) -> list[JourneyEvent]:
        return self._events

    @property
    def left_out(self) -> int:
        return self._left_out

    def summary(self) -> RequestSummary:
        """Its line in the list."""
        usage, received, last = self._usage(), self._events[0].at, self._events[-1]
        return RequestSummary(
            id=self.id,
            request_id=self._request_id,
            model=self.model,
            kind=self._kind,
            tenant=self._tenant,
            choices=self._choices,
            received=received,
            ended=self._ended,
            outcome="" if self._ended is None else last.detail,
            phase=last.kind,
            worker=self._worker,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            resumes=self._resumes,
            ttft=None if self._first_text is None else self._first_text - received,
        )


def _kind(request: GenerationRequest) -> Literal["chat", "text", "tokens"]:
    if isinstance(request.prompt, ChatPrompt):
        return "chat"
    return "text" if isinstance(request.prompt, TextPrompt) else "tokens"


class Journeys:
    """The journeys of one gateway."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_begun = 0
        self._live: dict[str, Journey] = {}
        self._served: deque[Journey] = deque(maxlen=MAX_SERVED)
        self._refused: deque[Journey] = deque(maxlen=MAX_REFUSED)

    def begin(self, request: GenerationRequest) -> Journey:
        """A request has arrived."""
        self._num_begun += 1
        journey = Journey(str(self._num_begun), request, self._clock, self._on_end)
        self._live[journey.id] = journey
        return journey

    def find(self, id: str) -> Journey | None:
        """The journey of that name, if it is still kept."""
        if (live := self._live.get(id)) is not None:
            return live
        return next((journey for journey in self if journey.id == id), None)

    def newest(self, limit: int, request_id: str = "") -> list[RequestSummary]:
        """Of the last to begin, at most `limit`, newest first; with `request_id` only its own."""
        ordered = sorted(self, key=lambda journey: int(journey.id), reverse=True)
        summaries = (journey.summary() for journey in ordered)
        if request_id:
            summaries = (each for each in summaries if each.request_id == request_id)
        return [summary for summary, _ in zip(summaries, range(limit), strict=False)]

    def __iter__(self) -> Iterator[Journey]:
        yield from self._live.values()
        yield from self._served
        yield from self._refused

    def _on_end(self, journey: Journey) -> None:
        del self._live[journey.id]
        (self._served if journey.served else self._refused).append(journey)
