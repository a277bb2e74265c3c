"""Encodes a second with one, two, ... tokenizer processes, each call to the least busy.

    python -m bench.encode --tokenizers 2

Needs a core for each process and one for this client; with fewer the growth it prints
is that of the machine. The CPU time of an encode tells what the growth would be: as long
as it does not rise with the number of processes, another core means as many encodes more.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from dataclasses import dataclass
from pathlib import Path

from protos import tokenizer_pb2
from services.common import process
from services.common.config import option, parse
from services.common.process import child_environment
from services.gateway.discovery import StaticAddresses
from services.gateway.peers.pool import PeerPool
from services.gateway.peers.session import SessionTimes
from services.gateway.peers.tokenizer import TokenizerPeer

_WORDS = ("the", "cat", "and", "her", "old", "friend", "went", "down", "to", "the", "sea")


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    tokenizers: int = option(2, "the most tokenizer processes")
    model: str = option("", "whose tokenizer; default: the embedded model's")
    words: int = option(1500, "words a prompt")
    concurrency: int = option(16, "encodes in flight, for each process")
    seconds: float = option(10.0, "length of each measurement")


@dataclass(frozen=True, slots=True)
class Result:
    """Encodes a second, and milliseconds of CPU an encode, there and in this client."""

    rate: float
    tokenizer_ms: float
    client_ms: float


async def measure(config: BenchConfig, count: int, directory: Path) -> Result:
    """Runs `count` processes under load."""
    addresses = [f"unix:{directory}/{count}-{index}" for index in range(count)]
    children = [await _start(config, address) for address in addresses]
    changed = asyncio.Event()
    pool = PeerPool(
        StaticAddresses(addresses),
        lambda address: TokenizerPeer(address, SessionTimes(), changed.set),
    )
    sessions = asyncio.create_task(pool.run())
    try:
        while len(pool.ready) < count:
            changed.clear()
            await changed.wait()
        await _load(config, pool, count, seconds=1.0)  # warm
        pids = [child.pid for child in children]
        start, there, here = time.perf_counter(), _cpu_seconds(pids), time.process_time()
        done = await _load(config, pool, count, seconds=config.seconds)
        return Result(
            done / (time.perf_counter() - start),
            (_cpu_seconds(pids) - there) / done * 1e3,
            (time.process_time() - here) / done * 1e3,
        )
    finally:
        sessions.cancel()
        await asyncio.gather(sessions, return_exceptions=True)
        for child in children:
            child.terminate()
        await asyncio.gather(*(child.wait() for child in children))


async def _load(
    config: BenchConfig, pool: PeerPool[TokenizerPeer], count: int, *, seconds: float
) -> int:
    """Encodes until the time is over; returns how many were done."""
    rng = random.Random(count)
    texts = [" ".join(rng.choices(_WORDS, k=config.words)) for _ in range(64)]
    start = time.perf_counter()
    done = 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() - start < seconds:
            text = texts[done % len(texts)]
            peer = min(pool.ready, key=lambda peer: peer.outstanding)
            await peer.encode(tokenizer_pb2.EncodeRequest(text=text))
            done += 1

    await asyncio.gather(*(client() for _ in range(config.concurrency * count)))
    return done


def _cpu_seconds(pids: list[int]) -> float:
    """CPU time of some processes' threads, to the nanosecond."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def _start(config: BenchConfig, address: str) -> Process:
    model = [f"--model={config.model}"] if config.model else []
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services", "tokenizer", f"--address={address}"),
        *("--num-threads=1", *model),
        stderr=DEVNULL,
        env={**child_environment(), "HF_HUB_OFFLINE": "1"},
    )


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(BenchConfig, argv, prog="bench.encode", description=__doc__ or "")

    async def run(stop: asyncio.Event) -> None:
        one = 0.0
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory:
            for count in range(1, config.tokenizers + 1):
                result = await measure(config, count, Path(directory))
                one = one or result.rate
                print(
                    f"{count} tokenizers, {config.words} words a prompt, {os.cpu_count()} cores:"
                    f" {result.rate:,.1f} encodes/s, {result.rate / one / count:.2f} of linear;"
                    f" CPU an encode {result.tokenizer_ms:.2f} ms, and"
                    f" {result.client_ms:.2f} ms in the client",
                    flush=True,
                )

    process.run(run)


if __name__ == "__main__":
    main(sys.argv[1:])
