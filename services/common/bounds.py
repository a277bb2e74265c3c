"""Between what a number given as a flag must be, in words and in JSON schema.

Knows no flag: `services.common.config` ties bounds to options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """A least and a most value where there is one; infinity is in only if it is the most."""

    least: float
    most: float | None = None
    open: bool = False  # the least value itself is out

    def hold(self, value: float) -> bool:
        if not (math.isfinite(value) if self.most is None else value <= self.most):
            return False
        return value > self.least if self.open else value >= self.least

    def __str__(self) -> str:
        if not self.open and self.most is not None:
            return f"{self.least:.10g} to {self.most:.10g}"
        least = f"{'above' if self.open else 'at least'} {self.least:.10g}"
        bounded = self.most is not None and math.isfinite(self.most)
        return f"{least} and at most {self.most:.10g}" if bounded else least

    def schema(self) -> dict[str, float]:
        """The same as JSON schema."""
        found = {"exclusiveMinimum" if self.open else "minimum": self.least}
        if self.most is not None and math.isfinite(self.most):
            found["maximum"] = self.most
        return found


def at_least(value: float) -> Bounds:
    return Bounds(value)


def above(value: float, most: float | None = None) -> Bounds:
    """`most` may be infinity, which is then a value too."""
    return Bounds(value, most, open=True)


def between(least: float, most: float) -> Bounds:
    return Bounds(least, most)
