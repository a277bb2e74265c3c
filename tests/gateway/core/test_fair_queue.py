"""Turns between tenants, priorities within one, and who gives way."""

from __future__ import annotations

import random
from collections import Counter

from services.gateway.fair_queue import FairQueue


def tenants(queue: FairQueue[int], count: int) -> list[str]:
    """Whose turn it is, that many times."""
    entries = [queue.pop() for _ in range(count)]
    return [entry.tenant for entry in entries if entry is not None]


def test_a_flood_and_a_few_take_turns() -> None:
    queue: FairQueue[int] = FairQueue(1000, {})
    for number in range(500):
        queue.push(number, "a", now=0.0)
    assert tenants(queue, 10) == ["a"] * 10
    for number in range(20):
        queue.push(number, "b", now=1.0)
    order = tenants(queue, 40)
    assert order.count("b") == 20
    assert all(set(order[i : i + 2]) == {"a", "b"} for i in range(0, 40, 2))


def test_weights_are_shares() -> None:
    queue: FairQueue[int] = FairQueue(1000, {"a": 3.0, "b": 1.0})
    for number in range(200):
        for name in "abc":
            queue.push(number, name, now=0.0)
    assert Counter(tenants(queue, 100)) == {"a": 60, "b": 20, "c": 20}


def test_a_request_with_many_choices_counts_as_many() -> None:
    queue: FairQueue[int] = FairQueue(1000, {})
    for number in range(40):
        queue.push(number, "a", now=0.0, cost=4)
        queue.push(number, "b", now=0.0)
    assert Counter(tenants(queue, 50)) == {"a": 10, "b": 40}


def test_absence_saves_nothing_up() -> None:
    queue: FairQueue[int] = FairQueue(1000, {})
    queue.push(0, "b", now=0.0)
    for number in range(100):
        queue.push(number, "a", now=0.0)
    tenants(queue, 60)  # b's one, then a alone
    for number in range(40):
        queue.push(number, "b", now=0.0)
    assert tenants(queue, 20).count("b") in (10, 11)


def test_within_a_tenant_priority_goes_first_and_waiting_ages() -> None:
    queue: FairQueue[int] = FairQueue(10, {})
    queue.push(1, "a", now=0.0)
    queue.push(2, "a", now=1.0, priority=1)
    queue.push(3, "a", now=6.0, priority=1)
    queue.push(4, "a", now=6.0, priority=10**9)
    assert [entry.item for _ in range(4) if (entry := queue.pop())] == [4, 2, 1, 3]
    assert queue.pop() is None


def test_when_full_the_longest_queue_gives_way() -> None:
    queue: FairQueue[int] = FairQueue(10, {})
    for number in range(10):
        assert queue.push(number, "a", now=float(number))[1] is None
    _, loser = queue.push(100, "a", now=10.0)
    assert loser is not None
    assert loser.item == 100  # its own flood gives way first
    losers = [queue.push(200 + number, "b", now=20.0)[1] for number in range(6)]
    assert [loser.tenant for loser in losers if loser] == ["a"] * 5 + ["b"]
    assert [loser.item for loser in losers if loser] == [9, 8, 7, 6, 5, 205]
    assert len(queue) == 10


def test_how_many_are_ahead() -> None:
    queue: FairQueue[int] = FairQueue(100, {})
    for number in range(50):
        queue.push(number, "a", now=0.0)
    assert queue.ahead("a") == 51
    assert queue.ahead("b") == 2


def test_any_order_of_pushes_removals_and_pops_loses_nobody() -> None:
    rng = random.Random(5)
    queue: FairQueue[int] = FairQueue(50, {"a": 2.0})
    waiting, seen, number = {}, set(), 0
    for _ in range(5000):
        action = rng.random()
        if action < 0.5:
            number += 1
            entry, loser = queue.push(number, rng.choice("abc"), now=float(number))
            waiting[number] = entry
            if loser is not None:
                del waiting[loser.item]
        elif action < 0.7 and waiting:
            key = rng.choice(list(waiting))
            queue.remove(waiting.pop(key))
        elif (popped := queue.pop()) is not None:
            assert popped.item not in seen
            seen.add(popped.item)
            del waiting[popped.item]
        assert len(queue) == len(waiting)
    while (popped := queue.pop()) is not None:
        del waiting[popped.item]
    assert not waiting
