"""A bounded list of the prefixes that a cache holds, for routing.

It owns the order and the bound; hashing is `services.common.prefix_hash`'s, and which
prefixes are still held is its user's to say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class PrefixDigest:
    """The most recently used prefix hashes, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def touch(self, hashes: Iterable[int]) -> None:
        """Makes these the newest, the last one first of all."""
        for value in hashes:
            self._hashes[value] = None
            self._hashes.move_to_end(value)
        while len(self._hashes) > self._limit:
            self._hashes.popitem(last=False)

    def discard(self, hashes: Iterable[int]) -> None:
        """Forgets these; those already pushed out by the bound are ignored."""
        for value in hashes:
            self._hashes.pop(value, None)

    def newest(self) -> list[int]:
        """All hashes, newest first."""
        return list(reversed(self._hashes))
