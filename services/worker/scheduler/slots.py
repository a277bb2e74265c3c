"""Slots of running requests, and their page tables as the engine reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.worker.core import IntArray


class SlotTables:
    """Hands out slots 0 .. num_slots - 1 and keeps one row of page ids for each."""

    def __init__(self, num_slots: int, dummy_page: int) -> None:
        self._dummy_page = dummy_page
        self._free = list(range(num_slots - 1, -1, -1))
        self._pages = np.full((num_slots, 16), dummy_page, np.int32)  # [slots, pages]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, pages: Sequence[int]) -> int:
        """Takes a slot for a request with these pages. There must be a free one."""
        slot = self._free.pop()
        self._pages[slot] = self._dummy_page
        self.write(slot, 0, pages)
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back."""
        assert slot not in self._free
        self._free.append(slot)

    def write(self, slot: int, start: int, pages: Sequence[int]) -> None:
        """Puts pages into a slot's row from index `start` on."""
        end = start + len(pages)
        width = self._pages.shape[1]
        if end > width:
            wider = np.full((len(self._pages), max(end, 2 * width)), self._dummy_page, np.int32)
            wider[:, :width] = self._pages
            self._pages = wider
        self._pages[slot, start:end] = pages

    def rows(self, slots: IntArray, width: int) -> IntArray:
        """A copy of some rows, `width` pages wide; # [rows, pages]"""
        return self._pages[:, :width][slots]
