"""Files that others replace while we run: certificates, lists of keys.

A change is seen by time, size and inode, so a replaced symbolic link, which is how
Kubernetes swaps a mounted secret, counts as one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_Signature = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Tells whether any of some files has changed since it was last asked."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(path for path in paths if path)
        self._seen = self._signature()

    def changed(self) -> bool:
        """True once after each change, a file's coming and going included."""
        seen, self._seen = self._seen, self._signature()
        return seen != self._seen

    def _signature(self) -> _Signature:
        return tuple(map(_stat, self._paths))


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
