"""Encodes a second with one, two, ... tokenizer processes, each call to the least busy.

    python -m bench.encode --tokenizers 2

Needs a core for each process and one for this client; with fewer the growth it prints
is that of the machine.
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


async def measure(config: BenchConfig, count: int, directory: Path) -> float:
    """Encodes a second with `count` processes."""
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
        return await _load(config, pool, count, seconds=config.seconds)
    finally:
        sessions.cancel()
        await asyncio.gather(sessions, return_exceptions=True)
        for child in children:
            child.terminate()
        await asyncio.gather(*(child.wait() for child in children))


async def _load(
    config: BenchConfig, pool: PeerPool[TokenizerPeer], count: int, *, seconds: float
) -> float:
    rng = random.Random(count)
    start = time.perf_counter()
    done = 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() - start < seconds:
            text = " ".join(rng.choices(_WORDS, k=config.words))
            peer = min(pool.ready, key=lambda peer: peer.outstanding)
            await peer.encode(tokenizer_pb2.EncodeRequest(text=text))
            done += 1

    await asyncio.gather(*(client() for _ in range(config.concurrency * count)))
    return done / (time.perf_counter() - start)


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
                rate = await measure(config, count, Path(directory))
                one = one or rate
                print(
                    f"{count} tokenizers, {config.words} words a prompt, {os.cpu_count()} cores:"
                    f" {rate:,.1f} encodes/s, {rate / one / count:.2f} of linear",
                    flush=True,
                )

    process.run(run)


if __name__ == "__main__":
    main(sys.argv[1:])
