"""Finding stop strings in text that arrives in pieces.

The match that starts earliest in the text wins, and of two that start together the
shorter, so that the outcome depends on the text alone and not on how it was cut into
tokens. One Knuth-Morris-Pratt automaton a stop string keeps the time per character
flat, however long a half-finished match has become. Knows nothing of tokens.

    text      ......the end is ne|
                        ^ held   ^ fed so far
    stops     "end is near", "is never": both are alive, the first decides what is held
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string's place in the text, in characters from its beginning."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Watches one text for stop strings, of which there is at least one, none empty."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._first = re.compile("[" + "".join(re.escape(stop[0]) for stop in stops) + "]")
        self._length = 0  # characters fed
        self._longest = 0  # of the stop strings' beginnings that the text ends with
        self._candidate: StopMatch | None = None

    @property
    def candidate(self) -> StopMatch | None:
        """The best complete match so far; it may still lose to one that began before it."""
        return self._candidate

    @property
    def safe_length(self) -> int:
        """How many characters, from the first, can be in no match whatever follows."""
        safe = self._length - self._longest
        return safe if self._candidate is None else min(safe, self._candidate.start)

    def feed(self, text: str) -> bool:
        """Takes more text in; whether the candidate is now certain to be the match."""
        position, base = 0, self._length
        while position < len(text):
            if not self._longest:
                found = self._first.search(text, position)
                if found is None:
                    break
                position = found.start()
            self._length = base + position + 1
            self._advance(text[position])
            position += 1
            if self._candidate is not None and self.safe_length >= self._candidate.start:
                return True
        self._length = base + len(text)
        return False

    def _advance(self, character: str) -> None:
        for automaton in self._automata:
            if not automaton.advance(character):
                continue
            start = self._length - len(automaton.stop)
            if self._candidate is None or start < self._candidate.start:
                self._candidate = StopMatch(automaton.stop, start, self._length)
        if self._candidate is not None:
            # Later matches of a stop string that has matched start later still.
            self._automata = [a for a in self._automata if a.state < len(a.stop)]
        self._longest = max((automaton.state for automaton in self._automata), default=0)


class _Automaton:
    """How much of one stop string the text ends with.

    `_fallback[k - 1]` is the length of the longest proper prefix of stop[:k] that is
    also its suffix. It grows only as far as a match has got, so that a huge stop
    string costs nothing.
    """

    __slots__ = ("_fallback", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = [0]

    def advance(self, character: str) -> bool:
        """Takes one character; whether the stop string is complete with it."""
        stop, state = self.stop, self.state
        while state and stop[state] != character:
            state = self._fallback[state - 1]
        if stop[state] == character:
            state += 1
            if state > len(self._fallback):
                self._extend()
        self.state = state
        return state == len(stop)

    def _extend(self) -> None:
        """Adds the entry for a prefix one character longer."""
        stop, fallback = self.stop, self._fallback
        character, length = stop[len(fallback)], fallback[-1]
        while length and stop[length] != character:
            length = fallback[length - 1]
        fallback.append(length + 1 if stop[length] == character else 0)
