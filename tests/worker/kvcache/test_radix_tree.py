"""The radix tree: matching, locking, splitting and eviction, without a scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.prefix_hash import prefix_hashes
from services.worker.kvcache.allocator import IntegrityError
from services.worker.kvcache.prefix_cache import TokenArray
from services.worker.kvcache.radix_tree import RadixTree

PAGE_SIZES = [1, 4, 16]


def ids(*values: int) -> TokenArray:
    return np.array(values, np.int32)


def run_of(length: int, start: int = 0) -> TokenArray:
    return np.arange(start, start + length, dtype=np.int32)


def test_lock_covers_the_matched_node_itself() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(run_of(8), list(range(8)), "")
    found = tree.match(run_of(8), "")
    tree.lock(found.node)
    assert tree.evict(100) == []
    tree.unlock(found.node)
    assert sorted(tree.evict(100)) == list(range(8))
    tree.check_integrity()


def test_a_partial_match_locks_no_page_too_many() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ids(1, 2, 3, 4, 5, 6, 7, 8), list(range(8)), "")
    found = tree.match(ids(1, 2, 3, 4, 9), "")
    assert list(found.pages) == [0, 1, 2, 3]
    tree.lock(found.node)
    assert (tree.num_locked, tree.num_evictable) == (4, 4)
    longer = tree.insert(ids(1, 2, 3, 4, 9), [0, 1, 2, 3, 20], "")
    tree.lock(longer.node)
    assert sorted(tree.evict(100)) == [4, 5, 6, 7]
    tree.unlock(found.node)
    tree.unlock(longer.node)
    assert (tree.num_locked, tree.num_evictable) == (0, 5)
    assert sorted(tree.evict(100)) == [0, 1, 2, 3, 20]
    tree.check_integrity()


def test_unlocking_too_often_is_noticed() -> None:
    tree = RadixTree(page_size=1)
    stored = tree.insert(ids(1), [0], "")
    with pytest.raises(IntegrityError):
        tree.unlock(stored.node)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("extra", [(1, -1), (1, 0), (1, 1), (2, 0), (2, 1)])
def test_only_whole_pages_match(page_size: int, extra: tuple[int, int]) -> None:
    tree = RadixTree(page_size)
    tree.insert(run_of(4 * page_size), [0, 1, 2, 3], "")
    length = extra[0] * page_size + extra[1]
    found = tree.match(run_of(length), "")
    assert list(found.pages) == list(range(length // page_size))
    tree.check_integrity()


@pytest.mark.parametrize("page_size", [4, 16])
def test_prompts_that_part_inside_a_page_share_the_pages_before(page_size: int) -> None:
    tree = RadixTree(page_size)
    first = run_of(3 * page_size)
    second = first.copy()
    second[page_size + 1 :] += 1000
    tree.insert(first, [0, 1, 2], "")
    stored = tree.insert(second, [10, 11, 12], "")
    assert list(stored.pages) == [0, 11, 12]
    assert list(tree.match(first, "").pages) == [0, 1, 2]
    assert list(tree.match(second, "").pages) == [0, 11, 12]
    tree.check_integrity()


def test_inserting_what_is_cached_answers_with_the_pages_of_the_tree() -> None:
    tree = RadixTree(page_size=4)
    tree.insert(run_of(8), [0, 1], "")
    stored = tree.insert(run_of(12), [5, 6, 7], "")
    assert list(stored.pages) == [0, 1, 7]
    assert sorted(tree.pages()) == [0, 1, 7]


def test_salts_share_nothing() -> None:
    tree = RadixTree(page_size=4)
    tree.insert(run_of(8), [0, 1], "a")
    assert list(tree.match(run_of(8), "").pages) == []
    assert list(tree.match(run_of(8), "b").pages) == []
    tree.insert(run_of(8), [2, 3], "b")
    assert list(tree.match(run_of(8), "a").pages) == [0, 1]
    assert list(tree.match(run_of(8), "b").pages) == [2, 3]
    tree.check_integrity()


def test_the_least_recently_used_leaf_goes_first_from_its_end() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ids(1, 2, 3), [0, 1, 2], "")
    tree.insert(ids(1, 7, 8), [0, 5, 6], "")
    tree.lock(found := tree.match(ids(1, 2, 3), "").node)
    tree.unlock(found)
    assert tree.evict(1) == [6]
    assert tree.evict(1) == [5]
    assert tree.evict(2) == [1, 2]
    assert tree.evict(2) == [0]
    assert tree.num_evictable == 0
    tree.check_integrity()


def test_eviction_costs_no_walk_of_the_tree() -> None:
    tree = RadixTree(page_size=1)
    for leaf in range(2000):
        tree.insert(ids(leaf, 1), [2 * leaf, 2 * leaf + 1], "")
    entries = len(tree._heap)
    assert len(tree.evict(10)) == 10
    assert entries - len(tree._heap) == 5


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_digest_names_cached_prefixes_whatever_the_page_size(page_size: int) -> None:
    tree = RadixTree(page_size)
    prompt = run_of(320)
    expected = prefix_hashes(prompt, "s")
    assert len(expected) == 5
    # In pieces that end inside blocks, as chunks do, and split by another prompt later.
    for end in (48, 112, 320):
        tree.insert(prompt[:end], list(range(end // page_size)), "s")
    assert tree.digest() == expected[::-1]
    other = prompt.copy()
    other[176:] += 1000
    tree.insert(other, list(range(1000, 1000 + 320 // page_size)), "s")
    assert set(tree.digest()) == {*expected, *prefix_hashes(other, "s")}
    tree.check_integrity()
    tree.evict(10_000)
    assert tree.digest() == []


def test_the_digest_is_bounded() -> None:
    tree = RadixTree(page_size=64)
    for number in range(2000):
        tree.insert(run_of(64, start=number), [number], "")
    assert len(tree.digest()) == 1024
    assert tree.digest()[0] == prefix_hashes(run_of(64, start=1999))[0]
    tree.evict(2000)
    assert tree.digest() == []
