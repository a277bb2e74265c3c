"""Faults drawn at random from a seed, and what each does to a fleet.

A fault takes its instances for as long as it lasts, until they are ready again, so that
another never meets them half-way; and it leaves at least one instance of each service
untouched, but for the fault that is about having none.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.chaos.client import Manner, Unanswered, ask
from tests.chaos.fleet import Fleet
from tests.chaos.instance import Instance, Role
from tests.chaos.proxy import CALM, Weather

_AWAY_SECONDS = 5.0  # that all tokenizers are gone
_STORM = 40  # clients


@dataclass(slots=True)
class Fault:
    """One that happened; times are the loop's."""

    kind: str
    target: str
    begin: float
    end: float = 0.0
    pause: float = 0.0  # the longest silence of any stream around it


Act = Callable[[Fleet, Instance, random.Random], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: what it does, to which services, how often it is drawn."""

    name: str
    act: Act
    roles: tuple[Role, ...]
    weight: float = 1.0
    whole_service: bool = False  # takes every instance of the role


async def _kill(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    starts = instance.starts
    instance.kill()
    await instance.restarted(starts)


async def _kill_rank(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    starts = instance.starts
    if instance.signal_rank(signal.SIGKILL):
        await instance.restarted(starts)


async def _freeze(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    """Shorter or longer than the five seconds after which a silent peer is dead."""
    instance.send(signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(6, 8) if rng.random() < 0.3 else rng.uniform(0.2, 2))
    instance.send(signal.SIGCONT)
    await instance.ready()


async def _freeze_rank(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    """Shorter or longer than the ten seconds that a silent engine is given."""
    starts = instance.starts
    if not instance.signal_rank(signal.SIGSTOP):
        return
    if rng.random() < 0.2:
        await instance.restarted(starts)
        return
    await asyncio.sleep(rng.uniform(0.2, 3))
    instance.signal_rank(signal.SIGCONT)
    await instance.ready()


async def _reset(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    for link in fleet.links_to(instance):
        link.reset()
    await asyncio.sleep(rng.uniform(0.2, 0.5))


async def _bad_weather(
    fleet: Fleet, instance: Instance, weather: Weather, seconds: float, *, only: int | None = None
) -> None:
    links = fleet.links_to(instance)
    chosen = links if only is None else [links[only]]
    try:
        for link in chosen:
            link.weather = weather
        await asyncio.sleep(seconds)
    finally:
        for link in chosen:
            link.weather = CALM


async def _latency(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    await _bad_weather(fleet, instance, Weather(latency=0.3), rng.uniform(1, 4))


async def _loss(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    await _bad_weather(fleet, instance, Weather(loss=0.05), rng.uniform(2, 5))


async def _partition(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    """From one gateway or from all; healed before or after both sides have given up."""
    seconds = rng.uniform(6, 9) if rng.random() < 0.4 else rng.uniform(0.5, 3)
    only = rng.randrange(fleet.shape.gateways) if rng.random() < 0.5 else None
    await _bad_weather(fleet, instance, Weather(partitioned=True), seconds, only=only)


async def _restart(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    """SIGTERM: it drains, ends with status 0 and is started again."""
    starts = instance.starts
    instance.send(signal.SIGTERM, exits=(0,))
    await instance.restarted(starts)


async def _roll(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    """A rolling update: each instance of the service, one after the other."""
    for each in fleet.of(instance.role):
        await _restart(fleet, each, rng)


async def _all_gone(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    instances = fleet.of(instance.role)
    starts = [each.starts for each in instances]
    for each in instances:
        each.hold_down()
    await asyncio.sleep(_AWAY_SECONDS)
    for each in instances:
        each.let_up()
    for each, number in zip(instances, starts, strict=True):
        await each.restarted(number)


async def _flap(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    """It dies again as soon as it is back."""
    for _ in range(rng.randint(2, 3)):
        await _kill(fleet, instance, rng)


async def _flapping_link(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    for _ in range(rng.randint(3, 6)):
        await _reset(fleet, instance, rng)


async def _storm(fleet: Fleet, instance: Instance, rng: random.Random) -> None:
    """Many clients come, and leave all at once, some without a word."""

    async def one(number: int) -> None:
        body = {"prompt": f"storm {number}", "max_tokens": 4000, "stream": True}
        leaving = Manner("leave", after=rng.randint(0, 10), reset=number % 2 == 0)
        try:
            async with asyncio.timeout(1.5):
                await ask(instance.address, "/v1/completions", body, leaving)
        except (TimeoutError, Unanswered, OSError, EOFError):
            return  # it left, or its gateway did

    await asyncio.gather(*(one(number) for number in range(_STORM)))


_BEHIND: tuple[Role, ...] = ("worker", "tokenizer", "detokenizer")

KINDS: tuple[Kind, ...] = (
    Kind("kill", _kill, _BEHIND, 3),
    Kind("kill rank", _kill_rank, ("worker",)),
    Kind("freeze", _freeze, _BEHIND, 3),
    Kind("freeze rank", _freeze_rank, ("worker",)),
    Kind("reset", _reset, _BEHIND, 4),
    Kind("latency 300 ms", _latency, _BEHIND, 2),
    Kind("loss 5 %", _loss, _BEHIND, 2),
    Kind("partition", _partition, _BEHIND, 3),
    Kind("restart", _restart, ("worker",), 1.5),
    Kind("rolling update", _roll, (*_BEHIND, "gateway"), 0.8, whole_service=True),
    Kind("all gone for 5 s", _all_gone, ("tokenizer",), 0.3, whole_service=True),
    Kind("flapping instance", _flap, _BEHIND, 0.6),
    Kind("flapping link", _flapping_link, _BEHIND),
    Kind("disconnect storm", _storm, ("gateway",), 1),
)


class Chaos:
    """Draws faults one after the other, several at work at a time."""

    def __init__(self, fleet: Fleet, rng: random.Random, kinds: Sequence[Kind] = KINDS) -> None:
        self.done: list[Fault] = []
        self._fleet = fleet
        self._rng = rng
        self._kinds = kinds
        self._taken: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()

    @property
    def counts(self) -> Counter[str]:
        """Faults so far, by kind."""
        return Counter(fault.kind for fault in self.done)

    async def run(self, enough: Callable[[], bool], mean_pause: float) -> None:
        """Causes faults until `enough` says so, then waits until all are over."""
        try:
            while not enough():
                kind, instance = await self._draw()
                task = asyncio.create_task(self._cause(kind, instance), name=kind.name)
                self._tasks.add(task)
                await asyncio.sleep(self._rng.expovariate(1 / mean_pause))
                for ended in [task for task in self._tasks if task.done()]:
                    self._tasks.discard(ended)
                    ended.result()
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _draw(self) -> tuple[Kind, Instance]:
        """A kind and an instance that are free; waits until there are.

        Every kind comes once before the dice decide, so that a short run has them all.
        """
        while True:
            free = {kind: found for kind in self._kinds if (found := self._candidates(kind))}
            unseen = [kind for kind in free if kind.name not in self._seen()]
            kinds = unseen or list(free)
            if kinds:
                kind = self._rng.choices(kinds, [kind.weight for kind in kinds])[0]
                return kind, self._rng.choice(free[kind])
            self._freed.clear()
            await self._freed.wait()

    def _candidates(self, kind: Kind) -> list[Instance]:
        return [
            instance
            for role in kind.roles
            for instance in self._fleet.of(role)
            if self._is_free(kind, instance)
        ]

    def _seen(self) -> set[str]:
        return {fault.kind for fault in self.done} | {task.get_name() for task in self._tasks}

    def _is_free(self, kind: Kind, instance: Instance) -> bool:
        group = [each.name for each in self._fleet.of(instance.role)]
        taken = [name for name in group if name in self._taken]
        if kind.whole_service:
            return not taken
        return instance.name not in self._taken and len(taken) + 1 < max(len(group), 2)

    async def _cause(self, kind: Kind, instance: Instance) -> None:
        clock = asyncio.get_running_loop().time
        group = self._fleet.of(instance.role) if kind.whole_service else [instance]
        names = {each.name for each in group}
        self._taken |= names
        fault = Fault(kind.name, instance.name, clock())
        try:
            await kind.act(self._fleet, instance, self._rng)
        finally:
            fault.end = clock()
            self.done.append(fault)
            self._taken -= names
            self._freed.set()
