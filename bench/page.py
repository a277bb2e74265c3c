"""Puts what the benchmarks wrote with --json into docs/benchmarks.md: tables and pictures.

    python -m bench.page build/figures

For each `<!-- figures: NAME -->` of the page whose NAME.json is in the directory, what stands from
there to `<!-- end -->` is made anew, and its pictures are drawn beside the page. The rest of the
page, and figures that were not measured again, stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from bench import bars, figures, plots
from bench.figures import Rounds
from bench.plots import Report

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_BLOCK = re.compile(r"<!-- figures: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
_ALTERNATIVES = {
    "wire-flood": "Bars: events a second and CPU time a token by streams and system",
    "wire-latency": "Bars: added latency by streams and system",
    "growth": "A line: the gateway's CPU time a token from one stream to thousands",
    "encode": "Tokens encoded a second by threads and processes; short prompts beside a long one",
    "bookkeeping": "Two lines: the scheduler's step by requests, a match by cached prefixes",
    "engine-peers": "Bars: tokens a second by load and engine",
    "default-fleet": "Lines: throughput and latency by requests at once",
}
# Measures of the wire that are shown; the rest is in its file.
_WIRE = (
    *("tokens/s, 1", "events/s, 1", "events/s, 64", "events/s, 256"),
    *("CPU us a token, 1", "CPU us a token, 64", "CPU us a token, 256"),
    *("CPU us a token of client, 256", "CPU us a token of gateway, 256"),
    *("added p50 ms, 1", "added p99 ms, 1", "added p50 ms, 64", "added p99 ms, 64"),
    *("added p50 ms, 256", "added p99 ms, 256", "short requests/s"),
)


def fill(page: Path, directory: Path) -> list[str]:
    """Renews the page and its pictures; the names of the benchmarks that were renewed."""
    renewed: list[str] = []

    def block(match: re.Match[str]) -> str:
        source = directory / f"{match[1]}.json"
        if not source.exists():
            return match[0]
        renewed.append(match[1])
        text = _block({"bench": match[1], **json.loads(source.read_text())}, source, page)
        return f"<!-- figures: {match[1]} -->\n{text}\n<!-- end -->"

    page.write_text(_BLOCK.sub(block, page.read_text()))
    return renewed


def _block(report: Report, source: Path, page: Path) -> str:
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    parts = []
    for picture in plots.draw(report, images):
        text = _ALTERNATIVES[picture.stem.removeprefix("bench-")]
        parts.append(f"![{text}]({picture.relative_to(page.parent)})")
    parts += _tables(report)
    if (whole := source.with_suffix(".html")).exists():  # of `shoal bench`
        copy = images / f"bench-{whole.name}"
        copy.write_text(whole.read_text())
        parts.append(f"[The report of one run]({copy.relative_to(page.parent)})")
    return "\n\n".join([*parts, f"*{plots.caption(report)}.*"])


def _tables(report: Report) -> list[str]:
    if report["bench"] == "engine_peers":
        return _engine_peers(report)
    rounds = Rounds.from_json(report["rounds"])
    if report["bench"] == "wire":
        return [figures.medians(rounds, _WIRE), *filter(None, [bars.table(rounds)])]
    if report["bench"] == "roofline":
        return [figures.medians(rounds), bars.limit_table(rounds)]
    return [figures.table(rounds)]


def _engine_peers(report: Report) -> list[str]:
    """Tokens a second, a row a peer, and the aims; its file is by clock, peer and load."""
    rounds = Rounds()
    for name, row in report["figures"]["seconds"].items():
        for load, values in row.items():
            for value in values:
                rounds.add(name, load, value)
    lines = [
        (name, [figures.cell(rounds, name, load) for load in rounds.measures])
        for name in rounds.systems
    ]
    table = figures.rows("tokens a second", rounds.measures, lines)
    return [table, bars.engine_table(rounds)]


def main() -> None:
    """Renews the page, and says what of it."""
    parser = argparse.ArgumentParser(prog="bench.page", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the files of --json are")
    renewed = fill(PAGE, parser.parse_args().directory)
    print(f"{PAGE}: {', '.join(renewed) or 'nothing'} renewed")


if __name__ == "__main__":
    main()
