"""Shoal's wire and gateway against their peers': one machine, one client, the same tokens, one run.

    python -m bench.peers.wire --mini-sglang CHECKOUT --mini-python PYTHON --smg-python PYTHON

Behind each system stands a stub worker that computes nothing. Three things are measured, in rounds
in which the systems take turns: a flood (events a second, CPU time a token over all processes, the
client's too), streams paced at 50 tokens a second (how much later a token arrives than it was sent)
and short requests (of about 16 tokens with one output token). An event is one that brings text:
what is merged counts once. bench/README.md tells how to install the peers.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import bars, figures
from bench.figures import Rounds
from bench.peers.model_dir import write_model
from bench.peers.systems import MiniSglang, Running, Shoal, Site, Smg, System, chat_body
from services.client.answer import Answer
from services.client.connection import Pool
from services.common.config import option, parse

_PATH = "/v1/chat/completions"
_SHORT_PROMPT = "one two three four five six"  # with the template about 16 more tokens
_PACED_TOKENS = 100
_SKIPPED_TOKENS = 10  # of each paced stream, until all have begun
_FLOODED_TOKENS = 2048  # of one stream; more streams share eight times as many, but each has
_LEAST_FLOODED_TOKENS = 128  # at least so many, lest beginnings be measured
_PATIENCE = 120.0


@dataclass(frozen=True)
class WireConfig:
    """Who is measured, and how long."""

    mini_sglang: str = option("", "a checkout of Mini-SGLang; empty leaves it out", metavar="PATH")
    mini_python: str = option("", "an interpreter with what it needs", metavar="PATH")
    smg_python: str = option("", "an interpreter beside smg; empty leaves it out", metavar="PATH")
    without_shoal: bool = option(False, "measure the peers alone")
    rounds: int = option(3, "rounds in which each system has its turn")
    streams: tuple[str, ...] = option(("1", "64", "256"), "streams at once")
    short_requests: int = option(1024, "short requests, 64 at once")
    scale: float = option(1.0, "share of the flood's tokens, for a quick look")
    json: str = option("", "file for the figures", metavar="PATH")


async def measure(config: WireConfig, rounds: Rounds) -> None:
    """Adds every figure to `rounds`, round by round."""
    systems = _systems(config)
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        model = Path(directory) / "model"
        model.mkdir()
        token_ids = write_model(model)
        for number in range(config.rounds):
            for system in systems:
                home = Path(directory) / f"{number}-{systems.index(system)}"
                home.mkdir()
                site = Site(home, model, token_ids)
                async with system.run(site) as running:
                    await _one_system(config, system.name, site, running, rounds)
                print(f"round {number + 1}: {system.name}", file=sys.stderr, flush=True)


def _systems(config: WireConfig) -> list[System]:
    systems: list[System] = []
    if not config.without_shoal:
        systems += [Shoal(), Shoal(detokenizer=False)]
    if config.mini_sglang:
        python = config.mini_python or sys.executable
        systems.append(MiniSglang(Path(config.mini_sglang).resolve(), python))
    if config.smg_python:
        systems.append(Smg(config.smg_python))
    return systems


async def _one_system(
    config: WireConfig, name: str, site: Site, running: Running, rounds: Rounds
) -> None:
    for streams in map(int, config.streams):
        each = _FLOODED_TOKENS * (1 if streams == 1 else 8) / streams
        tokens = max(int(max(each, _LEAST_FLOODED_TOKENS) * config.scale), 1)
        flooded = await flood(running, streams, tokens)
        for measure, value in flooded.items():
            rounds.add(name, f"{measure}, {streams}", value)
        latencies = await _paced(site, running, streams)
        if latencies:
            rounds.add(name, f"added p50 ms, {streams}", _share(latencies, 0.5) * 1000)
            rounds.add(name, f"added p99 ms, {streams}", _share(latencies, 0.99) * 1000)
    rounds.add(name, "short requests/s", await _short(running, config.short_requests))


async def flood(running: Running, streams: int, tokens: int) -> dict[str, float]:
    """Every stream as fast as it comes: events and tokens a second, CPU time by role."""
    pool = Pool(running.origin)
    try:
        await _all(pool, [chat_body("warm", 2)] * streams)
        before, start = running.cpu(), time.perf_counter()
        bodies = [chat_body(f"{number} and so on", tokens) for number in range(streams)]
        answers = await _all(pool, bodies)
        seconds, after = time.perf_counter() - start, running.cpu()
    finally:
        pool.close()
    total = streams * tokens
    each = {role: (after[role] - before[role]) / total * 1e6 for role in after}
    return {
        "events/s": sum(len(answer.arrivals) for answer in answers) / seconds,
        "tokens/s": total / seconds,
        "CPU us a token": sum(each.values()),
        **{f"CPU us a token of {role}": spent for role, spent in each.items()},
    }


async def _paced(site: Site, running: Running, streams: int) -> list[float]:
    """Seconds from the stub's step to the client, of streams of which every token was an event."""
    site.report.unlink(missing_ok=True)
    pool = Pool(running.origin, time.monotonic)
    bodies = [
        chat_body(f"{number} and so on", _PACED_TOKENS, number / 1000)
        for number in range(1, streams + 1)
    ]
    try:
        answers = await _all(pool, bodies)
    finally:
        pool.close()
    sent = await _sent(site.report, streams)
    return [
        arrived - left
        for number, answer in enumerate(answers, 1)
        if len(answer.arrivals) == _PACED_TOKENS
        for arrived, left in list(zip(answer.arrivals, sent[str(number)], strict=True))[
            _SKIPPED_TOKENS:
        ]
    ]


async def _sent(report: Path, streams: int) -> dict[str, list[float]]:
    """When the stub sent each stream's tokens; it writes that right after the last."""
    async with asyncio.timeout(_PATIENCE):
        while True:
            sent: dict[str, list[float]] = json.loads(_read(report) or "{}")
            if all(len(sent.get(str(n), ())) == _PACED_TOKENS for n in range(1, streams + 1)):
                return sent
            await asyncio.sleep(0.02)  # the stub has no other way to tell


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def _short(running: Running, requests: int) -> float:
    """Requests a second with a short prompt and one token, 64 at once."""
    pool = Pool(running.origin)
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await pool.post(_PATH, chat_body(f"{number} {_SHORT_PROMPT}", 1), timeout=_PATIENCE)

    try:
        await _all(pool, [chat_body("warm", 1)] * 64)
        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(64)))
        return requests / (time.perf_counter() - start)
    finally:
        pool.close()


async def _all(pool: Pool, bodies: Sequence[bytes]) -> list[Answer]:
    return await asyncio.gather(*(pool.post(_PATH, body, timeout=_PATIENCE) for body in bodies))


def _share(values: Sequence[float], share: float) -> float:
    """The value that this share of all is not above."""
    if share == 0.5:
        return statistics.median(values)
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def main(argv: list[str]) -> None:
    """Measures, and prints medians, spreads and ratios."""
    config = parse(WireConfig, argv, prog="bench.peers.wire", description=__doc__ or "")
    figures.run("wire", config, lambda rounds: measure(config, rounds), bars.table)


if __name__ == "__main__":
    main(sys.argv[1:])
