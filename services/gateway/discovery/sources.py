"""The interface to a changing set of addresses, and what needs no network for it.

A source yields the whole set of addresses whenever it changes. A source that
cannot ask any more keeps silent, so that the last known set stays in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
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


class MergedAddresses:
    """The union of several sources. One that is silent does not hold up the others."""

    def __init__(self, sources: Sequence[AddressSource]) -> None:
        self._sources = sources

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        watches = [source.watch() for source in self._sources]
        known: dict[int, frozenset[str]] = {}
        pending = {asyncio.ensure_future(anext(watch)): i for i, watch in enumerate(watches)}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = pending.pop(task)
                    if isinstance(task.exception(), StopAsyncIteration):
                        continue
                    known[index] = task.result()
                    pending[asyncio.ensure_future(anext(watches[index]))] = index
                yield frozenset().union(*known.values())
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)


def join_host_port(host: str, port: int) -> str:
    """`host:port` as gRPC reads it: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
