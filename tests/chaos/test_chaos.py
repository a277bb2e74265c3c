"""Faults under load: with the fake engine, every answer must be the undisturbed one exactly.

In CI a short form; `make chaos` runs at least 500 faults over 5,000 streams. The seed is
printed, and with SHOAL_CHAOS_SEED the same requests and faults are drawn again; how they
meet in time is the machine's.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

from tests.chaos import leftovers
from tests.chaos.faults import KINDS, Chaos
from tests.chaos.fleet import Fleet, Shape, running_fleet
from tests.chaos.load import Load
from tests.chaos.report import Report
from tests.full import FULL

_STREAMS = 5000 if FULL else 200
_FAULTS = 500 if FULL else 24
_CLIENTS = 40 if FULL else 24
_TOKENS = (40, 300) if FULL else (20, 150)
_MEAN_PAUSE = 0.8 if FULL else 0.5  # seconds between two faults
_SHAPE = Shape(
    # A pool so small that requests are evicted and preempted too.
    worker_flags=("--engine=fake", "--fake-step-ms=10", "--num-pages=512"),
    # Where a fault meets somebody every second, three moves a request are soon used up; that the
    # budget holds is tested by itself.
    gateway_flags=("--max-resumes=20", "--hold-timeout=30"),
)


async def test_every_stream_ends_as_if_nothing_had_happened(seed: int, rng: random.Random) -> None:
    async with running_fleet(_SHAPE, rng) as fleet:
        await _warm_up(fleet, rng)
        baseline = await leftovers.footprints(fleet)
        load = Load(fleet, random.Random(rng.random()), _TOKENS)
        chaos = Chaos(fleet, random.Random(rng.random()))
        watch = Moves(fleet)
        began = time.monotonic()

        def enough_faults() -> bool:
            have_all_kinds = len(chaos.counts) == len(KINDS)
            return have_all_kinds and len(chaos.done) >= _FAULTS and load.tally.streams >= _STREAMS

        faults = asyncio.create_task(chaos.run(enough_faults, _MEAN_PAUSE))
        beside = [
            asyncio.create_task(watch.run()),
            asyncio.create_task(_tell_progress(load, chaos)),
        ]
        try:
            await load.run(_CLIENTS, faults.done)
            await faults
        finally:
            for task in (faults, *beside):
                task.cancel()
            await asyncio.gather(faults, *beside, return_exceptions=True)
        await fleet.ready()
        await leftovers.nothing_held(fleet)
        await leftovers.back_to(baseline, fleet)
        await leftovers.whole_pool_is_usable(fleet)
        await watch.look()
        report = Report(seed, time.monotonic() - began, load.tally, chaos.done, watch.totals)
    print(report)
    _keep(f"{report}\n" + "\n".join(load.tally.problems))
    assert not load.tally.problems, "\n".join(load.tally.problems[:20])
    assert (load.tally.lost, load.tally.doubled) == (0, 0)
    assert len(chaos.done) >= _FAULTS
    assert watch.totals["worker"] > 0
    assert watch.totals["detokenizer"] > 0


async def _tell_progress(load: Load, chaos: Chaos) -> None:
    """Says every half minute how far it is."""
    while True:
        await asyncio.sleep(30)
        tally = load.tally
        print(
            f"{tally.streams} streams, {len(chaos.done)} faults, {len(tally.problems)} wrong",
            flush=True,
        )


def _keep(report: str) -> None:
    """Writes a report to the file that SHOAL_CHAOS_REPORT names, if it does."""
    if path := os.environ.get("SHOAL_CHAOS_REPORT"):
        Path(path).write_text(report)


async def _warm_up(fleet: Fleet, rng: random.Random) -> None:
    """A few requests everywhere, so that what is made once is made."""
    load = Load(fleet, random.Random(rng.random()), (5, 20))
    await load.run(8, lambda: load.tally.streams >= 60)
    assert not load.tally.problems, load.tally.problems
    await leftovers.nothing_held(fleet)


_MOVES = {
    "worker": 'shoal_gateway_resumes_total{peer="worker"}',
    "detokenizer": 'shoal_gateway_resumes_total{peer="detokenizer"}',
    "tokenizer": "shoal_gateway_reencodes_total",
}


class Moves:
    """Follows the gateways' counts of moves through their restarts."""

    def __init__(self, fleet: Fleet) -> None:
        self.totals = dict.fromkeys(_MOVES, 0)
        self._fleet = fleet
        self._last: dict[tuple[int, str], float] = {}

    async def run(self) -> None:
        """Looks every second, so that little is missed of a gateway that goes away."""
        while True:
            await self.look()
            await asyncio.sleep(1)

    async def look(self) -> None:
        for gateway in self._fleet.gateways:
            if not gateway.address:
                continue
            pid, metrics = gateway.pid, await gateway.metrics()
            for peer, name in _MOVES.items():
                value = metrics.get(name, 0.0)
                before = self._last.get((pid, peer), 0.0)
                self.totals[peer] += round(max(0.0, value - before))
                self._last[pid, peer] = max(value, before)
