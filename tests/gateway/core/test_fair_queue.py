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
        assert queue.push(number, "a", now=float(number))[1] == []
    entry, losers = queue.push(100, "a", now=10.0)
    assert losers == [entry]  # its own flood gives way first
    losers = [loser for number in range(6) for loser in queue.push(200 + number, "b", now=20.0)[1]]
    assert [loser.tenant for loser in losers] == ["a"] * 5 + ["b"]
    assert [loser.item for loser in losers] == [9, 8, 7, 6, 5, 205]
    assert len(queue) == 10


def test_many_choices_are_taken_in_whole_or_not_at_all() -> None:
    queue: FairQueue[int] = FairQueue(10, {})
    for number in range(9):
        queue.push(number, "a", now=float(number))
    entry, losers = queue.push(100, "b", now=20.0, cost=8)
    assert losers == [entry]  # nobody of a's gives way: not enough would
    assert len(queue) == 9
    _, losers = queue.push(101, "b", now=20.0, cost=4)
    assert [loser.item for loser in losers] == [8, 7, 6]
    entry, losers = queue.push(102, "c", now=20.0, cost=11)
    assert losers == [entry]
    assert len(queue) == 7


def test_never_more_than_the_limit_whatever_they_cost() -> None:
    rng = random.Random(11)
    queue: FairQueue[int] = FairQueue(40, {"a": 3.0})
    waiting: dict[int, int] = {}  # costs, by sequence
    for number in range(2000):
        entry, losers = queue.push(
            number, rng.choice("abc"), now=float(number), cost=rng.choice((1, 1, 2, 8, 41))
        )
        waiting[entry.sequence] = entry.cost
        needed = sum(waiting.values()) - 40
        assert bool(losers) == (needed > 0)
        if entry in losers:
            assert losers == [entry]
        elif losers:  # no more of them than it takes
            assert sum(loser.cost for loser in losers[:-1]) < needed
        for loser in losers:
            del waiting[loser.sequence]
        assert sum(waiting.values()) <= 40
        assert len(queue) == len(waiting)
        if rng.random() < 0.2 and (popped := queue.pop()) is not None:
            del waiting[popped.sequence]


def test_how_many_are_ahead() -> None:
    queue: FairQueue[int] = FairQueue(100, {})
    for number in range(50):
        queue.push(number, "a", now=0.0)
    assert queue.ahead("a") == 51
    assert queue.ahead("b") == 2
    queue.push(50, "b", now=0.0, cost=20)
    assert queue.ahead("b", 5) == 50  # of both as much, which is less than all that waits
    assert queue.ahead("a", 5) == 75


def test_any_order_of_pushes_removals_and_pops_loses_nobody() -> None:
    rng = random.Random(5)
    queue: FairQueue[int] = FairQueue(50, {"a": 2.0})
    waiting, seen, number = {}, set(), 0
    for _ in range(5000):
        action = rng.random()
        if action < 0.5:
            number += 1
            entry, losers = queue.push(number, rng.choice("abc"), now=float(number))
            waiting[number] = entry
            for loser in losers:
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
