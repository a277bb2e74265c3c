"""How the worker's bookkeeping grows: the scheduler's CPU a step, and a prefix's look-up.

    python -m bench.bookkeeping

CPU time of this process, least of the rounds; no model is loaded.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np

from bench.engine_load import scheduler_seconds
from services.common.config import option, parse
from services.worker.kvcache.radix_tree import RadixTree

PAGE_SIZE = 16
SHARED = 64  # tokens that cached prompts have in common, as of a system prompt
RUNNING = (1, 4, 16, 64, 256, 512, 1024)
CACHED = (10, 1_000, 100_000)


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    rounds: int = option(3, "times each is measured; the least counts")
    steps: int = option(50, "steps of the scheduler a round")
    largest: int = option(100_000, "the most running requests and cached prefixes measured")


def match_seconds(num_cached: int, rounds: int) -> float:
    """CPU seconds to look up a cached prompt of 1,000 tokens among so many others."""
    tree = RadixTree(PAGE_SIZE)
    random = np.random.default_rng(1)
    shared = random.integers(0, 50_000, SHARED, dtype=np.int32)
    long = np.concatenate((shared, random.integers(0, 50_000, 1_000 - SHARED, dtype=np.int32)))
    pages = len(long) // PAGE_SIZE
    tree.insert(long[: pages * PAGE_SIZE], list(range(pages)), "")
    for number in range(num_cached):
        tail = random.integers(0, 50_000, PAGE_SIZE, dtype=np.int32)
        cached = np.concatenate((shared, tail))
        first = pages + number * len(cached)
        tree.insert(cached, list(range(first, first + len(cached) // PAGE_SIZE)), "")
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        for _ in range(100):
            found = tree.match(long, "")
        best = min(best, (time.process_time() - started) / 100)
    assert len(found.pages) == pages
    return best


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(BenchConfig, argv, prog="bench.bookkeeping", description=__doc__ or "")
    print(f"{'running requests':<24}{'CPU us a step':>16}{'us a request':>16}")
    for running in (n for n in RUNNING if n <= config.largest):
        seconds = min(scheduler_seconds(running, config.steps) for _ in range(config.rounds))
        print(f"{running:<24,}{1e6 * seconds:>16,.0f}{1e6 * seconds / running:>16,.2f}", flush=True)
    print(f"{'cached prefixes':<24}{'CPU us a match of 1,000 tokens':>32}")
    for cached in (n for n in CACHED if n <= config.largest):
        print(f"{cached:<24,}{1e6 * match_seconds(cached, config.rounds):>32,.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
