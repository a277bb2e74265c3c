"""The KV pool's books: who holds which page, at every moment.

Every page is in exactly one place:

    free        in the allocator
    evictable   in the prefix cache, no running request uses it
    locked      in the prefix cache, at least one running request uses it
    in flight   owned by one page table, or just taken from one and not yet freed

The scheduler alone calls this. What is written in a page it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from services.worker.kvcache.allocator import IntegrityError, PageAllocator
from services.worker.kvcache.prefix_cache import NoPrefixCache, PrefixCache, TokenArray
from services.worker.kvcache.radix_tree import RadixTree


class PageTable:
    """The pages of one request, in order of position.

    The first `num_shared` belong to the prefix cache and are locked by `node`; the rest
    are the request's own.
    """

    __slots__ = ("node", "num_shared", "pages", "salt")

    def __init__(self, node: Any, pages: list[int], salt: str) -> None:
        self.node = node
        self.pages = pages
        self.num_shared = len(pages)
        self.salt = salt


class KVCache:
    """Page allocator and prefix cache together. The dummy page, `num_pages`, is nobody's."""

    def __init__(
        self, num_pages: int, page_size: int, kind: Literal["radix", "none"] = "radix"
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._allocator = PageAllocator(num_pages)
        self._prefixes: PrefixCache[Any]
        self._prefixes = RadixTree(page_size) if kind == "radix" else NoPrefixCache()

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_evictable(self) -> int:
        return self._prefixes.num_evictable

    @property
    def num_locked(self) -> int:
        return self._prefixes.num_locked

    @property
    def num_in_flight(self) -> int:
        return self.num_pages - self.num_free - self.num_evictable - self.num_locked

    @property
    def num_available(self) -> int:
        """Pages that `extend` can give out."""
        return self.num_free + self.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def open(self, token_ids: TokenArray, salt: str, *, reuse: bool = True) -> PageTable:
        """A page table that begins with the cached prefix, locked, of a request's ids.

        At least one id is left to be computed: the one whose logits are sampled. Without
        `reuse` all are.
        """
        found = self._prefixes.match(token_ids[: len(token_ids) - 1 if reuse else 0], salt)
        self._prefixes.lock(found.node)
        return PageTable(found.node, list(found.pages), salt)

    def cached_tokens(self, token_ids: TokenArray, salt: str) -> int:
        """How many of a request's ids `open` would find cached; uses nothing up."""
        found = self._prefixes.match(token_ids[: len(token_ids) - 1], salt)
        return len(found.pages) * self.page_size

    def extend(self, table: PageTable, num_tokens: int) -> bool:
        """Adds pages until the table holds `num_tokens`, evicting prefixes if need be.

        Returns False, with nothing changed but the evictions, if the pool has not enough.
        """
        missing = self.pages_for(num_tokens) - len(table.pages)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        if missing > self.num_free:
            self._allocator.free(self._prefixes.evict(missing - self.num_free))
        pages = self._allocator.allocate(missing)
        assert pages is not None, "evictable pages could not be evicted"
        table.pages += pages
        return True

    # tokens   0           shared            cached before        computed
    #          |--------------|--------------------|------------------|---|
    # before   | tree, locked |              the request's own            |
    # insert   | tree         | tree, twice        | new in tree      |own|
    # after    |        tree, locked by the new node                  |own|
    #                         |--- answered ---|                      ^ last whole page
    #
    # Where another request has cached the same ids first ("twice") the tree's pages take
    # the place of the request's own in its table, and the own ones are answered.
    def store(self, table: PageTable, token_ids: TokenArray) -> list[int]:
        """Caches the whole pages of a request's computed ids, all `token_ids`.

        Returns the pages that the table no longer uses. The caller frees them when no
        batch reads them any more.
        """
        num_pages = len(token_ids) // self.page_size
        if num_pages <= table.num_shared:
            return []
        own = table.pages[:num_pages]
        stored = self._prefixes.insert(token_ids[: num_pages * self.page_size], own, table.salt)
        if not stored.pages:
            return []
        self._prefixes.lock(stored.node)  # before unlocking the old: nothing in between is free
        self._prefixes.unlock(table.node)
        table.node = stored.node
        table.pages[:num_pages] = stored.pages
        table.num_shared = num_pages
        return [old for old, new in zip(own, stored.pages, strict=True) if old != new]

    def close(self, table: PageTable) -> list[int]:
        """Unlocks the shared pages; returns the request's own, for the caller to free."""
        self._prefixes.unlock(table.node)
        own = table.pages[table.num_shared :]
        table.pages, table.num_shared = [], 0
        return own

    def free(self, pages: Sequence[int]) -> None:
        """Frees pages that `store` or `close` answered. Raises IntegrityError on a repeat."""
        self._allocator.free(pages)

    def flush(self) -> int:
        """Forgets every prefix that no request uses; returns how many pages that freed."""
        pages = self._prefixes.evict(self.num_evictable)
        self._allocator.free(pages)
        return len(pages)

    def digest(self) -> list[int]:
        """Hashes of cached prefixes, newest first."""
        return self._prefixes.digest()

    def is_free(self, page: int) -> bool:
        """Whether nobody holds a page."""
        return self._allocator.is_free(page)

    def check_integrity(self, tables: Iterable[PageTable], loose: Iterable[int] = ()) -> None:
        """Checks that every page is in exactly one place.

        `loose` are pages answered by `store` or `close` and not freed yet. Raises
        IntegrityError.
        """
        self._prefixes.check_integrity()
        cached = self._prefixes.pages()
        held = [*self._allocator.free_pages(), *cached, *loose]
        in_tree = set(cached)
        for table in tables:
            held += table.pages[table.num_shared :]
            if not in_tree.issuperset(table.pages[: table.num_shared]):
                raise IntegrityError("a page table shares a page that the prefix cache gave up")
        if sorted(held) != list(range(self.num_pages)):
            raise IntegrityError("a page is lost, or in two places at once")
