"""Pictures of the benchmarks' figures, as SVG; `bench.page` puts them into the documentation.

Each function draws what one benchmark wrote with --json. Points and bars are medians; what reaches
from them goes from the least to the most of the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, ScalarFormatter

from bench import bookkeeping, encode
from bench.figures import OWN, Rounds, number

Report = dict[str, Any]  # what a benchmark wrote
_COLOURS = ("#0b62c4", "#56a8e8", "#b45f06", "#6b7280", "#15803d", "#7e22ce", "#be185d")
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small, sharp and found by a search
    "svg.hashsalt": "shoal",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "axes.prop_cycle": cycler(color=_COLOURS),
}


def draw(report: Report, directory: Path) -> list[Path]:
    """Writes the pictures of one benchmark into a directory; none if it has no picture."""
    matplotlib.use("svg")  # no window, whatever the machine has
    written = []
    for name, picture in PICTURES.get(report["bench"], {}).items():
        with pyplot.rc_context(_STYLE):
            figure = picture(report)
            for axes in figure.axes:
                _plain_numbers(axes)
            _caption(figure, report)
            path = directory / f"bench-{name}.svg"
            figure.savefig(path, format="svg", metadata={"Date": None})
            pyplot.close(figure)
        path.write_text("\n".join(map(str.rstrip, path.read_text().splitlines())) + "\n")
        written.append(path)
    return written


def caption(report: Report) -> str:
    """Date, machine and versions, in one line."""
    facts = dict(report["machine"])
    date, processor = facts.pop("date"), facts.pop("cpu")
    versions = ", ".join(f"{name} {version}" for name, version in facts.items())
    count = (report.get("flags") or report.get("config") or {}).get("rounds") or 1
    spread = f"; medians of {count} rounds, least to most" if count > 1 else "; one round"
    return f"{date}; {processor}; {versions}{spread}"


def _plain_numbers(axes: Axes) -> None:
    """Has y begin at 0 where it is no logarithm, and none of its ticks be a power."""
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    elif isinstance(axes.yaxis.get_major_formatter(), ScalarFormatter):
        axes.set_ylim(bottom=0)
    else:
        return  # names
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _caption(figure: Figure, report: Report) -> None:
    figure.text(0.01, 0.01, caption(report), fontsize=7, color="#5b6570")


def _figure(columns: int, height: float = 3.8) -> tuple[Figure, Sequence[Axes]]:
    figure, axes = pyplot.subplots(
        1, columns, figsize=(9, height), squeeze=False, layout="constrained"
    )
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0, 0.05, 1, 0.95))  # type: ignore[call-arg]  # room for the caption
    return figure, list(axes[0])


def _bars(axes: Axes, rounds: Rounds, measures: dict[str, str]) -> None:
    """Groups of bars, one for each measure by its label; a bar for each system."""
    systems = [name for name in rounds.systems if any(_has(rounds, name, m) for m in measures)]
    width = 0.84 / len(systems)
    for index, system in enumerate(systems):
        found = [(at, m) for at, m in enumerate(measures) if _has(rounds, system, m)]
        middles = [rounds.median(system, m) or 0.0 for _, m in found]
        spreads = [rounds.spread(system, m) or (0.0, 0.0) for _, m in found]
        places = [at + (index - (len(systems) - 1) / 2) * width for at, _ in found]
        below = [middle - least for middle, (least, _) in zip(middles, spreads, strict=True)]
        above = [most - middle for middle, (_, most) in zip(middles, spreads, strict=True)]
        drawn = axes.bar(
            places,
            middles,
            width * 0.94,
            label=system,
            yerr=[below, above],
            error_kw={"ecolor": "#9aa4af", "elinewidth": 1},
        )
        labels = [number(middle) for middle in middles]
        axes.bar_label(drawn, labels, fontsize=7, padding=1, rotation=90 if width < 0.2 else 0)
    axes.set_xticks(range(len(measures)), list(measures.values()))
    axes.margins(y=0.2)


def _has(rounds: Rounds, system: str, measure: str) -> bool:
    return measure in rounds.measures and rounds.median(system, measure) is not None


def _curve(axes: Axes, rounds: Rounds, system: str, measure: str, label: str = "") -> None:
    """A line over x, which is drawn by its logarithm, with the spread around it."""
    points = rounds.curve(system, measure)
    x, middles, least, most = (list(values) for values in zip(*points, strict=True))
    (line,) = axes.plot(x, middles, marker="o", markersize=4, label=label or system)
    axes.fill_between(x, least, most, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _wire_flood(report: Report) -> Figure:
    rounds = Rounds.from_json(report["rounds"])
    figure, (rate, cost) = _figure(2)
    streams = _streams(rounds, "events/s")
    groups = {f"events/s, {n}": _streams_text(n) for n in streams if n > 1}
    if 1 in streams:
        groups = {"tokens/s, 1": "1 stream, tokens"} | groups
    _bars(rate, rounds, groups)
    rate.set_title("A flood: events a second")
    _bars(cost, rounds, {f"CPU us a token, {n}": _streams_text(n) for n in streams})
    cost.set_title("CPU time a token, µs, all processes")
    rate.legend(fontsize=8, frameon=False)
    return figure


def _wire_latency(report: Report) -> Figure:
    rounds = Rounds.from_json(report["rounds"])
    figure, panels = _figure(2)
    for axes, percent in zip(panels, ("p50", "p99"), strict=True):
        streams = _streams(rounds, f"added {percent} ms")
        _bars(axes, rounds, {f"added {percent} ms, {n}": _streams_text(n) for n in streams})
        axes.set_yscale("log")
        axes.set_title(f"Added latency {percent}, ms, 50 tokens/s a stream")
    panels[0].legend(fontsize=8, frameon=False)
    return figure


def _streams_text(number_of: int) -> str:
    return "1 stream" if number_of == 1 else f"{number_of} streams"


def _streams(rounds: Rounds, measure: str) -> list[int]:
    found = {int(x) for name in rounds.systems for x, *_ in rounds.curve(name, measure)}
    return sorted(found)


def _growth(report: Report) -> Figure:
    rounds = Rounds.from_json(report["rounds"])
    figure, (axes,) = _figure(1)
    for system in rounds.systems:
        _curve(axes, rounds, system, "gateway, CPU us a token")
    axes.set_title("The gateway's CPU time a token, µs")
    axes.set_xlabel("streams at once")
    return figure


def _encode(report: Report) -> Figure:
    rounds = Rounds.from_json(report["rounds"])
    figure, (growth, beside) = _figure(2)
    for system in rounds.systems:
        _curve(growth, rounds, system, "thousand tokens/s")
    growth.set_title("Encoding, thousand tokens a second")
    growth.set_xlabel("threads of each process")
    growth.legend(fontsize=8, frameon=False)
    shown = Rounds()
    for name, values in report["rounds"].items():
        head, _, load = name.partition(" ms, ")
        if head.startswith("short prompt"):
            for value in values[encode.ONE]:
                shown.add(load, head.partition(", ")[2], value)
    _bars(beside, shown, {name: name for name in shown.measures})
    beside.set_title("A prompt of 30 words at one process, ms")
    beside.legend(fontsize=8, frameon=False)
    return figure


def _bookkeeping(report: Report) -> Figure:
    rounds = Rounds.from_json(report["rounds"])
    figure, (step, match) = _figure(2)
    _curve(step, rounds, OWN, bookkeeping.STEP)
    step.set_yscale("log")
    step.set_title("The scheduler, CPU µs a step")
    step.set_xlabel("requests running")
    _curve(match, rounds, OWN, bookkeeping.MATCH)
    match.set_title("The radix tree, CPU µs a match of 1,000 tokens")
    match.set_xlabel("prefixes cached")
    return figure


def _engine_peers(report: Report) -> Figure:
    """A panel for each load; figures of that benchmark are by clock, peer and load."""
    by_peer = report["figures"]["seconds"]
    loads = list(next(iter(by_peer.values())))
    figure, panels = _figure(len(loads), height=3.4)
    for axes, load in zip(panels, loads, strict=True):
        names = list(by_peer)[::-1]
        values = [by_peer[name][load] for name in names]
        middles = [statistics.median(one) for one in values]
        below = [middle - min(one) for middle, one in zip(middles, values, strict=True)]
        above = [max(one) - middle for middle, one in zip(middles, values, strict=True)]
        colours = [_COLOURS[0] if name.startswith(OWN) else _COLOURS[3] for name in names]
        drawn = axes.barh(names, middles, color=colours, xerr=[below, above], ecolor="#9aa4af")
        axes.bar_label(drawn, [number(middle) for middle in middles], fontsize=7, padding=2)
        axes.set_title(f"{load}, tokens/s", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(visible=False)
        axes.margins(x=0.25)
        if axes is not panels[0]:
            axes.set_yticks([])
    return figure


def _default_fleet(report: Report) -> Figure:
    rounds = Rounds.from_json(report["rounds"])
    figure, (rate, latency) = _figure(2)
    shown = Rounds()
    for measure, row in report["rounds"].items():
        for load, values in row.items():
            for value in values:
                shown.add(OWN, f"{measure}, {load.split()[0]}", value)
    _curve(rate, shown, OWN, "output tokens/s")
    rate.set_title("Output tokens a second")
    for measure in ("TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms"):
        if measure in rounds.measures:
            _curve(latency, shown, OWN, measure, measure.removesuffix(" ms"))
    latency.set_title("Latency, ms")
    latency.legend(fontsize=8, frameon=False)
    for axes in (rate, latency):
        axes.set_xlabel("requests at once")
    return figure


PICTURES: dict[str, dict[str, Callable[[Report], Figure]]] = {  # by benchmark and file
    "wire": {"wire-flood": _wire_flood, "wire-latency": _wire_latency},
    "growth": {"growth": _growth},
    "encode": {"encode": _encode},
    "bookkeeping": {"bookkeeping": _bookkeeping},
    "engine_peers": {"engine-peers": _engine_peers},
    "default_fleet": {"default-fleet": _default_fleet},
}
