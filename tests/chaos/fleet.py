"""A fleet whose services are processes of their own, with a bad network between them.

Every gateway has a link of its own to every instance behind it, so that one of them can be
cut off from an instance that the others still reach.

    client -> gateway-0 --link--> worker-0, worker-1, ... tokenizer-0, ... detokenizer-0, ...
           -> gateway-1 --link--> the same
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.instance import Instance, Role, until
from tests.chaos.proxy import Link

_BEHIND: tuple[Role, ...] = ("worker", "tokenizer", "detokenizer")


@dataclass(frozen=True, slots=True)
class Shape:
    """How many of each service there are, and their flags."""

    workers: int = 3
    tokenizers: int = 2
    detokenizers: int = 2
    gateways: int = 2
    model: str = "byte"
    worker_flags: tuple[str, ...] = ("--engine=fake", "--fake-step-ms=10")
    gateway_flags: tuple[str, ...] = ()

    def flags(self, role: Role, index: int) -> list[str]:
        """Of an instance behind the gateways. Of several workers the last hands its requests
        over when it drains; the others finish them."""
        flags = [f"--model={self.model}"] if self.model else []
        if role == "worker":
            flags += self.worker_flags
            if 0 < index == self.workers - 1:
                flags.append("--drain=handoff")
        return flags

    def count(self, role: Role) -> int:
        counts: dict[Role, int] = {
            "worker": self.workers,
            "tokenizer": self.tokenizers,
            "detokenizer": self.detokenizers,
            "gateway": self.gateways,
        }
        return counts[role]


class Fleet:
    """The instances and the links; make it with `running_fleet`."""

    def __init__(self, shape: Shape, directory: Path, rng: random.Random) -> None:
        self.shape = shape
        self.behind = [
            Instance(role, index, directory, shape.flags(role, index))
            for role in _BEHIND
            for index in range(shape.count(role))
        ]
        self.links: dict[tuple[int, str], Link] = {
            (gateway, instance.name): Link(str(instance.socket), rng)
            for gateway in range(shape.gateways)
            for instance in self.behind
        }
        self.gateways: list[Instance] = []
        self._directory = directory

    @property
    def instances(self) -> list[Instance]:
        return [*self.behind, *self.gateways]

    def of(self, role: Role) -> list[Instance]:
        return [instance for instance in self.instances if instance.role == role]

    def links_to(self, instance: Instance) -> list[Link]:
        """One for each gateway."""
        return [link for (_, name), link in self.links.items() if name == instance.name]

    async def start(self) -> None:
        """Returns when every instance is ready."""
        for link in self.links.values():
            await link.start()
        for instance in self.behind:
            instance.start()
        for index in range(self.shape.gateways):
            gateway = Instance("gateway", index, self._directory, self._gateway_flags(index))
            gateway.start()
            self.gateways.append(gateway)
        await self.ready()

    async def ready(self) -> None:
        """Returns when every instance takes work and every gateway reaches all of them."""
        for instance in self.instances:
            await instance.ready()
        for gateway in self.gateways:
            await until(lambda g=gateway: self._reaches_all(g), 60, f"{gateway.name} reaches all")  # type: ignore[misc]

    async def _reaches_all(self, gateway: Instance) -> bool:
        metrics = await gateway.metrics()
        return all(
            metrics.get(f'shoal_gateway_peers_ready{{peer="{role}"}}') == self.shape.count(role)
            for role in _BEHIND
            if self.shape.count(role)
        )

    def _gateway_flags(self, index: int) -> list[str]:
        flags = list(self.shape.gateway_flags)
        for role in _BEHIND:
            links = [
                self.links[index, instance.name].address
                for instance in self.behind
                if instance.role == role
            ]
            if links:
                flags.append(f"--{role}-addresses={','.join(links)}")
        return flags

    async def stop(self) -> list[str]:
        """Ends everything in order; returns what did not end as it should."""
        faults = []
        for group in (self.gateways, self.behind):
            statuses = await asyncio.gather(*(instance.stop() for instance in group))
            for instance, status in zip(group, statuses, strict=True):
                if status != 0:
                    faults.append(f"{instance.name} ended with status {status}")
        for link in self.links.values():
            await link.stop()
        return faults

    async def total(self, instances: Iterable[Instance], prefix: str) -> float:
        """A metric summed over instances and over all labels that follow `prefix`."""
        pages = [await instance.metrics() for instance in instances]
        return sum(
            value
            for page in pages
            for name, value in page.items()
            if name == prefix or name.startswith((prefix + "{", prefix + ","))
        )


@asynccontextmanager
async def running_fleet(shape: Shape, rng: random.Random) -> AsyncIterator[Fleet]:
    """A fleet that is ready, and that must leave nothing behind."""
    children_before = set(psutil.Process().children(recursive=True))
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        fleet = Fleet(shape, directory, rng)
        faults: list[str] = []
        try:
            await fleet.start()
            yield fleet
        finally:
            faults += await fleet.stop()
            unasked = [line for instance in fleet.instances for line in instance.unasked]
            logged = [
                f"{instance.name}: {line}"
                for instance in fleet.instances
                for line in instance.faults_logged()
            ]
        assert not faults, faults
        assert not unasked, unasked
        assert not logged, logged
        left = set(psutil.Process().children(recursive=True)) - children_before
        _, alive = psutil.wait_procs(list(left), timeout=10)
        assert not alive, [process.cmdline() for process in alive]
