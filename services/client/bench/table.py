"""What a person sees of a run: a progress bar while it goes on, a table after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from services.client.bench.record import Record
from services.client.bench.runner import OnRecord
from services.client.bench.summary import TITLES, Spread, Summary


@contextmanager
def progress_bar(console: Console, total: int, *, enabled: bool) -> Iterator[OnRecord]:
    """A bar that each record moves; nothing where stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    shown = enabled and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("requests", total=total, note="")
        failed = tokens = 0

        def on_record(record: Record) -> None:
            nonlocal failed, tokens
            failed += bool(record.error)
            tokens += record.output_tokens
            note = f"{tokens:,} tokens" + (f", {failed} failed" if failed else "")
            progress.update(task, advance=1, note=note)

        yield on_record


def print_summary(console: Console, summary: Summary) -> None:
    """The whole table of one run."""
    console.print(Text(f"Load: {summary.load}", style="bold"))
    for name, value in _counts(summary):
        console.print(f"{name:<30}{value}", highlight=False)
    console.print(_latencies(summary))
    for sentence in notes(summary):
        console.print(Text(sentence, style="yellow"), soft_wrap=True)


def print_sweep(console: Console, runs: Sequence[Summary]) -> None:
    """One line for each run of a sweep."""
    table = Table(title=None, box=None, pad_edge=False, header_style="bold")
    titles = ("load", "req/s", "tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "failed", "goodput")
    for title in titles:
        table.add_column(title, justify="left" if title == "load" else "right", no_wrap=True)
    for run in runs:
        ttft, tpot = run.metrics.get("ttft"), run.metrics.get("tpot")
        table.add_row(
            str(run.load),
            f"{run.request_throughput:.2f}",
            f"{run.output_throughput:,.0f}",
            *(_at(spread, percent) for spread in (ttft, tpot) for percent in (50, 99)),
            str(run.failed),
            "-" if run.goodput is None else f"{run.goodput:.2f}",
        )
    console.print(table)
    console.print("Times in milliseconds, from sending.")


def notes(summary: Summary) -> list[str]:
    """What must be known to read the figures."""
    found = list(summary.faults_of_the_client)
    for kind, count in summary.errors.items():
        found.append(f"{count} failed, {kind}: {summary.examples[kind]}")
    if summary.unfinished or (summary.stopped and summary.not_sent):
        found.append(
            f"Stopped early: {summary.unfinished} requests were in flight, {summary.not_sent}"
            " not sent."
        )
    elif summary.not_sent:
        found.append(
            f"{summary.not_sent} requests were not sent: an earlier turn of theirs failed."
        )
    if summary.tokens_from != "usage":
        found.append(
            "The server told no token counts for some answers: each event with text counts as"
            " one token there."
        )
    return found


def _counts(summary: Summary) -> list[tuple[str, str]]:
    total = summary.input_tokens + summary.output_tokens
    rows = [
        ("Duration", f"{summary.duration:.2f} s"),
        ("Requests completed / failed", f"{summary.completed:,} / {summary.failed:,}"),
        ("Input / output tokens", f"{summary.input_tokens:,} / {summary.output_tokens:,}"),
        ("Request throughput", f"{summary.request_throughput:.2f} requests/s"),
        ("Output token throughput", f"{summary.output_throughput:,.1f} tokens/s"),
        ("Total token throughput", f"{summary.per_second(total):,.1f} tokens/s"),
    ]
    if summary.cached_tokens is not None and summary.input_tokens:
        share = summary.cached_tokens / summary.input_tokens
        rows.append(("Input tokens from the cache", f"{summary.cached_tokens:,} ({share:.0%})"))
    if summary.offered is not None:
        rows.append(("Offered rate", f"{summary.offered:.2f} requests/s"))
    if summary.goodput is not None:
        rows.append(("Goodput", f"{summary.goodput:.2f} requests/s ({summary.good} kept the SLOs)"))
    if summary.late is not None:
        rows.append(("Client late, p99", f"{summary.late.percentiles[99] * 1000:.2f} ms"))
    rows.append(("Client's share of a core", f"{summary.client_share:.0%}"))
    return rows


def _latencies(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("milliseconds")
    percents = [percent for spread in summary.metrics.values() for percent in spread.percentiles]
    shown = list(dict.fromkeys(percents))
    for title in ("mean", *("median" if percent == 50 else f"p{percent:g}" for percent in shown)):
        table.add_column(title, justify="right")
    for name, spread in summary.metrics.items():
        table.add_row(
            TITLES[name],
            f"{spread.mean * 1000:,.2f}",
            *(_at(spread, percent) for percent in shown),
        )
    return table


def _at(spread: Spread | None, percent: float) -> str:
    value = spread.percentiles.get(percent) if spread else None
    return "-" if value is None else f"{value * 1000:,.2f}"
