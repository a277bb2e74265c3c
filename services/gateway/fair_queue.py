"""A bounded queue that is fair between tenants, whatever each of them sends.

Weighted round robin by start-time fair queueing (Goyal, Vin and Cheng, 1996): each
tenant has a virtual time, which every unit of its work that leaves moves on by
1 / weight; the tenant that is furthest behind goes next. One that comes back starts at
the time of those who stayed, so absence saves nothing up.

What an item costs counts everywhere: in its tenant's turns and in what the queue holds. When
it is full, the tenant with the longest queue for its weight gives way: a flood fills only what
the others do not use. An item is taken in whole or not at all, and nobody gives way for one
that is not.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

AGEING = 5.0  # seconds of waiting that are worth one step of priority, as in the scheduler
_MAX_PRIORITY = 128


@dataclass(order=True, slots=True)
class Entry(Generic[T]):
    """One item, ordered within its tenant by arrival and priority."""

    key: float
    sequence: int
    item: T = field(compare=False)
    tenant: str = field(compare=False)
    cost: int = field(compare=False)
    waits: bool = field(compare=False, default=True)


class _Tenant(Generic[T]):
    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.time = 0.0  # virtual
        self.size = 0  # items that wait
        self.cost = 0  # of them together
        self.heap: list[Entry[T]] = []  # entries that wait no more are void


class FairQueue(Generic[T]):
    """Items that cost at most `limit` together. `weights` names the tenants that do not have 1."""

    def __init__(self, limit: int, weights: Mapping[str, float]) -> None:
        self._limit = limit
        self._weights = weights
        self._tenants: dict[str, _Tenant[T]] = {}
        self._size = 0
        self._cost = 0
        self._time = 0.0
        self._num_pushed = 0

    def __len__(self) -> int:
        return self._size

    def push(
        self, item: T, tenant: str, *, now: float, priority: int = 0, cost: int = 1
    ) -> tuple[Entry[T], list[Entry[T]]]:
        """Adds an item. Returns its entry, and those that had to give way: perhaps itself."""
        mine = self._tenant(tenant)
        if not mine.size:
            mine.time = max(mine.time, self._time)
        key = now - max(-_MAX_PRIORITY, min(priority, _MAX_PRIORITY)) * AGEING
        self._num_pushed += 1
        entry = Entry(key, self._num_pushed, item, tenant, cost)
        heapq.heappush(mine.heap, entry)
        self._count(mine, entry, 1)
        losers = self._losers(entry) if self._cost > self._limit else []
        for loser in losers:
            self.remove(loser)
        return entry, losers

    def pop(self) -> Entry[T] | None:
        """The next in turn; None if nobody waits."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.size]
        if not waiting:
            return None
        chosen = min(waiting, key=lambda tenant: tenant.time)
        while not (entry := heapq.heappop(chosen.heap)).waits:
            pass
        entry.waits = False
        self._time = chosen.time
        chosen.time += entry.cost / chosen.weight
        self._count(chosen, entry, -1)
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """Takes an entry out of its turn, if it still waits."""
        if not entry.waits:
            return
        entry.waits = False
        tenant = self._tenants[entry.tenant]
        self._count(tenant, entry, -1)
        if len(tenant.heap) > 2 * tenant.size + 64:
            tenant.heap = [entry for entry in tenant.heap if entry.waits]
            heapq.heapify(tenant.heap)

    def ahead(self, tenant: str, cost: int = 1) -> float:
        """About how much leaves until a tenant's next item has left, that item included: the sum
        of costs."""
        mine = self._tenant(tenant)
        active = sum(t.weight for t in self._tenants.values() if t.size and t is not mine)
        own = mine.cost + cost
        return min(own * (active + mine.weight) / mine.weight, self._cost + cost)

    def _losers(self, newcomer: Entry[T]) -> list[Entry[T]]:
        """Who gives way so that what is left fits: the newcomer alone, or others for it."""
        costs = {name: tenant.cost for name, tenant in self._tenants.items() if tenant.size}
        oldest_first: dict[str, list[Entry[T]]] = {}
        losers = []
        excess = self._cost - self._limit
        while excess > 0:
            # Of equals, the newcomer's own tenant gives way: nobody is pushed out for nothing.
            longest = max(
                costs,
                key=lambda name: (
                    costs[name] / self._tenants[name].weight,
                    name == newcomer.tenant,
                ),
            )
            if longest not in oldest_first:
                waiting = [entry for entry in self._tenants[longest].heap if entry.waits]
                oldest_first[longest] = sorted(waiting, key=lambda e: (e.key, e.sequence))
            loser = oldest_first[longest].pop()
            if loser is newcomer:
                return [newcomer]
            losers.append(loser)
            costs[longest] -= loser.cost
            excess -= loser.cost
        return losers

    def _count(self, tenant: _Tenant[T], entry: Entry[T], sign: int) -> None:
        """Counts an entry in (1) or out (-1)."""
        tenant.size += sign
        tenant.cost += sign * entry.cost
        self._size += sign
        self._cost += sign * entry.cost

    def _tenant(self, name: str) -> _Tenant[T]:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._weights.get(name, 1.0))
        return tenant
