"""How the worker's bookkeeping grows: the scheduler's CPU a step, and a prefix's look-up.

    python -m bench.bookkeeping

CPU time of this process; no model is loaded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench import figures
from bench.engine_load import scheduler_seconds
from bench.figures import OWN, Rounds
from services.common.config import option, parse
from services.worker.kvcache.radix_tree import RadixTree

PAGE_SIZE = 16
SHARED = 64  # tokens that cached prompts have in common, as of a system prompt
RUNNING = (1, 4, 16, 64, 256, 512, 1024)
CACHED = (10, 1_000, 100_000)
LOOK_UPS = 100  # of a measurement
STEP = "scheduler, CPU us a step, requests running"
MATCH = "radix tree, CPU us a match of 1,000 tokens, prefixes cached"


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    rounds: int = option(3, "times each is measured, all of them in turn")
    steps: int = option(50, "steps of the scheduler a round")
    largest: int = option(100_000, "the most running requests and cached prefixes measured")
    json: str = option("", "file for the figures; default: none")


class Cached:
    """A radix tree with so many prefixes, and one cached prompt of 1,000 tokens among them."""

    def __init__(self, num_cached: int) -> None:
        self._tree = RadixTree(PAGE_SIZE)
        random = np.random.default_rng(1)
        shared = random.integers(0, 50_000, SHARED, dtype=np.int32)
        own = random.integers(0, 50_000, 1_000 - SHARED, dtype=np.int32)
        self._long = np.concatenate((shared, own))
        self._pages = len(self._long) // PAGE_SIZE
        self._tree.insert(self._long[: self._pages * PAGE_SIZE], list(range(self._pages)), "")
        for number in range(num_cached):
            tail = random.integers(0, 50_000, PAGE_SIZE, dtype=np.int32)
            cached = np.concatenate((shared, tail))
            first = self._pages + number * len(cached)
            self._tree.insert(cached, list(range(first, first + len(cached) // PAGE_SIZE)), "")

    def match_seconds(self) -> float:
        """CPU seconds to look the prompt up."""
        started = time.process_time()
        for _ in range(LOOK_UPS):
            found = self._tree.match(self._long, "")
        spent = time.process_time() - started
        assert len(found.pages) == self._pages
        return spent / LOOK_UPS


def measure(config: BenchConfig, rounds: Rounds) -> None:
    """Adds every size to `rounds`, round by round; a bar on a terminal shows how far it is."""
    measured: list[tuple[str, Callable[[], float]]] = [
        (f"{STEP}, {number}", partial(scheduler_seconds, number, config.steps))
        for number in RUNNING
        if number <= config.largest
    ]
    measured += [
        (f"{MATCH}, {number}", Cached(number).match_seconds)
        for number in CACHED
        if number <= config.largest
    ]
    for name, seconds in figures.shown(measured * config.rounds):
        rounds.add(OWN, name, 1e6 * seconds())


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(BenchConfig, argv, prog="bench.bookkeeping", description=__doc__ or "")
    rounds = Rounds()
    measure(config, rounds)
    figures.finish("bookkeeping", config, rounds)


if __name__ == "__main__":
    main(sys.argv[1:])
