"""Policies over plain views."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from services.common.prefix_hash import prefix_hashes
from services.gateway.router import LeastLoaded, LongestPrefix, RoundRobin, make_policy


@dataclass
class View:
    address: str
    load: int = 0
    prefixes: set[int] = field(default_factory=set)


def test_round_robin_takes_each_in_turn() -> None:
    views = [View("b"), View("a"), View("c")]
    policy = RoundRobin()
    chosen = [policy.choose(views, (), "").address for _ in range(6)]
    assert sorted(chosen[:3]) == ["a", "b", "c"]
    assert chosen[3:] == chosen[:3]


def test_least_loaded_never_takes_the_busiest() -> None:
    views = [View("a", 5), View("b", 1), View("c", 9)]
    policy = LeastLoaded(random.Random(1))
    chosen = {policy.choose(views, (), "").address for _ in range(100)}
    assert chosen == {"a", "b"}


def test_least_loaded_spreads_by_what_it_sent() -> None:
    views = [View(str(i)) for i in range(8)]
    policy = LeastLoaded(random.Random(1))
    for _ in range(800):
        policy.choose(views, (), "").load += 1
    assert max(view.load for view in views) < 1.1 * 100


def test_prefix_goes_where_most_of_it_is_cached() -> None:
    ids = list(range(256))
    hashes = prefix_hashes(ids, "salt")
    views = [View("a", 3, set(hashes[:1])), View("b", 3, set(hashes[:3])), View("c", 3)]
    policy = LongestPrefix(rng=random.Random(1))
    assert policy.choose(views, ids, "salt").address == "b"
    assert {policy.choose(views, ids, "other").address for _ in range(50)} == {"a", "b", "c"}


def test_a_shared_prefix_makes_no_hot_spot() -> None:
    ids = list(range(128))
    views = [View(str(i)) for i in range(4)]
    views[0].prefixes = set(prefix_hashes(ids))
    policy = LongestPrefix(rng=random.Random(1))
    for _ in range(400):
        chosen = policy.choose(views, ids, "")
        chosen.load += 1
        chosen.prefixes |= set(prefix_hashes(ids))
    assert max(view.load for view in views) <= 1.25 * 100 + 1


def test_prefix_on_an_idle_fleet_uses_the_cache() -> None:
    ids = list(range(64))
    views = [View("a"), View("b", 0, set(prefix_hashes(ids))), View("c")]
    policy = LongestPrefix(rng=random.Random(1))
    assert {policy.choose(views, ids, "").address for _ in range(20)} == {"b"}


@pytest.mark.parametrize("name", ["round-robin", "least-loaded", "prefix"])
def test_every_policy_has_a_name_and_serves_a_lone_worker(name: str) -> None:
    view = View("a", 100)
    assert make_policy(name).choose([view], [1, 2], "") is view
