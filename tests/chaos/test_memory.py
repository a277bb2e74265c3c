"""Memory is flat over many requests, and nothing of them stays open in any process."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import median

from tests.chaos import leftovers
from tests.chaos.fleet import Fleet, Shape, running_fleet
from tests.chaos.load import Load
from tests.full import in_full_only

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

# A leak grows in every quarter; an allocator that takes one more arena, or a cache that
# fills, grows in one. A leaked request of 1 KiB would be 2.5 MB a quarter.
_ALLOWED_BYTES = 512 << 10


@in_full_only
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
    too_much = {}
    for name in samples[0]:
        levels = _quarters([sample[name] for sample in samples])
        steps = [after - before for before, after in pairwise(levels)]
        print(f"{name}: {', '.join(f'{level / 2**20:.2f}' for level in levels)} MiB")
        if min(steps) > _ALLOWED_BYTES:
            too_much[name] = steps
    assert not too_much, too_much


def _quarters(values: list[int]) -> list[float]:
    """The median of each quarter."""
    size = len(values) // 4
    return [median(values[i * size : (i + 1) * size]) for i in range(4)]


async def _send(fleet: Fleet, rng: random.Random, number: int) -> None:
    load = Load(fleet, random.Random(rng.random()), _TOKENS)
    tally = load.tally
    await load.run(_CLIENTS, lambda: sum(tally.manners.values()) >= number)
    assert not tally.problems, tally.problems[:5]
