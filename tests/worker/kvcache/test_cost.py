"""What the radix tree's operations cost as it grows: counted, not timed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from services.worker.kvcache import radix_tree
from services.worker.kvcache.radix_tree import RadixTree

SIZES = (1_000, 30_000)


class CountedHeap:
    """`heapq`, counting."""

    heapify = staticmethod(heapq.heapify)

    def __init__(self) -> None:
        self.calls = 0

    def heappush(self, heap: list[Any], item: Any) -> None:
        self.calls += 1
        heapq.heappush(heap, item)

    def heappop(self, heap: list[Any]) -> Any:
        self.calls += 1
        return heapq.heappop(heap)


def tree_of(num_pages: int, page_size: int = 2) -> RadixTree:
    """Prompts of two pages, in pairs that share the first: half the pages are inner ones."""
    tree = RadixTree(page_size)
    for number in range(0, num_pages, 3):
        for tail in range(2):
            ids = np.array([number, 1, number, 2 + tail], np.int32)
            tree.insert(ids, [number, number + 1 + tail], "")
    return tree


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> CountedHeap:
    heap = CountedHeap()
    monkeypatch.setattr(radix_tree, "heapq", heap)
    return heap


def counts(heap: CountedHeap, act: Callable[[RadixTree], None]) -> list[int]:
    """Operations on the heap (each O(log n)) that an action takes, by size of the tree."""
    answer = []
    for size in SIZES:
        tree = tree_of(size)
        heap.calls = 0
        act(tree)
        answer.append(heap.calls)
    return answer


def test_evicting_a_page_takes_as_many_steps_in_a_tree_of_any_size(heap: CountedHeap) -> None:
    small, large = counts(heap, lambda tree: [tree.evict(1) for _ in range(300)].clear())
    assert small == large <= 3 * 300


def test_evicting_after_all_was_used_again_looks_at_each_leaf_once_more(heap: CountedHeap) -> None:
    """Entries out of date are put right when they come up, and never twice for one use."""

    def use_all_then_evict(tree: RadixTree) -> None:
        for number in range(0, SIZES[0], 3):
            node = tree.match(np.array([number, 1, number, 2], np.int32), "").node
            tree.lock(node)
            tree.unlock(node)
        heap.calls = 0
        tree.evict(300)

    small, large = counts(heap, use_all_then_evict)
    assert large <= small <= 4 * SIZES[0]


def test_matching_looks_at_the_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    compare = RadixTree._common_tokens

    def counted(self: RadixTree, left: Any, right: Any) -> int:
        looked_at.append(len(left))
        return compare(self, left, right)

    monkeypatch.setattr(RadixTree, "_common_tokens", counted)
    work = []
    for size in SIZES:
        tree = tree_of(size)
        looked_at.clear()
        found = tree.match(np.array([600, 1, 600, 3, 9, 9], np.int32), "")
        assert len(found.pages) == 2
        work.append(list(looked_at))
    assert work[0] == work[1] == [2, 2]
