"""The reasoning of a model's text, between <think> and </think>, apart from the rest.

Blanks around the marks belong to neither. An output that does not begin with reasoning
has none: a later <think> is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from services.gateway.domain import ReasoningState
from services.gateway.openai.output.pieces import Piece, Reasoning, TextParser, partial_suffix

OPENING, CLOSING = "<think>", "</think>"

State = Literal["start", "reasoning", "gap", "rest"]


class ReasoningParser:
    """Splits one output; what follows the reasoning goes to another parser."""

    def __init__(self, rest: TextParser, state: ReasoningState, *, implied: bool) -> None:
        """`state` is what the prompt says. With `implied`, an output that does not begin
        with <think> is reasoning up to </think> all the same."""
        self.num_chars = 0  # of the text up to </think>, marks included
        self._rest = rest
        self._implied = implied or state == "open"
        self._state: State = "rest" if state == "closed" else "start"
        self._buffer = ""
        self._begun = False
        self._at_start = True  # of the reasoning

    @property
    def reasons(self) -> bool:
        """Whether the output began with reasoning."""
        return self._begun

    @property
    def undecided(self) -> bool:
        """Whether the output may yet begin with reasoning."""
        return self._state == "start"

    def feed(self, text: str) -> Sequence[Piece]:
        if self._state == "rest":
            return self._rest.feed(text)
        self.num_chars += len(text)
        self._buffer += text
        out: list[Piece] = []
        if self._state == "start" and not self._decide():
            return out
        if self._state == "reasoning":
            self._reason(out)
        if self._state == "gap":
            self._buffer = self._buffer.lstrip()
            self._state = "rest" if self._buffer else "gap"
        if self._state == "rest":
            held, self._buffer = self._buffer, ""
            self.num_chars -= len(held)
            out += self._rest.feed(held)
        return out

    def finish(self) -> Sequence[Piece]:
        held, self._buffer = self._buffer, ""
        if self._state == "start" and not self._implied:
            return [*self._rest.feed(held), *self._rest.finish()]
        if self._state in ("start", "reasoning") and held.strip():
            return [Reasoning(held.rstrip() if self._begun else held.strip())]
        return self._rest.finish()

    def _decide(self) -> bool:
        """Whether it is clear by now how the output begins."""
        start = self._buffer.lstrip()
        if len(start) < len(OPENING) and OPENING.startswith(start):
            return False
        if start.startswith(OPENING):
            self._buffer = start[len(OPENING) :]
        elif not self._implied:
            self._state = "rest"
            return True
        self._state, self._begun = "reasoning", True
        return True

    def _reason(self, out: list[Piece]) -> None:
        if self._at_start:
            self._buffer = self._buffer.lstrip()
            self._at_start = not self._buffer
        at = self._buffer.find(CLOSING)
        if at >= 0:
            said = self._buffer[:at].rstrip()
            self._buffer = self._buffer[at + len(CLOSING) :]
            self._state = "gap"
        else:
            end = len(self._buffer) - partial_suffix(self._buffer, CLOSING)
            said = self._buffer[:end].rstrip()
            self._buffer = self._buffer[len(said) :]
        if said:
            out.append(Reasoning(said))
