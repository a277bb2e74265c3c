"""What every benchmark ends with: figures over rounds, a short table, and a file in JSON.

Knows neither what is measured nor how. The file has the benchmark's name, the machine, the flags
and the values of every round; `bench.plots` and `bench.page` read it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

from rich.console import Console
from rich.progress import track

from services import __version__
from services.client.answer import Failure
from services.common import logs, process

T = TypeVar("T")

OWN = "shoal"  # the system's name where nothing is compared
_PACKAGES = ("torch", "grpcio", "uvloop", "tokenizers")


class Config(Protocol):
    """A benchmark's flags, a dataclass."""

    @property
    def json(self) -> str:
        """The file for the figures; empty for none."""
        ...


class Rounds:
    """Values by system and measure, one a round."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {}  # measure -> system -> rounds

    def add(self, system: str, measure: str, value: float) -> None:
        self._values.setdefault(measure, {}).setdefault(system, []).append(value)

    @property
    def systems(self) -> list[str]:
        """In the order in which they came."""
        return list(dict.fromkeys(name for row in self._values.values() for name in row))

    @property
    def measures(self) -> list[str]:
        return list(self._values)

    def median(self, system: str, measure: str) -> float | None:
        values = self._values[measure].get(system)
        return statistics.median(values) if values else None

    def spread(self, system: str, measure: str) -> tuple[float, float] | None:
        """The least and the most of all rounds."""
        values = self._values[measure].get(system)
        return (min(values), max(values)) if values else None

    def ratio(self, system: str, peer: str, measure: str) -> float | None:
        """The median of the rounds' own ratios, system to peer: what they share falls out."""
        row = self._values[measure]
        pairs = zip(row.get(system, ()), row.get(peer, ()), strict=False)
        ratios = [one / other for one, other in pairs if other]
        return statistics.median(ratios) if ratios else None

    def curve(self, system: str, measure: str) -> list[tuple[float, float, float, float]]:
        """(x, median, least, most) of the measures that are called `measure, x`, by x."""
        points = []
        for name in self._values:
            head, _, x = name.rpartition(", ")
            if head == measure and (values := self._values[name].get(system)):
                middle = statistics.median(values)
                points.append((float(x), middle, min(values), max(values)))
        return sorted(points)

    def as_json(self) -> dict[str, dict[str, list[float]]]:
        return self._values

    @classmethod
    def from_json(cls, values: dict[str, dict[str, list[float]]]) -> Rounds:
        """What `as_json` gave."""
        rounds = cls()
        rounds._values = values
        return rounds


def machine() -> dict[str, str]:
    """What figures belong to."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        lines = info.read_text().splitlines()
        named = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        cpu = named[0] if named else cpu
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "shoal": __version__,
        **{name: metadata.version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "cpu": f"{os.cpu_count()} x {cpu}",
    }


def run(
    name: str,
    config: Config,
    measure: Callable[[Rounds], Awaitable[None]],
    also: Callable[[Rounds], str] = lambda _: "",
) -> NoReturn:
    """Measures to the end or to a signal, then finishes with what there is, and exits.

    `also` makes more text of the figures, printed below the table.

    A system under test that failed ends it with a sentence and status 1.
    """
    logs.setup("bench", level="warning")
    process.raise_file_limit()  # a client has a socket for each stream

    async def go(stop: asyncio.Event) -> int:
        rounds = Rounds()
        work = asyncio.ensure_future(measure(rounds))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)
        finish(name, config, rounds)
        print(also(rounds))
        error = None if work.cancelled() else work.exception()
        if isinstance(error, Failure | TimeoutError):
            print(f"a system failed: {error}", file=sys.stderr)
            return 1
        if error is not None:
            raise error
        return 0

    process.run(go)


def shown(parts: Sequence[T]) -> Iterable[T]:
    """The parts of a measurement, with a bar on stderr while they go by, if that is a terminal."""
    console = Console(stderr=True)
    return track(
        parts, "measuring", console=console, transient=True, disable=not console.is_terminal
    )


def finish(name: str, config: Config, rounds: Rounds) -> None:
    """Prints the table, and writes the file if one is named."""
    print(table(rounds))
    write(name, config, {"rounds": rounds.as_json()})


def write(name: str, config: Config, figures: dict[str, Any]) -> None:
    """Writes a benchmark's file, if one is named; its directories are made."""
    if not config.json:
        return
    flags = dataclasses.asdict(cast(Any, config))
    value = {"bench": name, "machine": machine(), "flags": flags, **figures}
    path = Path(config.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def table(rounds: Rounds) -> str:
    """Markdown: a row a measure with median (least to most), then Shoal's ratios to the others."""
    lines = [medians(rounds)]
    ours = [name for name in rounds.systems if name.startswith(OWN)]
    pairs = [(one, peer) for one in ours for peer in rounds.systems if peer not in ours]
    if pairs:
        ratios = {
            measure: [rounds.ratio(one, peer, measure) for one, peer in pairs]
            for measure in rounds.measures
        }
        told = [
            (measure, [number(ratio) for ratio in row])
            for measure, row in ratios.items()
            if any(ratio is not None for ratio in row)
        ]
        lines += ["", rows("ratio", [f"{one} / {peer}" for one, peer in pairs], told)]
    return "\n".join(lines)


def medians(rounds: Rounds, measures: Sequence[str] | None = None) -> str:
    """Markdown: median (least to most) of these measures, as far as there are any; default: all."""
    chosen = rounds.measures if measures is None else measures
    cells = [
        (measure, [cell(rounds, name, measure) for name in rounds.systems])
        for measure in chosen
        if measure in rounds.measures
    ]
    return rows("", rounds.systems, cells)


def rows(corner: str, heads: Sequence[str], lines: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table in Markdown; each line has its head and its cells."""
    found = [f"| {corner} | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    found += [f"| {' | '.join([head, *cells])} |" for head, cells in lines]
    return "\n".join(found)


def cell(rounds: Rounds, system: str, measure: str) -> str:
    """`median (least to most)` of one measure, or a dash."""
    median, spread = rounds.median(system, measure), rounds.spread(system, measure)
    if median is None or spread is None:
        return "-"
    return f"{number(median)} ({number(spread[0])} to {number(spread[1])})"


def number(value: float | None) -> str:
    """Three digits, or all of them before the point."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
