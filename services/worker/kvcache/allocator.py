"""Which pages of the KV pool are free.

It owns the free list and nothing else: who holds a page that is not free, and what is
written there, it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence


class IntegrityError(AssertionError):
    """The books of the KV pool do not balance: a fault of Shoal, after which no page is safe."""


class PageAllocator:
    """Hands out the pages 0 .. num_pages - 1. The page freed last is used first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Takes pages, all or none; None if there are not enough."""
        if num_pages > len(self._free):
            return None
        start = len(self._free) - num_pages
        pages = self._free[start:]
        del self._free[start:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Gives pages back. Raises IntegrityError for one that is free already."""
        for page in pages:
            if self._is_free[page]:
                raise IntegrityError(f"page {page} was freed twice")
            self._is_free[page] = 1
        self._free.extend(pages)

    def is_free(self, page: int) -> bool:
        return bool(self._is_free[page])

    def free_pages(self) -> list[int]:
        """The free pages, for checks."""
        return list(self._free)
