"""Which worker takes a request: policies over views and ids, without sessions or clocks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, TypeVar

from services.common.prefix_hash import BLOCK_TOKENS, prefix_hashes
from services.gateway.prefix_index import PrefixIndex

_LOAD_FACTOR = 1.25
_SLACK = 2  # requests by which a worker with the prefix may lead the least loaded, at any load
_MASK = (1 << 64) - 1


class WorkerView(Protocol):
    """What a policy may know of a worker."""

    @property
    def address(self) -> str: ...

    @property
    def load(self) -> int:
        """Requests running or waiting there."""
        ...


V = TypeVar("V", bound=WorkerView)


class Policy(Protocol):
    """Chooses among workers that could all serve the request."""

    def choose(self, workers: Sequence[V], prompt_ids: Sequence[int], salt: str) -> V:
        """One of `workers`, which is not empty."""
        ...


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, workers: Sequence[V], prompt_ids: Sequence[int], salt: str) -> V:
        self._turn += 1
        return sorted(workers, key=lambda worker: worker.address)[self._turn % len(workers)]


class LeastLoaded:
    """The less loaded of two drawn at random.

    Two suffice to be near the best, and many gateways do not herd onto one worker
    (Mitzenmacher, The Power of Two Choices, 2001).
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, workers: Sequence[V], prompt_ids: Sequence[int], salt: str) -> V:
        if len(workers) == 1:
            return workers[0]
        one, other = self._rng.sample(workers, 2)
        return one if one.load <= other.load else other


class LongestPrefix:
    """The worker with the longest cached prefix, unless it is too busy.

    Bounded load: a worker whose load would pass `factor` times the mean is no candidate
    (Mirrokni et al., Consistent Hashing with Bounded Loads, 2018), so a prefix that
    everybody shares spreads once its first holder is saturated. A lead of `_SLACK` over
    the least loaded is always allowed, or a fleet with little to do would not use its
    caches. Where nobody holds any of the prompt, rendezvous hashing of its first block
    decides: gateways that know nothing of each other send a new prefix to one worker.
    """

    def __init__(
        self,
        index: PrefixIndex,
        factor: float = _LOAD_FACTOR,
        rng: random.Random | None = None,
    ) -> None:
        self._index = index
        self._factor = factor
        self._fallback = LeastLoaded(rng)

    def choose(self, workers: Sequence[V], prompt_ids: Sequence[int], salt: str) -> V:
        if len(prompt_ids) < BLOCK_TOKENS or len(workers) == 1:
            return self._fallback.choose(workers, prompt_ids, salt)
        hashes = prefix_hashes(prompt_ids, salt)
        candidates = self._not_too_busy(workers)
        best = self._index.longest(hashes, candidates)
        if best:
            holders = [candidates[address] for address in sorted(best)]
            chosen = self._fallback.choose(holders, prompt_ids, salt)
        else:
            key = hashes[0]
            chosen = max(candidates.values(), key=lambda worker: self._rank(key, worker.address))
        self._index.sent(chosen.address, hashes)
        return chosen

    def _not_too_busy(self, workers: Sequence[V]) -> dict[str, V]:
        """By address; never empty, as the least loaded is always within the bound."""
        loads = [worker.load for worker in workers]
        mean = (sum(loads) + 1) / len(loads)
        bound = max(min(loads) + _SLACK, self._factor * mean)
        return {
            worker.address: worker
            for worker, load in zip(workers, loads, strict=True)
            if load + 1 <= bound
        }

    def _rank(self, key: int, address: str) -> int:
        """An address's rank for a key, the same in every gateway; the highest has it
        (Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit Rates, 1998)."""
        return rendezvous_rank(key, rendezvous_seed(address))


@lru_cache(maxsize=4096)  # addresses come and go for ever; no fleet has more at once
def rendezvous_seed(name: str) -> int:
    """What stands for a name in rendezvous hashing."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def rendezvous_rank(key: int, seed: int) -> int:
    """A pseudo-random rank of two 64-bit numbers (the finaliser of SplitMix64)."""
    mixed = ((key ^ seed) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 32)


def make_policy(name: str, index: PrefixIndex) -> Policy:
    """The policy of that name: round-robin, least-loaded or prefix."""
    if name == "prefix":
        return LongestPrefix(index)
    return RoundRobin() if name == "round-robin" else LeastLoaded()
