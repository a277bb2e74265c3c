"""How deeply a JSON text is nested, found piece by piece as it arrives.

A reader that recurses must never see a text that is too deep, and finding out must not
hold the event loop up: every step is one pass of C code over one piece.
"""

from __future__ import annotations

import re

import numpy as np

_ESCAPE = re.compile(rb"\\.", re.DOTALL)


class DepthGauge:
    """Feed it the pieces of a text in order; `deepest` is what was found so far.

    What is no JSON gets some depth or other: it is refused by whoever reads it.
    """

    def __init__(self) -> None:
        self.deepest = 0
        self._depth = 0
        self._in_string = 0
        self._escaping = False

    def feed(self, piece: bytes) -> None:
        outside = self._outside_of_strings(piece)
        if not outside:
            return
        text = np.frombuffer(outside, np.uint8) | 0x20  # [ becomes {, and ] becomes }
        steps = (text == ord("{")).astype(np.int8) - (text == ord("}"))
        depths = np.cumsum(steps, dtype=np.int64)
        self.deepest = max(self.deepest, self._depth + int(depths.max()))
        self._depth += int(depths[-1])

    def _outside_of_strings(self, piece: bytes) -> bytes:
        if self._escaping and piece:
            piece = piece[1:]
            self._escaping = False
        if b"\\" in piece:
            num_trailing = len(piece) - len(piece.rstrip(b"\\"))
            self._escaping = num_trailing % 2 == 1
            piece = _ESCAPE.sub(b"", piece[:-1] if self._escaping else piece)
        parts = piece.split(b'"')  # in turns outside and inside of strings
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= (len(parts) - 1) % 2
        return outside
