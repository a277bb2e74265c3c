"""`shoal bench`: measures, prints a table, writes what was asked for."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from services.client.bench.config import BenchConfig
from services.client.bench.measure import Results, conditions, measure
from services.client.bench.report import html_report
from services.client.bench.self_test import self_test
from services.client.bench.table import print_summary, print_sweep
from services.common import process
from services.common.config import parse
from services.common.errors import StartupError

_INTERRUPTED = 130
_PIPE_WIDTH = 120


def main(argv: Sequence[str]) -> NoReturn:
    """Exits 0; 1 if nothing could be measured; 130 after Ctrl-C, with what there was by then."""
    config = parse(
        BenchConfig,
        argv,
        prog="shoal bench",
        description="Puts load on a server of the OpenAI API and measures what a client sees.",
    )
    process.run(lambda stop: _bench(config, stop))


async def _bench(config: BenchConfig, stop: asyncio.Event) -> int:
    if config.self_test:
        for events in (1, 32):
            print(await self_test(events_a_read=events), flush=True)
        return 0
    _check_outputs(config)
    process.raise_file_limit()
    results = Results()
    work = asyncio.create_task(measure(config, results, stop, Console(stderr=True)))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not results.measuring:
        work.cancel()  # what it waits for may never come, and there is nothing to show
    await asyncio.gather(work, return_exceptions=True)
    if not work.cancelled() and (error := work.exception()) is not None:
        raise error
    _show(results)
    _write(config, results)
    if stop.is_set():
        return _INTERRUPTED
    return 0 if any(run.completed for run in results.runs) else 1


def _show(results: Results) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for run in results.runs:
        print_summary(console, run)
        console.print()
    if len(results.runs) > 1:
        print_sweep(console, results.runs)


def _write(config: BenchConfig, results: Results) -> None:
    facts = conditions(config, results.model)
    if config.output_json:
        runs = [run.as_json() for run in results.runs]
        value = {"conditions": facts, **(runs[0] if len(runs) == 1 else {"runs": runs})}
        Path(config.output_json).write_text(json.dumps(value, indent=2) + "\n")
    if config.output_jsonl:
        lines = [
            json.dumps({"load": str(run.load), **record.as_json()}) + "\n"
            for run, records in zip(results.runs, results.records, strict=True)
            for record in records
        ]
        Path(config.output_jsonl).write_text("".join(lines))
    if config.report and results.runs:
        Path(config.report).write_text(html_report(facts, results.runs, results.records))


def _check_outputs(config: BenchConfig) -> None:
    """Raises StartupError now rather than lose a long run's figures at its end."""
    for path in (config.output_json, config.output_jsonl, config.report):
        if path and not Path(path).absolute().parent.is_dir():
            raise StartupError(f"cannot write {path}: there is no such directory")


if __name__ == "__main__":
    main(sys.argv[1:])
