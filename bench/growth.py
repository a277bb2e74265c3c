"""How the gateway's cost grows: CPU a token from one stream to thousands, memory of what waits.

    python -m bench.growth --rounds 3

The real gateway, tokenizer and detokenizer over a stub worker that emits a token for every stream
in every step (`bench/peers`). CPU time is that of the gateway's process alone, so the figures hold
on a machine that others use too. An idle stream has been accepted by a worker and gets nothing. A
queued request waits in the gateway for a worker with room; both memories have the client's
connection in them.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import figures
from bench.figures import Rounds
from bench.peers.model_dir import write_model
from bench.peers.steps import HELD
from bench.peers.systems import Running, Shoal, Site, chat_body
from bench.peers.wire import flood
from services.client.connection import Pool
from services.common.config import option, parse
from services.gateway.config import GatewayConfig

_TOKENS = 16384  # of all streams together
_LEAST_TOKENS = 128  # of each, lest beginnings be measured
_PATIENCE = 120.0
_SMALL = 2  # requests that a worker with little room runs; the gateway sends it one more to wait
_QUEUE = GatewayConfig.admission_queue  # of the gateway that is started
_NEVER = 1 << 19  # tokens of a paced stream that is not to end
_PACED = 0.001  # see bench/peers/steps.py
_PROMPTS = {"a short prompt": 0, "a prompt of 1,000 words": 1000}  # words before its number
_HANDLES = 'shoal_gateway_handles{peer="worker"}'
_QUEUED = "shoal_gateway_requests_queued"

Measure = Callable[["GrowthConfig", str, Running, Rounds], Awaitable[None]]


@dataclass(frozen=True)
class GrowthConfig:
    """How far, and how often."""

    streams: tuple[str, ...] = option(
        ("1", "16", "64", "256", "1024", "2000"), "streams at once", metavar="N,..."
    )
    idle_streams: int = option(1000, "idle streams, and queued requests, whose memory is measured")
    rounds: int = option(3, "fleets that are measured one after the other")
    detokenizers: int = option(1, "0: the gateway decodes")
    json: str = option("", "file for the figures; default: none")

    def __post_init__(self) -> None:
        if not 1 <= self.idle_streams <= _QUEUE:
            raise ValueError(f"--idle-streams must be from 1 to {_QUEUE}, as many as may queue")


async def measure(config: GrowthConfig, rounds: Rounds) -> None:
    """Adds the figures of a fleet for the streams, and of one for each kind of queued request."""
    with tempfile.TemporaryDirectory(prefix="growth-") as directory:
        model = Path(directory) / "model"
        model.mkdir()
        token_ids = write_model(model)
        shoal = Shoal(detokenizer=config.detokenizers > 0)
        full = Shoal(detokenizer=config.detokenizers > 0, max_running=_SMALL)
        fleets: list[tuple[Shoal, Measure]] = [(shoal, _streams)]
        fleets += [(full, partial(_queued, prompt)) for prompt in _PROMPTS]
        for number in range(config.rounds):
            for index, (system, measure_one) in enumerate(fleets):
                home = Path(directory) / f"{number}-{index}"
                home.mkdir()
                async with system.run(Site(home, model, token_ids)) as running:
                    await measure_one(config, shoal.name, running, rounds)


async def _streams(config: GrowthConfig, name: str, running: Running, rounds: Rounds) -> None:
    await flood(running, 1, _LEAST_TOKENS)  # what is loaded at the first request is no stream's
    idle = [chat_body(f"{number} waits", 8, HELD) for number in range(config.idle_streams)]
    held = await _memory(running, idle, _HANDLES, config.idle_streams)
    rounds.add(name, "gateway, KiB an idle stream", held)
    for streams in map(int, config.streams):
        tokens = max(_TOKENS // streams, _LEAST_TOKENS) if streams > 1 else 1024
        flooded = await flood(running, streams, tokens)
        spent = flooded["CPU us a token of gateway"]
        rounds.add(name, f"gateway, CPU us a token, {streams}", spent)


async def _queued(
    prompt: str, config: GrowthConfig, name: str, running: Running, rounds: Rounds
) -> None:
    """The memory of requests of one kind that wait while the only worker is full.

    Each kind has a gateway of its own: what one leaves behind would be room for the next.
    """
    busy = [chat_body(f"{number} runs", _NEVER, _PACED) for number in range(_SMALL + 1)]
    text = "word " * _PROMPTS[prompt]
    waiting = [chat_body(f"{text}{number}", 8) for number in range(config.idle_streams)]
    async with _posted(running, busy):
        await _until(running, _HANDLES, len(busy))
        held = await _memory(running, waiting, _QUEUED, config.idle_streams)
        rounds.add(name, f"gateway, KiB a queued request with {prompt}", held)


async def _memory(running: Running, bodies: list[bytes], gauge: str, wanted: int) -> float:
    """KiB of resident memory that a request holds in the gateway once `gauge` shows them all."""
    gateway = running.processes["gateway"]
    before = gateway.memory_info().rss
    async with _posted(running, bodies):
        await _until(running, gauge, wanted)
        return float(gateway.memory_info().rss - before) / len(bodies) / 1024


@asynccontextmanager
async def _posted(running: Running, bodies: list[bytes]) -> AsyncIterator[None]:
    """Requests that are in flight inside, and given up at the end."""
    pool = Pool(running.origin)
    posts = [
        asyncio.create_task(pool.post("/v1/chat/completions", body, timeout=_PATIENCE))
        for body in bodies
    ]
    try:
        yield
    finally:
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        pool.close()


async def _until(running: Running, gauge: str, wanted: int) -> None:
    """Polls the gateway's metrics: another process's state can only be asked for."""
    line = f"\n{gauge} {wanted:.1f}\n"
    url = f"http://{running.origin.host}:{running.origin.port}/metrics"
    async with asyncio.timeout(_PATIENCE):
        while line not in await asyncio.to_thread(_get, url):  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: bytes = answer.read()
        return text.decode()


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(GrowthConfig, argv, prog="bench.growth", description=__doc__ or "")
    figures.run("growth", config, lambda rounds: measure(config, rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
