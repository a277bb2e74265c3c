"""A core with scripted peers around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.gateway.config import GatewayConfig
from services.gateway.core import Core
from services.gateway.domain import Chunk, GenerationRequest, Prompt, Sampling, TextPrompt
from services.gateway.live import LiveGeneration
from services.gateway.peers.fleet import PeerFleet
from services.gateway.peers.session import SessionTimes
from tests.gateway.core.fakes import Activity, FakeDetokenizer, FakeTokenizer, FakeWorker, serving


class Rig:
    """A core and its fakes."""

    def __init__(
        self,
        core: Core,
        registry: CollectorRegistry,
        workers: list[FakeWorker],
        tokenizers: list[FakeTokenizer],
        detokenizers: list[FakeDetokenizer],
        activity: Activity,
    ) -> None:
        self.core = core
        self.activity = activity
        self.registry = registry
        self.workers = workers
        self.tokenizers = tokenizers
        self.detokenizers = detokenizers
        self.worker = workers[0]
        self.tokenizer = tokenizers[0]
        self.detokenizer = detokenizers[0]

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits for something that a peer hears to bring a condition about."""
        await self.activity.until(condition)

    async def until_fleet(self, condition: Callable[[PeerFleet], object]) -> None:
        """Waits for peers to come or go."""
        seen = -1
        async with asyncio.timeout(10):
            while not condition(self.core.fleet):
                seen = await self.core.fleet.change(seen)

    def assert_nothing_left(self) -> None:
        """No handle in any table of the gateway, as its own gauges tell."""
        for peer in ("worker", "tokenizer", "detokenizer"):
            value = self.registry.get_sample_value("shoal_gateway_handles", {"peer": peer})
            assert value == 0, peer
        assert self.core.num_requests == 0

    async def settled(self) -> None:
        """Nothing is left, here and at the peers."""
        self.assert_nothing_left()
        await self.until(lambda: not any(worker.running for worker in self.workers))
        await self.until(lambda: not any(fake.texts for fake in self.detokenizers))


def request(prompt: str | Prompt = "hello", **changes: Any) -> GenerationRequest:
    """A request of 10 tokens, with changes to it or (by their names) to its sampling."""
    names = set(Sampling.__struct_fields__)
    sampling = {name: changes.pop(name) for name in list(changes) if name in names}
    sampling.setdefault("max_tokens", 10)
    changes.setdefault("model", "")
    if isinstance(prompt, str):
        prompt = TextPrompt(prompt)
    return GenerationRequest("test", prompt=prompt, sampling=Sampling(**sampling), **changes)


async def collect(generation: LiveGeneration) -> list[Chunk]:
    async with asyncio.timeout(20):
        return [chunk async for chunk in generation]


def joined(chunks: list[Chunk], index: int = 0) -> tuple[str, list[int]]:
    """A choice's text and ids."""
    mine = [chunk for chunk in chunks if chunk.index == index]
    return "".join(chunk.text for chunk in mine), [i for chunk in mine for i in chunk.token_ids]


@asynccontextmanager
async def make_rig(
    tmp_path: Path,
    *,
    workers: int = 1,
    tokenizers: int = 1,
    detokenizers: int = 1,
    times: SessionTimes | None = None,
    ready: bool = True,
    **options: Any,
) -> AsyncIterator[Rig]:
    activity = Activity()
    fakes = (
        [FakeWorker(tmp_path / f"w{i}", activity) for i in range(workers)],
        [FakeTokenizer(tmp_path / f"t{i}", activity) for i in range(tokenizers)],
        [FakeDetokenizer(tmp_path / f"d{i}", activity) for i in range(detokenizers)],
    )
    config = GatewayConfig(
        worker_addresses=tuple(fake.server.address for fake in fakes[0]),
        tokenizer_addresses=tuple(fake.server.address for fake in fakes[1]),
        detokenizer_addresses=tuple(fake.server.address for fake in fakes[2]),
        **options,
    )
    registry = CollectorRegistry()
    times = times or SessionTimes(min_backoff=0.01, max_backoff=0.05)
    async with serving(*fakes[0], *fakes[1], *fakes[2]):
        core = Core(config, registry, times=times)
        task = asyncio.create_task(core.run())
        rig = Rig(core, registry, *fakes, activity)
        try:
            if ready:
                await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == workers)
                await rig.until_fleet(lambda fleet: len(fleet.tokenizers.ready) == tokenizers)
                await rig.until_fleet(lambda fleet: len(fleet.detokenizers.ready) == detokenizers)
            yield rig
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with make_rig(tmp_path) as rig:
        yield rig
