"""Every address behind a DNS name, asked again and again.

Made for headless Services, whose name resolves to the addresses of the ready pods.
gRPC's own resolver asks only when a connection breaks, which misses new pods.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from services.gateway.discovery.sources import join_host_port

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[list[str]]]
"""A name's addresses. Raises socket.gaierror."""

REFRESH_SECONDS = 3.0

# The name exists no more, or has no address: an answer, not a failure to get one.
_NO_ADDRESS = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


async def resolve(name: str) -> list[str]:
    """The system resolver's addresses, IPv4 and IPv6."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in answers]


class DnsAddresses:
    """The addresses behind `name`, each with `port`.

    A dual-stack name counts as its IPv4 addresses: both kinds lead to the same pods.
    """

    def __init__(
        self,
        name: str,
        port: int,
        *,
        refresh: float = REFRESH_SECONDS,
        resolve: Resolve = resolve,
    ) -> None:
        self._name = name
        self._port = port
        self._refresh = refresh
        self._resolve = resolve

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        known: frozenset[str] | None = None
        failing = False
        while True:
            try:
                found = self._join(await self._ask())
            except OSError as error:
                if not failing:
                    log.warning("cannot resolve %s, keeping what is known: %s", self._name, error)
                failing = True
            else:
                if failing:
                    log.info("%s resolves again", self._name)
                failing = False
                if found != known:
                    known = found
                    yield found
            await asyncio.sleep(self._refresh)

    async def _ask(self) -> list[str]:
        try:
            return await self._resolve(self._name)
        except socket.gaierror as error:
            if error.errno in _NO_ADDRESS:
                return []
            raise

    def _join(self, hosts: list[str]) -> frozenset[str]:
        chosen = [host for host in hosts if ":" not in host] or hosts
        return frozenset(join_host_port(host, self._port) for host in chosen)
