"""A gateway's share of many workers: which of a source's addresses it uses.

Every session costs both of its ends, so that G gateways and M workers pay for G x M of
them. With a subset a gateway takes the `size` addresses that rank highest for its name
(rendezvous hashing): each gateway a different, random-looking choice, which needs no
coordination, and of which an address that comes or goes changes one member at most.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.gateway.discovery.sources import AddressSource
from services.gateway.router import rendezvous_rank, rendezvous_seed


@dataclass(frozen=True, slots=True)
class Subset:
    """Who chooses, and how many."""

    name: str
    size: int

    def choose(self, addresses: frozenset[str]) -> frozenset[str]:
        """At most `size` of some addresses."""
        if len(addresses) <= self.size:
            return addresses
        key = rendezvous_seed(self.name)

        def rank(address: str) -> int:
            return rendezvous_rank(key, rendezvous_seed(address))

        return frozenset(heapq.nlargest(self.size, addresses, key=rank))


class SubsetAddresses:
    """A source's addresses, a subset of them."""

    def __init__(self, source: AddressSource, subset: Subset) -> None:
        self._source = source
        self._subset = subset

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        known: frozenset[str] | None = None
        async for addresses in self._source.watch():
            chosen = self._subset.choose(addresses)
            if chosen != known:
                known = chosen
                yield chosen
