"""What a check found: how bad it is, and a sentence that says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str  # what was looked at, in a word or two
    level: Level
    text: str


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", text)


def warning(check: str, text: str) -> Finding:
    """It works, and could be better or may fail later."""
    return Finding(check, "warning", text)


def problem(check: str, text: str) -> Finding:
    """Something will not work."""
    return Finding(check, "problem", text)
