"""One stream for many requests against a call each: the same work by Session and by Generate.

    python -m bench.grpc_session --requests 2000 --streams 64

Both run against one fleet with the fake engine, by turns, so that the ratio says something even
on a machine that others use too. CPU time is that of the gateway.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc.aio
import psutil

from bench import cpu, figures
from bench.figures import Rounds
from protos import common_pb2, inference_pb2, inference_pb2_grpc
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
    rounds: int = option(3, "times each way is measured, in turn")
    step_ms: float = option(0.0, "how long a step of the fake engine takes, in milliseconds")
    json: str = option("", "file for the figures; default: none")


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


async def measure(config: BenchConfig, rounds: Rounds) -> None:
    """Both ways in turn, after one of each to warm the path."""
    fleet_config = FleetConfig(
        engine="fake",
        model="byte",
        port=0,
        grpc_port=0,
        fake_step_ms=config.step_ms,
        log_level="warning",
    )
    async with LocalFleet(fleet_config, open_display()) as fleet:
        (gateway,) = [one for one in fleet.processes if one.role == "gateway"]
        process = psutil.Process(gateway.pid)
        async with grpc.aio.insecure_channel(fleet.grpc_address) as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            for way in WAYS.values():
                await way(stub, config)
            for _ in range(config.rounds):
                for name, way in WAYS.items():
                    await _one(config, name, partial(way, stub, config), process, rounds)


async def _one(
    config: BenchConfig,
    name: str,
    way: Callable[[], Awaitable[int]],
    gateway: psutil.Process,
    rounds: Rounds,
) -> None:
    before, start = cpu.of_process(gateway), time.perf_counter()
    tokens = await way()
    wall, used = time.perf_counter() - start, cpu.of_process(gateway) - before
    assert tokens == config.requests * config.max_tokens, f"{name}: {tokens}"
    rounds.add(name, "requests/s", config.requests / wall)
    rounds.add(name, "tokens/s", tokens / wall)
    rounds.add(name, "gateway, CPU us a token", used / tokens * 1e6)


def ratios(rounds: Rounds) -> str:
    """One stream for all generations against a call for each, which is the question here."""
    heads = ["Session / Generate"]
    each = {name: rounds.ratio("Session", "Generate", name) for name in rounds.measures}
    return "\n" + figures.rows(
        "", heads, [(name, [figures.number(one)]) for name, one in each.items()]
    )


WAYS: dict[str, Callable[[inference_pb2_grpc.InferenceAsyncStub, BenchConfig], Awaitable[int]]] = {
    "Generate": by_calls,
    "Session": by_session,
}


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(BenchConfig, argv, prog="bench.grpc_session", description=__doc__ or "")
    figures.run("grpc_session", config, lambda rounds: measure(config, rounds), ratios)


if __name__ == "__main__":
    main(sys.argv[1:])
