"""Which worker takes a request. Policies are pure: views and ids in, a choice out."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from services.common.prefix_hash import prefix_hashes


class WorkerView(Protocol):
    """What a policy may know of a worker."""

    @property
    def address(self) -> str: ...

    @property
    def load(self) -> int:
        """Requests running or waiting there."""
        ...

    @property
    def prefixes(self) -> Collection[int]:
        """Hashes of the prefixes it is believed to have cached."""
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
        drawn = self._rng.sample(workers, min(2, len(workers)))
        return min(drawn, key=lambda worker: worker.load)


class LongestPrefix:
    """The worker with the longest cached prefix, unless it is too busy.

    Bounded load: a worker whose load would pass `factor` times the mean is no
    candidate (Mirrokni et al., Consistent Hashing with Bounded Loads, 2018), so a
    prefix that everybody shares spreads once its first holder is saturated.
    """

    def __init__(self, factor: float = 1.25, rng: random.Random | None = None) -> None:
        self._factor = factor
        self._fallback = LeastLoaded(rng)

    def choose(self, workers: Sequence[V], prompt_ids: Sequence[int], salt: str) -> V:
        mean = (sum(worker.load for worker in workers) + 1) / len(workers)
        # One request more than the bound is always allowed, or an idle fleet has no candidate.
        bound = max(1.0, self._factor * mean)
        open_workers = [worker for worker in workers if worker.load + 1 <= bound]
        hashes = prefix_hashes(prompt_ids, salt)
        lengths = {worker.address: _match(hashes, worker.prefixes) for worker in open_workers}
        longest = max(lengths.values(), default=0)
        if longest == 0:
            return self._fallback.choose(workers, prompt_ids, salt)
        best = [worker for worker in open_workers if lengths[worker.address] == longest]
        return self._fallback.choose(best, prompt_ids, salt)


def _match(hashes: Sequence[int], cached: Collection[int]) -> int:
    """How many leading blocks are cached. The newest hashes alone may be known, so any
    later block vouches for those before it."""
    for length in range(len(hashes), 0, -1):
        if hashes[length - 1] in cached:
            return length
    return 0


def make_policy(name: str) -> Policy:
    """The policy of that name: round-robin, least-loaded or prefix."""
    policies: dict[str, type[RoundRobin] | type[LeastLoaded] | type[LongestPrefix]] = {
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
        "prefix": LongestPrefix,
    }
    return policies[name]()
