"""Between what a number given as a flag must be, in words and in JSON schema.

Knows no flag: `services.common.config` ties bounds to options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_BEYOND_ALL = 2**63  # what machines count with ends there, and so does a number without a most


@dataclass(frozen=True, slots=True)
class Bounds:
    """A least and a most value where there is one; infinity is in only if it is the most."""

    least: float
    most: float | None = None
    open: bool = False  # the least value itself is out
    open_end: bool = False  # the most value itself is out

    def hold(self, value: float) -> bool:
        if value < self.least or (self.open and value == self.least):
            return False
        if self.most is None:
            return value < _BEYOND_ALL
        return value < self.most or (value == self.most and not self.open_end)

    def why_not(self, value: float) -> str:
        """The bounds in words, with the one that each number has if it is that which is missed."""
        return f"{self} and below 2^63" if value >= _BEYOND_ALL and self.most is None else str(self)

    def __str__(self) -> str:
        if not self.open and not self.open_end and self.most is not None:
            return f"{self.least:.10g} to {self.most:.10g}"
        least = f"{'above' if self.open else 'at least'} {self.least:.10g}"
        if self.most is None or not math.isfinite(self.most):
            return least
        return f"{least} and {'below' if self.open_end else 'at most'} {self.most:.10g}"

    def schema(self) -> dict[str, float]:
        """The same as JSON schema."""
        found = {"exclusiveMinimum" if self.open else "minimum": self.least}
        if self.most is not None and math.isfinite(self.most):
            found["exclusiveMaximum" if self.open_end else "maximum"] = self.most
        return found


def at_least(value: float) -> Bounds:
    return Bounds(value)


def above(value: float, most: float | None = None) -> Bounds:
    """`most` may be infinity, which is then a value too."""
    return Bounds(value, most, open=True)


def between(least: float, most: float) -> Bounds:
    return Bounds(least, most)


def below(most: float, least: float) -> Bounds:
    return Bounds(least, most, open_end=True)
