"""Where a JSON object ends, in text that comes in pieces.

Counts brackets outside strings, no more: what lies between is not checked.
"""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')


class JsonEnd:
    """Finds the end of one object.

    `feed` takes the next text and returns how much of it belongs to the object; `ended`
    is set once it is over. A "<" outside strings is no JSON: the object ends before it,
    and is `broken`.
    """

    def __init__(self, depth: int = 0) -> None:
        """`depth` is how many brackets are open already."""
        self.ended = False
        self.broken = False
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """How many characters of the text belong to the object."""
        position = 0
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, position)
            if match is None:
                break
            position = match.end()
            self._see(match[0])
            if self.ended:
                return match.start() if self.broken else position
        return len(text)

    def _see(self, mark: str) -> None:
        if mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._in_string = not self._in_string
        elif mark == "<":
            self.ended = self.broken = True
        else:
            self._depth += 1 if mark in "{[" else -1
            self.ended = self._depth <= 0
