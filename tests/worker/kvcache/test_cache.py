"""The KV pool's books: page tables, duplicates, and pages that are never in two places."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.kvcache.allocator import IntegrityError, PageAllocator
from services.worker.kvcache.cache import KVCache
from services.worker.kvcache.prefix_cache import TokenArray


def run_of(length: int) -> TokenArray:
    return np.arange(length, dtype=np.int32)


def test_the_allocator_gives_all_or_nothing() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(3)
    assert pages is not None
    assert allocator.allocate(2) is None
    assert allocator.num_free == 1
    allocator.free(pages)
    with pytest.raises(IntegrityError):
        allocator.free([pages[0]])


def test_a_duplicate_prefix_is_remapped_before_its_pages_are_freed() -> None:
    cache = KVCache(num_pages=8, page_size=4)
    prompt = run_of(9)
    first, second = cache.open(prompt, ""), cache.open(prompt, "")
    assert cache.extend(first, 9)
    assert cache.extend(second, 9)
    assert cache.store(first, prompt) == []
    own = second.pages[:2]
    loose = cache.store(second, prompt)
    assert loose == own
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    cache.check_integrity([first, second], loose)
    cache.free(loose)
    third = cache.open(run_of(100)[50:], "")
    assert cache.extend(third, 16)
    assert not set(third.pages) & {*first.pages, *second.pages}
    cache.check_integrity([first, second, third])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_cached_prompt_leaves_one_token_to_compute(page_size: int) -> None:
    cache = KVCache(num_pages=16, page_size=page_size)
    prompt = run_of(2 * page_size)
    table = cache.open(prompt, "")
    cache.extend(table, len(prompt))
    cache.store(table, prompt)
    cache.free(cache.close(table))
    again = cache.open(prompt, "")
    assert again.num_shared * page_size == (len(prompt) - 1) // page_size * page_size
    cache.free(cache.close(again))
    assert cache.open(prompt, "", reuse=False).num_shared == 0


def test_extending_evicts_only_what_is_missing() -> None:
    cache = KVCache(num_pages=4, page_size=1)
    table = cache.open(run_of(3), "")
    cache.extend(table, 3)
    cache.store(table, run_of(3))
    cache.free(cache.close(table))
    assert (cache.num_free, cache.num_evictable) == (1, 3)
    other = cache.open(run_of(100)[90:], "")
    assert cache.extend(other, 2)
    assert (cache.num_free, cache.num_evictable, cache.num_in_flight) == (0, 2, 2)
    assert not cache.extend(other, 5)
    assert cache.extend(other, 4)
    cache.check_integrity([other])


def test_the_check_sees_a_page_in_two_places() -> None:
    cache = KVCache(num_pages=4, page_size=1)
    table = cache.open(run_of(2), "")
    cache.extend(table, 2)
    with pytest.raises(IntegrityError):
        cache.check_integrity([])
    cache.check_integrity([table])
    with pytest.raises(IntegrityError):
        cache.check_integrity([table], [table.pages[0]])


def test_without_a_prefix_cache_every_page_stays_its_owner_s() -> None:
    cache = KVCache(num_pages=4, page_size=1, kind="none")
    table = cache.open(run_of(3), "")
    cache.extend(table, 3)
    assert cache.store(table, run_of(3)) == []
    cache.check_integrity([table])
    cache.free(cache.close(table))
    assert cache.num_free == 4
    assert cache.open(run_of(3), "").pages == []
    assert cache.flush() == 0


def test_flushing_frees_what_nobody_uses() -> None:
    cache = KVCache(num_pages=8, page_size=1)
    table = cache.open(run_of(4), "")
    cache.extend(table, 4)
    cache.store(table, run_of(4))
    assert cache.flush() == 0
    cache.free(cache.close(table))
    assert cache.flush() == 4
    assert cache.num_free == 8
