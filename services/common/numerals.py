"""Numbers that somebody wrote: in a header, a flag, an environment variable.

Python's own readers also take `1_0` for ten and the digits of every script, which no other program
that wrote or logged the same text would.
"""

from __future__ import annotations


def read_float(text: str) -> float:
    """The number, perhaps infinite or no number. Raises ValueError if the text is none."""
    return float(_plain(text))


def read_int(text: str) -> int:
    """The whole number. Raises ValueError if the text is none."""
    return int(_plain(text))


def _plain(text: str) -> str:
    if "_" in text or not text.isascii():
        raise ValueError(f"{text!r} is not a number")
    return text
