"""Tokens a second through a whole fleet with the fake engine: what everything but the model costs.

    python -m bench.fleet --streams 64 --max-tokens 256

Every token crosses worker, gateway, detokenizer and the HTTP socket; a fake engine makes
them in no time, so the figure is the fleet's own ceiling on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass

import httpx

from services.common import logs, process
from services.common.config import option, parse
from services.fleet.config import FleetConfig
from services.fleet.display import open_display
from services.fleet.local import LocalFleet


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    streams: int = option(64, "requests in flight at once")
    requests: int = option(256, "requests in all")
    max_tokens: int = option(128, "tokens a request")
    prompt_tokens: int = option(64, "tokens a prompt")
    step_ms: float = option(0.0, "how long a step of the fake engine takes, in milliseconds")
    workers: int = option(1, "worker processes")
    tokenizers: int = option(1, "tokenizer processes")
    detokenizers: int = option(1, "detokenizer processes; 0: the gateway decodes")


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: seconds to its first text, seconds in all, tokens as the usage counts them."""

    first: float
    total: float
    tokens: int


async def measure(config: BenchConfig) -> tuple[list[Timing], float]:
    """Starts a fleet, sends every request and stops the fleet; the seconds that sending took."""
    fleet_config = FleetConfig(
        engine="fake",
        model="byte",
        port=0,
        grpc_port=-1,
        fake_step_ms=config.step_ms,
        workers=config.workers,
        tokenizers=config.tokenizers,
        detokenizers=config.detokenizers,
        log_level="warning",
    )
    logs.setup("bench", level="warning")
    limits = httpx.Limits(max_connections=config.streams)
    async with (
        LocalFleet(fleet_config, open_display()) as fleet,
        httpx.AsyncClient(base_url=fleet.url, limits=limits, timeout=None) as client,
    ):
        await _one(client, config, 0)  # warm every connection's path
        gate = asyncio.Semaphore(config.streams)

        async def limited(index: int) -> Timing:
            async with gate:
                return await _one(client, config, index)

        start = time.perf_counter()
        timings = await asyncio.gather(*(limited(index) for index in range(config.requests)))
        return timings, time.perf_counter() - start


async def _one(client: httpx.AsyncClient, config: BenchConfig, index: int) -> Timing:
    body = {
        "prompt": f"{index:08d}".ljust(config.prompt_tokens, "x"),
        "max_tokens": config.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first, tokens = 0.0, 0
    async with client.stream("POST", "/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - start
            if '"usage":{' in line:
                tokens = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
    return Timing(first, time.perf_counter() - start, tokens)


def report(config: BenchConfig, timings: list[Timing], seconds: float) -> str:
    """The figures, and what they were measured with."""
    firsts = sorted(timing.first for timing in timings)
    tokens = sum(timing.tokens for timing in timings)
    shape = f"{config.workers} workers, {config.tokenizers} tokenizers, "
    shape += f"{config.detokenizers} detokenizers, {os.cpu_count()} cores"
    return (
        f"{shape}\n"
        f"{len(timings)} requests, {config.streams} at once, {config.max_tokens} tokens each,"
        f" engine step {config.step_ms:g} ms\n"
        f"{tokens / seconds:,.0f} tokens/s, {len(timings) / seconds:,.1f} requests/s,"
        f" first text p50 {firsts[len(firsts) // 2] * 1000:.1f} ms,"
        f" p99 {firsts[len(firsts) * 99 // 100] * 1000:.1f} ms"
    )


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(BenchConfig, argv, prog="bench.fleet", description=__doc__ or "")

    async def run(stop: asyncio.Event) -> None:
        work = asyncio.create_task(measure(config))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return
        print(report(config, *work.result()))

    process.run(run)


if __name__ == "__main__":
    main(sys.argv[1:])
