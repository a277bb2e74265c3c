"""Policies over plain views."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from services.common.prefix_hash import prefix_hashes
from services.gateway.prefix_index import PrefixIndex
from services.gateway.router import LeastLoaded, LongestPrefix, RoundRobin, make_policy


@dataclass
class View:
    address: str
    load: int = 0


def prefix_policy(index: PrefixIndex | None = None) -> LongestPrefix:
    return LongestPrefix(PrefixIndex() if index is None else index, rng=random.Random(1))


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
    index = PrefixIndex()
    index.report("a", hashes[:1])
    index.report("b", hashes[:3])
    views = [View("a", 3), View("b", 3), View("c", 3)]
    assert prefix_policy(index).choose(views, ids, "salt").address == "b"


def test_another_salt_is_another_prefix() -> None:
    ids = list(range(64))
    index = PrefixIndex()
    policy = prefix_policy(index)
    for salt in map(str, range(20)):
        index.report("a", prefix_hashes(ids, "salt"))
        policy.choose([View("a"), View("b"), View("c")], ids, salt)
    assert index.held_by("b")  # the holder of one salt's prefix is not all others' choice


def test_what_was_just_sent_counts_before_any_digest_tells() -> None:
    ids, other = list(range(200)), list(range(1, 201))
    policy = prefix_policy()
    views = [View(str(i)) for i in range(8)]
    homes = {tuple(prompt): policy.choose(views, prompt, "").address for prompt in (ids, other)}
    longer = [*ids, *range(500, 800)]
    assert policy.choose(views, longer, "").address == homes[tuple(ids)]


def test_the_holder_is_passed_over_when_it_is_too_busy() -> None:
    ids = list(range(128))
    index = PrefixIndex()
    index.report("a", prefix_hashes(ids))
    policy = prefix_policy(index)
    assert policy.choose([View("a", 1), View("b", 0)], ids, "").address == "a"
    assert policy.choose([View("a", 12), View("b", 10)], ids, "").address == "a"
    index.forget("b")
    assert policy.choose([View("a", 30), View("b", 10)], ids, "").address == "b"


@pytest.mark.parametrize("workers", [2, 3, 8, 33])
def test_a_shared_prefix_makes_no_hot_spot(workers: int) -> None:
    """All prompts begin alike; finished requests are replaced, so the fleet stays full."""
    rng = random.Random(workers)
    shared = list(range(640))
    views = [View(str(i)) for i in range(workers)]
    policy = prefix_policy()
    running: list[View] = []
    worst = 0.0
    for number in range(100 * workers):
        if len(running) >= 40 * workers:
            running.pop(rng.randrange(len(running))).load -= 1
        chosen = policy.choose(views, [*shared, *rng.choices(range(1000), k=70)], "")
        chosen.load += 1
        running.append(chosen)
        if number > 40 * workers:
            mean = sum(view.load for view in views) / workers
            worst = max(worst, max(view.load for view in views) / mean)
    assert worst <= 1.25 + 1 / 40


def test_cold_gateways_agree_and_distinct_prefixes_spread() -> None:
    rng = random.Random(3)
    views = [View(f"10.0.0.{i}:50051") for i in range(10)]
    counts: Counter[str] = Counter()
    for _ in range(500):
        prompt = rng.choices(range(30_000), k=200)
        one = prefix_policy().choose(views, prompt, "")
        alike = [*prompt[:64], *rng.choices(range(30_000), k=200)]
        two = prefix_policy().choose(list(reversed(views)), alike, "")
        assert one is two
        counts[one.address] += 1
    assert len(counts) == 10
    assert max(counts.values()) < 1.6 * 50


def test_a_worker_that_leaves_moves_only_its_own_prefixes() -> None:
    rng = random.Random(4)
    views = [View(str(i)) for i in range(8)]
    prompts = [rng.choices(range(30_000), k=64) for _ in range(200)]
    before = [prefix_policy().choose(views, prompt, "").address for prompt in prompts]
    after = [prefix_policy().choose(views[1:], prompt, "").address for prompt in prompts]
    assert all(old in (new, "0") for old, new in zip(before, after, strict=True))


def test_a_short_prompt_goes_to_the_less_loaded_and_leaves_no_trace() -> None:
    index = PrefixIndex()
    views = [View("a", 5), View("b", 1)]
    assert prefix_policy(index).choose(views, list(range(63)), "").address == "b"
    assert len(index) == 0


@pytest.mark.parametrize("name", ["round-robin", "least-loaded", "prefix"])
def test_every_policy_has_a_name_and_serves_a_lone_worker(name: str) -> None:
    view = View("a", 100)
    for length in (2, 200):
        assert make_policy(name, PrefixIndex()).choose([view], list(range(length)), "") is view
