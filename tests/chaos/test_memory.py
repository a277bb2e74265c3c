"""Memory is flat over many requests, and nothing of them stays open in any process."""

from __future__ import annotations

import random
from statistics import median

import pytest

from tests.chaos import leftovers
from tests.chaos.conftest import FULL
from tests.chaos.fleet import Fleet, Shape, running_fleet
from tests.chaos.load import Load

_WARM_REQUESTS = 1500  # until caches that have a size have it
_REQUESTS = 10_000
_LOOK_EVERY = 200  # requests
_CLIENTS = 16
_TOKENS = (4, 24)
_SHAPE = Shape(
    workers=2,
    worker_flags=("--engine=fake", "--num-pages=2048"),
    gateway_flags=("--hold-timeout=30",),
)
# Growth of the median from the first half to the second. A byte a token would be 140 KB; an
# allocator that settles takes a few hundred KB, whatever the number of requests.
_ALLOWED_BYTES = 2 << 20


@pytest.mark.skipif(not FULL, reason="SHOAL_FULL=1 runs it: ten thousand requests")
async def test_memory_is_flat_over_ten_thousand_requests(seed: int, rng: random.Random) -> None:
    async with running_fleet(_SHAPE, rng) as fleet:
        await _send(fleet, rng, _WARM_REQUESTS)
        await leftovers.nothing_held(fleet)
        baseline = await leftovers.footprints(fleet)
        samples: list[dict[str, int]] = []
        for _ in range(_REQUESTS // _LOOK_EVERY):
            await _send(fleet, rng, _LOOK_EVERY)
            samples.append(leftovers.resident_bytes(fleet))
        await leftovers.nothing_held(fleet)
        await leftovers.back_to(baseline, fleet)
    growth = {}
    half = len(samples) // 2
    for name in samples[0]:
        first, second = (
            median(sample[name] for sample in part) for part in (samples[:half], samples[half:])
        )
        growth[name] = second - first
        print(
            f"{name}: {first / 2**20:.1f} MiB, then {second / 2**20:.1f} MiB"
            f" ({growth[name] / 1024:+.0f} KiB)"
        )
    too_much = {name: grown for name, grown in growth.items() if grown > _ALLOWED_BYTES}
    assert not too_much, too_much


async def _send(fleet: Fleet, rng: random.Random, number: int) -> None:
    load = Load(fleet, random.Random(rng.random()), _TOKENS)
    tally = load.tally
    await load.run(_CLIENTS, lambda: sum(tally.manners.values()) >= number)
    assert not tally.problems, tally.problems[:5]
