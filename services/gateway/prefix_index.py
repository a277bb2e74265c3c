"""Which workers are believed to hold which prefixes, by the hashes of their 64-token blocks.

Two sources say so: the digests in the workers' frames, and what this gateway has sent
itself, which a digest will only tell seconds later. The index is turned around, hash to
addresses, so that a look-up costs the same with one worker as with a thousand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

MAX_SENT = 1024  # hashes kept for each worker of what was sent there, as many as a digest has

_NOTHING: frozenset[int] = frozenset()


class PrefixIndex:
    """Hash -> the addresses that hold it. `report`, `sent` and `forget` write, `longest` reads."""

    def __init__(self, max_sent: int = MAX_SENT) -> None:
        self._max_sent = max_sent
        self._holders: dict[int, set[str]] = {}
        self._reported: dict[str, frozenset[int]] = {}
        self._sent: dict[str, OrderedDict[int, None]] = {}

    def report(self, address: str, digest: Collection[int]) -> None:
        """A worker's digest: replaces its last one. One that becomes empty was flushed, and
        what was sent there is gone too."""
        old, new = self._reported.get(address, _NOTHING), frozenset(digest)
        if old and not new:
            self.forget(address)
            return
        self._reported[address] = new
        for value in new - old:
            self._holders.setdefault(value, set()).add(address)
        sent = self._sent.get(address, ())
        for value in old - new:
            if value not in sent:
                self._drop(address, value)

    def sent(self, address: str, hashes: Sequence[int]) -> None:
        """A prompt with these prefixes goes to a worker, which will hold them."""
        known = self._sent.setdefault(address, OrderedDict())
        for value in hashes:
            known[value] = None
            known.move_to_end(value)
            self._holders.setdefault(value, set()).add(address)
        reported = self._reported.get(address, _NOTHING)
        while len(known) > self._max_sent:
            value, _ = known.popitem(last=False)
            if value not in reported:
                self._drop(address, value)

    def forget(self, address: str) -> None:
        """A worker restarted, was flushed or is gone: it holds nothing that is known."""
        reported = self._reported.pop(address, _NOTHING)
        for value in reported.union(self._sent.pop(address, ())):
            self._drop(address, value)

    def longest(self, hashes: Sequence[int], among: Collection[str]) -> set[str]:
        """Those of some addresses that hold the longest prefix; empty if none holds any.

        `hashes` are a prompt's, shortest prefix first. A digest is bounded, newest first:
        any block that is known vouches for those before it.
        """
        for value in reversed(hashes):
            if holders := self._holders.get(value):
                found = {address for address in holders if address in among}
                if found:
                    return found
        return set()

    def held_by(self, address: str) -> set[int]:
        """Every hash that one worker is believed to hold."""
        reported = self._reported.get(address, _NOTHING)
        return {*reported, *self._sent.get(address, ())}

    def __len__(self) -> int:
        """Different hashes known."""
        return len(self._holders)

    def _drop(self, address: str, value: int) -> None:
        holders = self._holders[value]
        holders.discard(address)
        if not holders:
            del self._holders[value]
