"""A bounded queue that is fair between tenants, whatever each of them sends.

Weighted round robin by start-time fair queueing (Goyal, Vin and Cheng, 1996): each
tenant has a virtual time, which every unit of its work that leaves moves on by
1 / weight; the tenant that is furthest behind goes next. One that comes back starts at
the time of those who stayed, so absence saves nothing up.

When it is full, the tenant with the longest queue for its weight gives way: a flood
fills only what the others do not use.
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
        self.size = 0
        self.heap: list[Entry[T]] = []  # entries that wait no more are void


class FairQueue(Generic[T]):
    """At most `limit` items. `weights` names the tenants whose weight is not 1."""

    def __init__(self, limit: int, weights: Mapping[str, float]) -> None:
        self._limit = limit
        self._weights = weights
        self._tenants: dict[str, _Tenant[T]] = {}
        self._size = 0
        self._time = 0.0
        self._num_pushed = 0

    def __len__(self) -> int:
        return self._size

    def push(
        self, item: T, tenant: str, *, now: float, priority: int = 0, cost: int = 1
    ) -> tuple[Entry[T], Entry[T] | None]:
        """Adds an item. Returns its entry, and the one that had to give way: perhaps itself."""
        mine = self._tenant(tenant)
        if not mine.size:
            mine.time = max(mine.time, self._time)
        key = now - max(-_MAX_PRIORITY, min(priority, _MAX_PRIORITY)) * AGEING
        self._num_pushed += 1
        entry = Entry(key, self._num_pushed, item, tenant, cost)
        heapq.heappush(mine.heap, entry)
        mine.size += 1
        self._size += 1
        loser = None
        if self._size > self._limit:
            # Of equals, the newcomer's own tenant gives way: nobody is pushed out for nothing.
            longest = max(self._tenants.values(), key=lambda t: (t.size / t.weight, t is mine))
            loser = max(entry for entry in longest.heap if entry.waits)
            self.remove(loser)
        return entry, loser

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
        chosen.size -= 1
        self._size -= 1
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """Takes an entry out of its turn, if it still waits."""
        if not entry.waits:
            return
        entry.waits = False
        tenant = self._tenants[entry.tenant]
        tenant.size -= 1
        self._size -= 1
        if len(tenant.heap) > 2 * tenant.size + 64:
            tenant.heap = [entry for entry in tenant.heap if entry.waits]
            heapq.heapify(tenant.heap)

    def ahead(self, tenant: str) -> float:
        """About how many items leave before a tenant's next one would."""
        mine = self._tenant(tenant)
        active = sum(t.weight for t in self._tenants.values() if t.size and t is not mine)
        return min((mine.size + 1) * (active + mine.weight) / mine.weight, self._size + 1)

    def _tenant(self, name: str) -> _Tenant[T]:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._weights.get(name, 1.0))
        return tenant
