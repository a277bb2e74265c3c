"""How the gateway's cost grows: CPU a token from one stream to thousands, memory an idle stream.

    python -m bench.growth --rounds 3

The real gateway, tokenizer and detokenizer over a stub worker that emits a token for every stream
in every step (`bench/peers`). CPU time is that of the gateway's process alone, so the figures hold
on a machine that others use too. An idle stream has been accepted and gets nothing.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from bench.peers.model_dir import write_model
from bench.peers.report import Rounds, table
from bench.peers.steps import HELD
from bench.peers.systems import Running, Shoal, Site, chat_body
from bench.peers.wire import flood
from services.client.connection import Pool
from services.common import logs, process
from services.common.config import option, parse

_TOKENS = 16384  # of all streams together
_LEAST_TOKENS = 128  # of each, lest beginnings be measured
_PATIENCE = 120.0


@dataclass(frozen=True)
class GrowthConfig:
    """How far, and how often."""

    streams: tuple[str, ...] = option(
        ("1", "16", "64", "256", "1024", "2000"), "streams at once", metavar="N,..."
    )
    idle_streams: int = option(1000, "idle streams whose memory is measured")
    rounds: int = option(3, "fleets that are measured one after the other")
    detokenizers: int = option(1, "0: the gateway decodes")


async def measure(config: GrowthConfig, rounds: Rounds) -> None:
    """Adds a fleet's figures to `rounds` for each round."""
    with tempfile.TemporaryDirectory(prefix="growth-") as directory:
        model = Path(directory) / "model"
        model.mkdir()
        token_ids = write_model(model)
        for number in range(config.rounds):
            home = Path(directory) / str(number)
            home.mkdir()
            shoal = Shoal(detokenizer=config.detokenizers > 0)
            async with shoal.run(Site(home, model, token_ids)) as running:
                await _one_fleet(config, shoal.name, running, rounds)


async def _one_fleet(config: GrowthConfig, name: str, running: Running, rounds: Rounds) -> None:
    await flood(running, 1, _LEAST_TOKENS)  # what is loaded at the first request is no stream's
    rounds.add(name, "gateway, KiB an idle stream", await _idle(running, config.idle_streams))
    for streams in map(int, config.streams):
        tokens = max(_TOKENS // streams, _LEAST_TOKENS) if streams > 1 else 1024
        figures = await flood(running, streams, tokens)
        spent = figures["CPU us a token of gateway"]
        rounds.add(name, f"gateway, CPU us a token, {streams}", spent)


async def _idle(running: Running, streams: int) -> float:
    """KiB of resident memory that a stream without news holds in the gateway."""
    gateway = running.processes["gateway"]
    pool = Pool(running.origin)
    before = gateway.memory_info().rss
    bodies = [chat_body(f"{number} waits", 8, HELD) for number in range(streams)]
    waiting = [
        asyncio.create_task(pool.post("/v1/chat/completions", body, timeout=_PATIENCE))
        for body in bodies
    ]
    try:
        await _in_flight(running, streams)
        return float(gateway.memory_info().rss - before) / streams / 1024
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        pool.close()


async def _in_flight(running: Running, streams: int) -> None:
    """Polls the gateway's metrics: another process's state can only be asked for."""
    wanted = f'shoal_gateway_handles{{peer="worker"}} {streams:.1f}'
    url = f"http://{running.origin.host}:{running.origin.port}/metrics"
    async with asyncio.timeout(_PATIENCE):
        while wanted not in await asyncio.to_thread(_get, url):  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: bytes = answer.read()
        return text.decode()


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(GrowthConfig, argv, prog="bench.growth", description=__doc__ or "")
    logs.setup("bench", level="warning")
    rounds = Rounds()

    async def run(stop: asyncio.Event) -> int:
        work = asyncio.create_task(measure(config, rounds))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)
        print(table(rounds))
        return 0 if work.cancelled() else (work.result() or 0)

    process.run(run)


if __name__ == "__main__":
    main(sys.argv[1:])
