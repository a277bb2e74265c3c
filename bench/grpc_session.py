"""One stream for many requests against a call each: the same work by Session and by Generate.

    python -m bench.grpc_session --requests 2000 --streams 64

Both run against one fleet with the fake engine, by turns, so that the ratio says something even
on a machine that others use too. CPU time is that of the gateway.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio
import psutil

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from services.common import logs
from services.common.config import option, parse
from services.fleet.config import FleetConfig
from services.fleet.display import open_display
from services.fleet.local import LocalFleet


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    streams: int = option(64, "requests in flight at once")
    requests: int = option(1024, "requests of one turn")
    max_tokens: int = option(32, "tokens a request")
    turns: int = option(3, "times each way is measured")
    step_ms: float = option(0.0, "how long a step of the fake engine takes, in milliseconds")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took, in seconds."""

    wall: float
    gateway_cpu: float


def request(config: BenchConfig, number: int) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=config.max_tokens, ignore_eos=True)
    options = inference_pb2.GenerationOptions(sampling=sampling)
    return inference_pb2.GenerateRequest(text=f"Request {number:06}", options=options)


async def by_calls(stub: inference_pb2_grpc.InferenceAsyncStub, config: BenchConfig) -> int:
    """A Generate call for each request, `streams` at once; returns the tokens received."""
    numbers = iter(range(config.requests))
    tokens = 0

    async def client() -> None:
        nonlocal tokens
        for number in numbers:
            async for answer in stub.Generate(request(config, number)):
                tokens += sum(len(piece.token_ids) for piece in answer.pieces)

    await asyncio.gather(*(client() for _ in range(config.streams)))
    return tokens


async def by_session(stub: inference_pb2_grpc.InferenceAsyncStub, config: BenchConfig) -> int:
    """The same on one stream: a request starts when another ends."""
    call = stub.Session()  # type: ignore[call-arg]  # it is written to

    def starts(first: int, count: int) -> inference_pb2.SessionRequest:
        numbers = range(first, min(first + count, config.requests))
        return inference_pb2.SessionRequest(
            starts=[
                inference_pb2.SessionStart(id=number, generate=request(config, number))
                for number in numbers
            ]
        )

    await call.write(starts(0, config.streams))
    begun, ended, tokens = config.streams, 0, 0
    while ended < config.requests:
        response = await call.read()
        assert isinstance(response, inference_pb2.SessionResponse), "the session ended"
        over = 0
        for update in response.updates:
            tokens += sum(len(piece.token_ids) for piece in update.pieces)
            over += update.WhichOneof("end") is not None
        ended += over
        if over and begun < config.requests:
            await call.write(starts(begun, over))
            begun += over
    await call.done_writing()
    return tokens


async def measure(config: BenchConfig) -> dict[str, list[Turn]]:
    """Both ways by turns, after one of each to warm the path."""
    fleet_config = FleetConfig(
        engine="fake",
        model="byte",
        port=0,
        grpc_port=0,
        fake_step_ms=config.step_ms,
        log_level="warning",
    )
    logs.setup("bench", level="warning")
    ways: dict[
        str, Callable[[inference_pb2_grpc.InferenceAsyncStub, BenchConfig], Awaitable[int]]
    ] = {
        "Generate": by_calls,
        "Session": by_session,
    }
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    async with LocalFleet(fleet_config, open_display()) as fleet:
        listed = json.loads((fleet.run_dir / "fleet.json").read_text())["processes"]
        (gateway,) = [entry for entry in listed if entry["role"] == "gateway"]
        process = psutil.Process(gateway["pid"])
        async with grpc.aio.insecure_channel(gateway["address"]) as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            for turn in range(config.turns + 1):
                for name, way in ways.items():
                    cpu, start = sum(process.cpu_times()[:2]), time.perf_counter()
                    tokens = await way(stub, config)
                    wall = time.perf_counter() - start
                    assert tokens == config.requests * config.max_tokens, f"{name}: {tokens}"
                    if turn:
                        used = sum(process.cpu_times()[:2]) - cpu
                        turns[name].append(Turn(wall, used))
    return turns


def report(config: BenchConfig, turns: dict[str, list[Turn]]) -> None:
    tokens = config.requests * config.max_tokens
    best = {name: min(turns[name], key=lambda turn: turn.gateway_cpu) for name in turns}
    print(f"{config.requests} requests of {config.max_tokens} tokens, {config.streams} at once")
    for name, turn in best.items():
        print(
            f"{name:9} {config.requests / turn.wall:8,.0f} requests/s {tokens / turn.wall:10,.0f}"
            f" tokens/s {turn.gateway_cpu / tokens * 1e6:6.1f} us of gateway CPU a token"
        )
    calls, session = best["Generate"], best["Session"]
    print(
        f"ratio: {calls.wall / session.wall:.1f} in rate,"
        f" {calls.gateway_cpu / session.gateway_cpu:.1f} in gateway CPU"
    )


def main(argv: list[str]) -> None:
    config = parse(BenchConfig, argv, prog="bench.grpc_session", description=__doc__ or "")
    report(config, asyncio.run(measure(config)))


if __name__ == "__main__":
    main(sys.argv[1:])
