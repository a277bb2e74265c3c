"""One answer while it comes in: its event stream read, and each piece of text given a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.client.events import DONE, EventSplitter, Usage, decode_chunk

Clock = Callable[[], float]


class Failure(Exception):
    """A request that did not come to its end; `kind` is a short name to count it by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(slots=True)
class Answer:
    """What came of one request; times are the clock's seconds, 0 for what has not come.

    `arrivals` has one time for each event that the model made text of; several events that
    were read at once have the same time. `usage` is what the server counted.
    """

    sent_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    num_events: int = 0
    arrivals: list[float] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str = ""
    text: str = ""

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, or else one for each event with text."""
        counted = self.usage.completion_tokens if self.usage else None
        return len(self.arrivals) if counted is None else counted


class Reader:
    """Takes the bytes of one event stream in, and fills an answer."""

    def __init__(self, clock: Clock, *, keep_text: bool = False) -> None:
        self.answer = Answer(clock())
        self.done = False
        self._clock = clock
        self._splitter = EventSplitter()
        self._texts: list[str] | None = [] if keep_text else None

    def feed(self, data: bytes) -> None:
        """Raises ApiError if the stream reports a failure, or is none."""
        now = self._clock()
        for event in self._splitter.feed(data):
            self._take(event, now)

    def close(self) -> None:
        """The body has ended. Raises Failure if the stream had not."""
        now = self._clock()
        for event in self._splitter.close():
            self._take(event, now)
        answer = self.answer
        if not self.done and not answer.finish_reason:
            raise Failure("cut off", "the stream ended without [DONE] or a finish_reason")
        answer.ended_at = now
        answer.text = "".join(self._texts or ())

    def _take(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.done = True
            return
        answer = self.answer
        answer.num_events += 1
        chunk = decode_chunk(data)
        if chunk.usage is not None:
            answer.usage = chunk.usage
        for choice in chunk.choices:
            if choice.finish_reason:
                answer.finish_reason = choice.finish_reason
            if choice.has_output:
                answer.first_at = answer.first_at or now
                answer.last_at = now
                answer.arrivals.append(now)
                if self._texts is not None:
                    self._texts.append(choice.said)
