"""How fast prompts are encoded, by processes and threads, and whether a long one holds others up.

    python -m bench.encode --tokenizers 2 --threads 1,2

The real tokenizer service, each call to the least busy process. Growth needs a core for each
thread and one for this client; with fewer, what is measured is the machine. The CPU time of a token
tells what the growth would be: as long as it does not rise, another core means as many tokens more.
The last figures are of short prompts sent to one process with its default threads, first alone and
then while it encodes one long prompt after another.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from bench import cpu, figures
from bench.figures import Rounds
from protos import tokenizer_pb2
from services.common.config import option, parse
from services.common.process import child_environment
from services.gateway.discovery import StaticAddresses
from services.gateway.peers.pool import PeerPool
from services.gateway.peers.session import SessionTimes
from services.gateway.peers.tokenizer import TokenizerPeer

_WORDS = ("the", "cat", "and", "her", "old", "friend", "went", "down", "to", "the", "sea")
_NUM_TEXTS = 64  # that are encoded over and over
_SHORT_WORDS, _SHORT_CLIENTS = 30, 4
_DEFAULT_THREADS = 0
ONE = "1 process"


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    tokenizers: int = option(2, "the most tokenizer processes")
    threads: tuple[str, ...] = option(("1", "2"), "threads of each process", metavar="N,...")
    model: str = option("", "whose tokenizer; default: the embedded model's")
    words: int = option(1500, "words a prompt, each about one token")
    long_words: int = option(100_000, "words of a long prompt")
    concurrency: int = option(16, "encodes in flight, for each process")
    seconds: float = option(3.0, "length of each measurement")
    rounds: int = option(3, "rounds in which every shape has its turn")
    json: str = option("", "file for the figures; default: none")


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """Running processes, and sessions with them."""

    pool: PeerPool[TokenizerPeer]
    pids: list[int]

    async def encode(self, text: str) -> int:
        """How many tokens the least busy process makes of a text."""
        peer = min(self.pool.ready, key=lambda peer: peer.outstanding)
        answer = await peer.encode(tokenizer_pb2.EncodeRequest(text=text))
        return len(answer.token_ids)


async def measure(config: BenchConfig, rounds: Rounds) -> None:
    """Adds every shape's figures to `rounds`, round by round."""
    for _ in range(config.rounds):
        for count, threads in itertools.product(
            range(1, config.tokenizers + 1), map(int, config.threads)
        ):
            async with _running(config, count, threads) as tokenizers:
                name = ONE if count == 1 else f"{count} processes"
                await _throughput(config, tokenizers, name, threads, rounds)
        async with _running(config, 1, _DEFAULT_THREADS) as tokenizers:
            await _short_beside_long(config, tokenizers, rounds)


async def _throughput(
    config: BenchConfig, tokenizers: Tokenizers, name: str, threads: int, rounds: Rounds
) -> None:
    texts = [_text(config.words, seed) for seed in range(_NUM_TEXTS)]
    at_once = config.concurrency * len(tokenizers.pids)
    await _load(tokenizers, texts, at_once, min(1.0, config.seconds))  # warm
    start, there = time.perf_counter(), cpu.of_threads(tokenizers.pids)
    counts = await _load(tokenizers, texts, at_once, config.seconds)
    seconds, spent = time.perf_counter() - start, cpu.of_threads(tokenizers.pids) - there
    rounds.add(name, f"thousand tokens/s, {threads}", sum(counts) / seconds / 1e3)
    rounds.add(name, f"CPU us a token, {threads}", spent / sum(counts) * 1e6)


async def _load(
    tokenizers: Tokenizers, texts: list[str], at_once: int, seconds: float
) -> list[int]:
    """Encodes until the time is over; the tokens of each text that was done."""
    until = time.perf_counter() + seconds
    counts: list[int] = []
    order = itertools.cycle(texts)

    async def client() -> None:
        while time.perf_counter() < until:
            counts.append(await tokenizers.encode(next(order)))

    await asyncio.gather(*(client() for _ in range(at_once)))
    return counts


async def _short_beside_long(config: BenchConfig, tokenizers: Tokenizers, rounds: Rounds) -> None:
    """How long short prompts take without and with long ones at the same process."""
    short = [_text(_SHORT_WORDS, seed) for seed in range(_NUM_TEXTS)]
    long = _text(config.long_words, 0)
    await tokenizers.encode(long)  # warm
    alone = await _times(tokenizers, short, config.seconds)
    others = asyncio.create_task(_load(tokenizers, [long], 1, config.seconds))
    beside = await _times(tokenizers, short, config.seconds)
    await others
    for name, times in (("alone", alone), (f"beside {config.long_words:,} words", beside)):
        for percent in (50, 99):
            value = float(np.percentile(times, percent)) * 1000
            rounds.add(ONE, f"short prompt, p{percent} ms, {name}", value)


async def _times(tokenizers: Tokenizers, texts: list[str], seconds: float) -> list[float]:
    """Seconds of each encode, a few at once."""
    until = time.perf_counter() + seconds
    times: list[float] = []
    order = itertools.cycle(texts)

    async def client() -> None:
        while (start := time.perf_counter()) < until:
            await tokenizers.encode(next(order))
            times.append(time.perf_counter() - start)

    await asyncio.gather(*(client() for _ in range(_SHORT_CLIENTS)))
    return times


@asynccontextmanager
async def _running(config: BenchConfig, count: int, threads: int) -> AsyncIterator[Tokenizers]:
    """Starts so many processes, waits for them, and ends them."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory:
        addresses = [f"unix:{directory}/{index}" for index in range(count)]
        children = [await _start(config, address, threads) for address in addresses]
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
            yield Tokenizers(pool, [child.pid for child in children])
        finally:
            sessions.cancel()
            await asyncio.gather(sessions, return_exceptions=True)
            for child in children:
                child.terminate()
            await asyncio.gather(*(child.wait() for child in children))


async def _start(config: BenchConfig, address: str, threads: int) -> Process:
    model = [f"--model={config.model}"] if config.model else []
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services", "tokenizer", f"--address={address}"),
        *(f"--num-threads={threads}", *model),
        stderr=DEVNULL,
        stdout=DEVNULL,
        env={**child_environment(), "HF_HUB_OFFLINE": "1"},
    )


def _text(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=words))


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(BenchConfig, argv, prog="bench.encode", description=__doc__ or "")
    figures.run("encode", config, lambda rounds: measure(config, rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
