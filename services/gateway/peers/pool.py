"""All peers of one kind: starts and ends their sessions as addresses come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from services.common.tls import NO_TLS, TlsFiles
from services.gateway.discovery import AddressSource
from services.gateway.peers.session import Peer

P = TypeVar("P", bound=Peer[Any, Any, Any])


class PeerPool(Generic[P]):
    """Follows an address source.

    An address that disappears takes no new work and keeps its session until its open
    handles have ended; one that comes back meanwhile is used again.
    """

    def __init__(
        self,
        source: AddressSource,
        make: Callable[[str], P],
        files: TlsFiles = NO_TLS,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called when addresses have come or gone."""
        self._source = source
        self._make = make
        self._tls = files
        self._changed = changed
        self._peers: dict[str, P] = {}
        self._wanted: frozenset[str] = frozenset()
        self._sessions: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[P]:
        """The peers whose addresses are wanted, connected or not."""
        return (peer for address, peer in self._peers.items() if address in self._wanted)

    @property
    def ready(self) -> list[P]:
        """The peers that take new work."""
        wanted = self._wanted
        return [peer for address, peer in self._peers.items() if address in wanted and peer.ready]

    @property
    def num_handles(self) -> int:
        """Open handles, over all sessions."""
        return sum(peer.outstanding for peer in self._peers.values())

    async def run(self) -> None:
        """Keeps sessions to the addresses of the source until cancelled."""
        try:
            async for addresses in self._source.watch():
                self._apply(addresses)
            await asyncio.Event().wait()
        finally:
            sessions = list(self._sessions.values())
            for session in sessions:
                session.cancel()
            await asyncio.gather(*sessions, return_exceptions=True)

    def release_unwanted(self) -> None:
        """Ends sessions to addresses that disappeared and have no work left."""
        for address, peer in list(self._peers.items()):
            if address not in self._wanted and not peer.outstanding:
                del self._peers[address]
                self._sessions.pop(address).cancel()

    def _release_soon(self) -> None:
        """Releases once the caller, who may be in the middle of a frame, is done."""
        if len(self._peers) > len(self._wanted):  # all wanted addresses have peers
            asyncio.get_running_loop().call_soon(self.release_unwanted)

    def _apply(self, addresses: frozenset[str]) -> None:
        self._wanted = addresses
        for address in sorted(addresses - self._peers.keys()):
            peer = self._peers[address] = self._make(address)
            peer.on_idle = self._release_soon
            peer.tls = self._tls
            self._sessions[address] = asyncio.create_task(peer.run())
        self.release_unwanted()
        self._changed()
