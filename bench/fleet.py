"""Tokens a second through a whole fleet with the fake engine: what everything but the model costs.

    python -m bench.fleet --streams 64 --max-tokens 256

Every token crosses worker, gateway, detokenizer and the HTTP socket; a fake engine makes
them in no time, so the figure is the fleet's own ceiling on this machine. CPU time is that of
the processes, so it says the same on a machine that others use too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from services.client.answer import Answer
from services.client.connection import Origin, Pool
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
class Result:
    """What one run gave; CPU seconds are by role, with the client's own."""

    answers: Sequence[Answer]
    seconds: float
    cpu: dict[str, float]


async def measure(config: BenchConfig) -> Result:
    """Starts a fleet, sends every request and stops the fleet."""
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
    async with LocalFleet(fleet_config, open_display()) as fleet:
        pool = Pool(Origin.of(fleet.url))
        try:
            await pool.post("/v1/completions", _body(config, 0))  # warm the path
            before = _cpu_seconds(fleet)
            start = time.perf_counter()
            answers = await _send_all(config, pool)
            seconds = time.perf_counter() - start
            after = _cpu_seconds(fleet)
        finally:
            pool.close()
    return Result(answers, seconds, {role: after[role] - before[role] for role in after})


async def _send_all(config: BenchConfig, pool: Pool) -> list[Answer]:
    answers: list[Answer] = []
    numbers = iter(range(1, config.requests + 1))

    async def send() -> None:
        for number in numbers:
            answers.append(await pool.post("/v1/completions", _body(config, number)))

    await asyncio.gather(*(send() for _ in range(config.streams)))
    return answers


def _body(config: BenchConfig, number: int) -> bytes:
    body = {
        "prompt": f"{number:08d}".ljust(config.prompt_tokens, "x"),
        "max_tokens": config.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def _cpu_seconds(fleet: LocalFleet) -> dict[str, float]:
    """CPU seconds so far, by role; a worker's with those of its ranks."""
    seconds: dict[str, float] = {"client": _cpu(psutil.Process())}
    for child in fleet.processes:
        root = psutil.Process(child.pid)
        spent = sum(_cpu(one) for one in [root, *root.children(recursive=True)])
        seconds[child.role] = seconds.get(child.role, 0.0) + spent
    return seconds


def _cpu(one: psutil.Process) -> float:
    times = one.cpu_times()
    return float(times.user + times.system)


def report(config: BenchConfig, result: Result) -> str:
    """The figures, and what they were measured with."""
    firsts = sorted(answer.first_at - answer.sent_at for answer in result.answers)
    tokens = sum(answer.tokens for answer in result.answers)
    events = sum(answer.num_events for answer in result.answers)
    shape = f"{config.workers} workers, {config.tokenizers} tokenizers, "
    shape += f"{config.detokenizers} detokenizers, {os.cpu_count()} cores"
    split = ", ".join(
        f"{role} {spent / tokens * 1e6:.1f}" for role, spent in sorted(result.cpu.items())
    )
    total = sum(result.cpu.values()) / tokens * 1e6
    return (
        f"{shape}\n"
        f"{len(result.answers)} requests, {config.streams} at once,"
        f" {config.max_tokens} tokens each, engine step {config.step_ms:g} ms\n"
        f"{tokens / result.seconds:,.0f} tokens/s, {events / result.seconds:,.0f} events/s,"
        f" {len(result.answers) / result.seconds:,.1f} requests/s,"
        f" first text p50 {firsts[len(firsts) // 2] * 1000:.1f} ms,"
        f" p99 {firsts[len(firsts) * 99 // 100] * 1000:.1f} ms\n"
        f"CPU us a token: {total:.1f} ({split})"
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
        print(report(config, work.result()))

    process.run(run)


if __name__ == "__main__":
    main(sys.argv[1:])
