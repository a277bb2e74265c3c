"""What a cache of prefixes must do, and the one that does nothing (`--cache none`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class Match(Generic[N]):
    """A cached prefix: the node at its end and its pages, whole ones only."""

    node: N
    pages: Sequence[int]


class PrefixCache(Protocol[N]):
    """Maps prefixes of token ids to pages. A page it holds is locked or evictable.

    `N` is the cache's own name for a prefix. An unlocked match is void after `insert` or
    `evict`.
    """

    @property
    def num_evictable(self) -> int: ...

    @property
    def num_locked(self) -> int: ...

    def match(self, token_ids: TokenArray, salt: str) -> Match[N]:
        """The longest cached prefix in whole pages; the root, with no pages, if none is."""
        ...

    def lock(self, node: N) -> None:
        """Keeps a prefix, its last node included, until `unlock`."""
        ...

    def unlock(self, node: N) -> None: ...

    def insert(self, token_ids: TokenArray, pages: Sequence[int], salt: str) -> Match[N]:
        """Takes over the pages of a prefix, `len(pages) * page_size` ids.

        Where the prefix was cached already the cache keeps its own pages: the answer
        holds the pages that count, and those offered in their place stay the caller's.
        """
        ...

    def evict(self, num_pages: int) -> list[int]:
        """Forgets least recently used prefixes and gives their pages up: at most
        `num_pages`, fewer only if the rest is locked."""
        ...

    def digest(self) -> list[int]:
        """Hashes of cached prefixes (`services.common.prefix_hash`), newest first."""
        ...

    def pages(self) -> list[int]:
        """All pages held, for checks."""
        ...

    def check_integrity(self) -> None:
        """Raises IntegrityError if the cache's own books do not balance."""
        ...


class NoPrefixCache:
    """Remembers nothing, so every page stays its request's own."""

    num_evictable = 0
    num_locked = 0

    def match(self, token_ids: TokenArray, salt: str) -> Match[None]:
        return Match(None, ())

    def lock(self, node: None) -> None:
        pass

    def unlock(self, node: None) -> None:
        pass

    def insert(self, token_ids: TokenArray, pages: Sequence[int], salt: str) -> Match[None]:
        return Match(None, ())

    def evict(self, num_pages: int) -> list[int]:
        return []

    def digest(self) -> list[int]:
        return []

    def pages(self) -> list[int]:
        return []

    def check_integrity(self) -> None:
        pass
