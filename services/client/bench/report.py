"""The report of a run or a sweep: one HTML file that needs no other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from services.client.bench.record import Record
from services.client.bench.summary import TITLES, Summary
from services.client.bench.svg import Series, chart
from services.client.bench.table import notes

_CDF_POINTS = 200
_PERCENTS = (50.0, 90.0, 99.0)  # of the table
_SHORT = {  # how the table calls the metrics
    "ttft": "TTFT",
    "scheduled_ttft": "TTFT from due",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
    "scheduled_e2el": "E2EL from due",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --back: #fff; --grid: #e3e6ea; --soft: #5b6570;
  --s0: #0b62c4; --s1: #c2410c; --s2: #15803d; --s3: #7e22ce; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --back: #14171a; --grid: #2b3036;
  --soft: #9aa4af; --s0: #6cb0ff; --s1: #ff9e64; --s2: #6fd08c; --s3: #c9a1ff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th[colspan] { text-align: center; } th:first-child, td:first-child { text-align: left; }
.charts { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 15px; }
.grid { stroke: var(--grid); } polyline, .key { fill: none; stroke-width: 2; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .s2 { stroke: var(--s2); }
.s3 { stroke: var(--s3); } circle { fill: var(--back); stroke-width: 2; }
.note { color: var(--s1); } dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1.5rem; }
"""


def html_report(
    conditions: dict[str, str], runs: Sequence[Summary], records: Sequence[Sequence[Record]]
) -> str:
    """The page. `records` has those of each run; they are drawn where there is one run."""
    charts = _curves(runs) if len(runs) > 1 else _distributions(records[0])
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in conditions.items())
    remarks = "".join(
        f'<p class="note">{escape(f"{run.load}: {sentence}")}</p>'
        for run in runs
        for sentence in notes(run)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>shoal bench</title><style>{_STYLE}</style></head><body>"
        f"<h1>shoal bench</h1><dl>{facts}</dl>{remarks}"
        f'<div class="charts">{"".join(charts)}</div>{_table(runs)}</body></html>\n'
    )


def _curves(runs: Sequence[Summary]) -> list[str]:
    """Latency against throughput, and throughput against what was offered."""
    charts = [
        chart(
            f"{TITLES[name]} against throughput",
            "output tokens a second",
            "milliseconds",
            [_percentile(runs, name, percent) for percent in (50, 90, 99)],
        )
        for name in ("ttft", "tpot", "e2el")
    ]
    at_rates = all(run.load.rate is not None for run in runs)
    if at_rates:  # what was sent all at once has no place on their axis
        runs = [run for run in runs if run.load.rate != math.inf]
    offered: Callable[[Summary], float] = (
        (lambda run: run.load.rate or 0.0) if at_rates else lambda run: run.load.concurrency or 0
    )
    title = "requests a second, asked" if at_rates else "requests at once"
    lines = [Series("throughput", [(offered(run), run.request_throughput) for run in runs])]
    if all(run.goodput is not None for run in runs):
        lines.append(Series("goodput", [(offered(run), run.goodput or 0.0) for run in runs]))
    step = 0.0 if at_rates else 1.0
    charts.append(chart("Requests answered", title, "requests a second", lines, x_step=step))
    tokens = [(offered(run), run.output_throughput) for run in runs]
    charts.append(
        chart(
            "Output tokens",
            title,
            "tokens a second",
            [Series("output tokens", tokens)],
            x_step=step,
        )
    )
    return charts


def _percentile(runs: Sequence[Summary], name: str, percent: float) -> Series:
    points = [
        (run.output_throughput, spread.percentiles[percent] * 1000)
        for run in runs
        if (spread := run.metrics.get(name)) is not None
    ]
    return Series(f"p{percent:g}", points)


def _distributions(records: Sequence[Record]) -> list[str]:
    """How the latencies of one run are spread, and how they went over its time."""
    whole = [record for record in records if not record.error]
    values = {
        "ttft": [record.ttft for record in whole if record.ttft is not None],
        "itl": [gap for record in whole for gap in record.gaps],
        "e2el": [record.e2el for record in whole],
    }
    charts = [
        chart(TITLES[name], "milliseconds", "% of them at or below", [_cdf(name, found)])
        for name, found in values.items()
        if found
    ]
    times = sorted(
        (record.sent_at, record.ttft * 1000) for record in whole if record.ttft is not None
    )
    charts.append(
        chart("TTFT over the run", "second it was sent", "milliseconds", [Series("ttft", times)])
    )
    return charts


def _cdf(name: str, values: Sequence[float]) -> Series:
    percents = np.linspace(0, 100, min(_CDF_POINTS, max(2, len(values))))
    found = np.percentile(np.asarray(values) * 1000, percents)
    return Series(name, list(zip(map(float, found), map(float, percents), strict=True)))


def _table(runs: Sequence[Summary]) -> str:
    """One line for each run; the percentiles of a metric stand under its name."""
    names = [name for name in TITLES if any(name in run.metrics for run in runs)]
    goodput = any(run.goodput is not None for run in runs)
    counts = ["load", "completed", "failed", "requests/s", "output tokens/s"]
    counts += ["goodput"] if goodput else []
    rows = []
    for run in runs:
        cells = [
            str(run.load),
            f"{run.completed:,}",
            f"{run.failed:,}",
            f"{run.request_throughput:.2f}",
            f"{run.output_throughput:,.1f}",
        ]
        if goodput:
            cells.append("-" if run.goodput is None else f"{run.goodput:.2f}")
        for name in names:
            spread = run.metrics.get(name)
            found = spread.percentiles if spread else {}
            cells += [f"{found[p] * 1000:,.1f}" if p in found else "-" for p in _PERCENTS]
        rows.append(_cells("td", cells))
    heads = "".join(f'<th rowspan="2">{escape(text)}</th>' for text in counts)
    groups = "".join(
        f'<th colspan="{len(_PERCENTS)}" title="{escape(TITLES[name])}">{_SHORT[name]}, ms</th>'
        for name in names
    )
    percents = _cells("th", [f"p{percent:g}" for percent in _PERCENTS] * len(names))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="table" tabindex="0"><table><tr>{heads}{groups}</tr>'
        f"<tr>{percents}</tr>{body}</table></div>"
    )


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
