"""Where peers are: one interface, many sources.

A source yields the whole set of addresses whenever it changes. A source that
cannot ask any more keeps silent, so that the last known set stays in use.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol


class AddressSource(Protocol):
    """A changing set of addresses, each `host:port` or `unix:/path`."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """The set now, and again after every change; ends if it can never change."""
        ...


class StaticAddresses:
    """Addresses from the command line."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        yield self._addresses
