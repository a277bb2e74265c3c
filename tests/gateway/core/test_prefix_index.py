"""The index against plain sets, and its bounds."""

from __future__ import annotations

import random

from services.gateway.prefix_index import PrefixIndex


def test_the_longest_prefix_among_the_candidates_wins() -> None:
    index = PrefixIndex()
    index.report("a", [1, 2, 3])
    index.report("b", [1, 2])
    index.sent("c", [1, 2, 3])
    assert index.longest([1, 2, 3, 4], {"a", "b", "c"}) == {"a", "c"}
    assert index.longest([1, 2, 3, 4], {"b"}) == {"b"}
    assert index.longest([9], {"a", "b", "c"}) == set()
    assert index.longest([1, 2], ()) == set()


def test_a_digest_replaces_the_last_and_spares_what_was_sent() -> None:
    index = PrefixIndex()
    index.report("a", [1, 2])
    index.sent("a", [2, 5])
    index.report("a", [3])
    assert index.held_by("a") == {2, 3, 5}
    assert index.longest([1], {"a"}) == set()
    assert index.longest([1, 2], {"a"}) == {"a"}


def test_a_flush_forgets_what_was_sent_and_a_cold_start_does_not() -> None:
    index = PrefixIndex()
    index.sent("a", [5])
    index.report("a", [])  # sent a moment ago: the worker has not computed it yet
    assert index.held_by("a") == {5}
    index.report("a", [5])
    index.report("a", [])
    assert index.held_by("a") == set()
    assert len(index) == 0


def test_what_was_sent_is_bounded_oldest_out() -> None:
    index = PrefixIndex(max_sent=3)
    index.report("a", [1])
    index.sent("a", [1, 2, 3])
    index.sent("a", [2, 4, 5])
    assert index.held_by("a") == {1, 2, 4, 5}  # 1 by the digest alone
    index.report("a", [9])
    assert index.held_by("a") == {2, 4, 5, 9}


def test_any_sequence_of_changes_keeps_the_index_in_step() -> None:
    rng = random.Random(7)
    index = PrefixIndex(max_sent=8)
    names = ["a", "b", "c"]
    for _ in range(3000):
        name = rng.choice(names)
        action = rng.random()
        if action < 0.45:
            index.sent(name, rng.sample(range(40), rng.randrange(6)))
        elif action < 0.9:
            index.report(name, rng.sample(range(40), rng.randrange(12)))
        else:
            index.forget(name)
        held = {other: index.held_by(other) for other in names}
        assert len(index) == len(set().union(*held.values()))
        value = rng.randrange(40)
        assert index.longest([value], set(names)) == {n for n in names if value in held[n]}
    for name in names:
        index.forget(name)
    assert len(index) == 0
