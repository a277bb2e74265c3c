"""Subsets: each gateway its own, together an even load, and few changes when workers change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from services.gateway.discovery import StaticAddresses, Subset, address_source
from services.gateway.discovery.subset import SubsetAddresses

WORKERS = frozenset(f"10.0.{i // 256}.{i % 256}:50051" for i in range(256))


def test_few_addresses_are_all_used() -> None:
    assert Subset("gateway-0", 16).choose(frozenset({"a", "b"})) == {"a", "b"}


def test_the_same_gateway_chooses_the_same() -> None:
    one, again = Subset("gateway-0", 16), Subset("gateway-0", 16)
    assert len(one.choose(WORKERS)) == 16
    assert one.choose(WORKERS) == again.choose(frozenset(sorted(WORKERS)))
    assert one.choose(WORKERS) != Subset("gateway-1", 16).choose(WORKERS)


def test_many_gateways_load_the_workers_evenly() -> None:
    """64 gateways with 64 of 256 each: 16 a worker, as the binomial law spreads them."""
    counts = Counter[str]()
    for number in range(64):
        counts.update(Subset(f"gateway-7f9c-{number:x}", 64).choose(WORKERS))
    assert len(counts) == 256
    mean = sum(counts.values()) / 256
    assert mean == 16
    variance = sum((count - mean) ** 2 for count in counts.values()) / 256
    assert variance < 1.4 * 16 * (1 - 64 / 256)
    assert max(counts.values()) <= 2 * mean


def test_a_worker_that_goes_costs_its_own_sessions_alone() -> None:
    subset = Subset("gateway-0", 16)
    before = subset.choose(WORKERS)
    for gone in sorted(WORKERS):
        after = subset.choose(WORKERS - {gone})
        assert len(before - after) == (gone in before)
        assert len(after - before) == (gone in before)


async def test_a_source_is_followed_and_told_of_real_changes_only() -> None:
    class Scripted:
        async def watch(self) -> AsyncIterator[frozenset[str]]:
            chosen = Subset("g", 4).choose(WORKERS)
            other = next(iter(sorted(WORKERS - chosen)))
            yield WORKERS
            yield WORKERS - {other}
            yield WORKERS - {sorted(chosen)[0]}

    sets = [found async for found in SubsetAddresses(Scripted(), Subset("g", 4)).watch()]
    assert [len(found) for found in sets] == [4, 4]
    assert len(sets[0] & sets[1]) == 3


async def test_each_name_has_a_subset_of_its_own() -> None:
    addresses = sorted(WORKERS)[:10]
    source = address_source([*addresses, "dns:localhost:7"], subset=Subset("g", 3))
    async with asyncio.timeout(10):
        async for found in source.watch():
            if any(address.endswith(":7") for address in found) and len(found) > 3:
                break
    fixed = {address for address in found if not address.endswith(":7")}
    assert fixed == Subset("g", 3).choose(frozenset(addresses))
    assert isinstance(address_source(addresses), StaticAddresses)
