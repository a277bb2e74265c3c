"""What a model's text is taken apart into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of tool call `index` of this output; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments: JSON text."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class TextParser(Protocol):
    """Takes the text of one output apart."""

    def feed(self, text: str) -> Sequence[Piece]:
        """The pieces that the next text completes."""
        ...

    def finish(self) -> Sequence[Piece]:
        """What was held back, once no more text comes."""
        ...


class ContentParser:
    """All text is content."""

    def feed(self, text: str) -> Sequence[Piece]:
        return (Content(text),) if text else ()

    def finish(self) -> Sequence[Piece]:
        return ()


def partial_suffix(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
