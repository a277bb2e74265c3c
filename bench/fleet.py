"""Tokens a second through a whole fleet with the fake engine: what everything but the model costs.

    python -m bench.fleet --streams 64 --max-tokens 256

Every token crosses worker, gateway, detokenizer and the HTTP socket; a fake engine makes
them in no time, so the figure is the fleet's own ceiling on this machine. CPU time is that of
the processes, so it says the same on a machine that others use too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass

import psutil

from bench import cpu, figures
from bench.figures import OWN, Rounds
from services.client.answer import Answer
from services.client.connection import Origin, Pool
from services.common.config import option, parse
from services.fleet.config import FleetConfig
from services.fleet.display import open_display
from services.fleet.local import LocalFleet


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    streams: int = option(64, "requests in flight at once")
    requests: int = option(256, "requests of a round")
    max_tokens: int = option(128, "tokens a request")
    prompt_tokens: int = option(64, "tokens a prompt")
    step_ms: float = option(0.0, "how long a step of the fake engine takes, in milliseconds")
    workers: int = option(1, "worker processes")
    tokenizers: int = option(1, "tokenizer processes")
    detokenizers: int = option(1, "detokenizer processes; 0: the gateway decodes")
    gateways: int = option(1, "gateway processes, which share the port")
    rounds: int = option(3, "times it is measured, on one fleet")
    json: str = option("", "file for the figures; default: none")


async def measure(config: BenchConfig, rounds: Rounds) -> None:
    """Starts a fleet, sends every request of each round and stops the fleet."""
    async with LocalFleet(fleet_config(config), open_display()) as fleet:
        pool = Pool(Origin.of(fleet.url))
        try:
            await pool.post("/v1/completions", _body(config, 0))  # warm the path
            for _ in range(config.rounds):
                for name, value in (await load(config, fleet, pool)).items():
                    rounds.add(OWN, name, value)
        finally:
            pool.close()


def fleet_config(config: BenchConfig) -> FleetConfig:
    """The fleet that is measured."""
    return FleetConfig(
        engine="fake",
        model="byte",
        port=0,
        grpc_port=-1,
        fake_step_ms=config.step_ms,
        gateways=config.gateways,
        workers=config.workers,
        tokenizers=config.tokenizers,
        detokenizers=config.detokenizers,
        log_level="warning",
    )


async def load(config: BenchConfig, fleet: LocalFleet, pool: Pool) -> dict[str, float]:
    """The figures of one round."""
    before, start = _cpu_seconds(fleet), time.perf_counter()
    answers = await _send_all(config, pool)
    seconds, after = time.perf_counter() - start, _cpu_seconds(fleet)
    firsts = sorted(answer.first_at - answer.sent_at for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    each = {role: (after[role] - before[role]) / tokens * 1e6 for role in sorted(after)}
    return {
        "tokens/s": tokens / seconds,
        "events/s": sum(answer.num_events for answer in answers) / seconds,
        "requests/s": len(answers) / seconds,
        "first text p50 ms": firsts[len(firsts) // 2] * 1000,
        "first text p99 ms": firsts[len(firsts) * 99 // 100] * 1000,
        "CPU us a token": sum(each.values()),
        **{f"CPU us a token of {role}": spent for role, spent in each.items()},
    }


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
    seconds = {"client": cpu.of_process(psutil.Process())}
    for child in fleet.processes:
        spent = cpu.of_family(psutil.Process(child.pid))
        seconds[child.role] = seconds.get(child.role, 0.0) + spent
    return seconds


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(BenchConfig, argv, prog="bench.fleet", description=__doc__ or "")
    figures.run("fleet", config, lambda rounds: measure(config, rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
