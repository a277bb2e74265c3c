"""What every stub worker does, whatever wire it speaks: one token a step for each request.

A request with `top_p` 1 is flooded: the next step follows as soon as the wire has taken the last.
One with `top_p` below 1 is paced at `PACE` steps a second, and its number is top_p in thousandths:
the one thing that a client says and every peer passes on. One with `HELD` gets nothing at all.
When paced tokens are sent is kept, and written to a file as JSON, {number: [seconds of the
monotonic clock, ...]}, whenever nothing is left.

Only the standard library: the peers' own interpreters import it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAME = "bench"  # what every system calls the model
HELD = 0.5  # the top_p of a stream that stays idle
PACE = 50.0  # tokens a second of a paced stream


@dataclass(slots=True)
class Live:
    """One request, and how many tokens it has left."""

    left: int
    number: int  # 0: flooded
    sent: int = 0
    times: list[float] = field(default_factory=list)


class Steps:
    """The live requests of one stub worker, by whatever names its wire has for them."""

    def __init__(self, token_ids: Sequence[int], report: Path) -> None:
        self._token_ids = token_ids
        self._report = report
        self._live: dict[object, Live] = {}
        self._times: dict[int, list[float]] = {}
        self._told = True  # the file has all of the times
        self._next_at = 0.0
        self._beat = 0  # number of the beat, and when the first of its tokens was there
        self._beat_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._live)

    @property
    def flooded_alone(self) -> bool:
        """There is one request, and it is not paced."""
        return len(self._live) == 1 and not next(iter(self._live.values())).number

    def add(self, name: object, max_tokens: int, top_p: float) -> None:
        if top_p == HELD:
            return
        number = round(top_p * 1000) if top_p < 0.9995 else 0
        live = Live(max_tokens, number)
        if number:
            self._times[number] = live.times
        self._live[name] = live

    def drop(self, name: object) -> None:
        """The client left."""
        if self._live.pop(name, None) is not None:
            self._settle()

    def pause(self) -> float:
        """Seconds until the next step; 0 in a flood."""
        if not any(live.number for live in self._live.values()):
            return 0.0
        return max(self._next_at - time.monotonic(), 0.0)

    def pause_of(self, name: object) -> float:
        """The same for a wire without common steps: paced requests then share a beat."""
        if not self._live[name].number:
            return 0.0
        now = time.monotonic()
        return (math.floor(now * PACE) + 1) / PACE - now

    def beat_at(self) -> float:
        """When this beat began: an engine has all rows of a step at once, whoever sends first."""
        now = time.monotonic()
        if (beat := math.floor(now * PACE)) != self._beat:
            self._beat, self._beat_at = beat, now
        return self._beat_at

    def take(self) -> list[tuple[Any, int, bool]]:
        """The next step: (name, token id, whether it is the last) of each request."""
        now = time.monotonic()
        beat = 1 / PACE
        on_time = 0 <= now - self._next_at < beat  # else it is late, or nothing was paced
        self._next_at = (self._next_at if on_time else now) + beat
        return [(name, *self.take_one(name, now)) for name in list(self._live)]

    def take_one(self, name: object, now: float) -> tuple[int, bool]:
        """The next token of one request, sent at `now`, and whether it is the last."""
        live = self._live[name]
        token_id = self._token_ids[live.sent % len(self._token_ids)]
        live.sent += 1
        if live.number:
            live.times.append(now)
            self._told = False
        last = live.sent >= live.left
        if last:
            del self._live[name]
            self._settle()
        return token_id, last

    def _settle(self) -> None:
        if self._live or self._told:
            return
        self._told = True
        whole = self._report.with_suffix(".new")
        whole.write_text(json.dumps(self._times))
        os.replace(whole, self._report)
