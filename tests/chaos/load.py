"""Many clients at once, each answer judged as soon as it is there."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.cases import Case, draw_case, judge, prompt_ids_of, with_stop
from tests.chaos.client import Answer, Unanswered, ask
from tests.chaos.fleet import Fleet
from tests.chaos.instance import Instance, until

_ANSWER_SECONDS = 120.0  # more than any rule allows: a request that takes longer hangs


@dataclass(slots=True)
class Tally:
    """What came of all requests."""

    streams: int = 0  # answered in full
    tokens: int = 0
    left: int = 0
    lost: int = 0
    doubled: int = 0
    refused: Counter[int] = field(default_factory=Counter)  # by status, by rule
    late: int = 0  # ended by the client's own deadline
    door_closed: int = 0  # connections that a gateway going away did not take
    manners: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)


class Load:
    """Clients that send one request after the other until they are told to stop."""

    def __init__(self, fleet: Fleet, rng: random.Random, tokens: tuple[int, int]) -> None:
        self.tally = Tally()
        self._fleet = fleet
        self._rng = rng
        self._tokens = tokens

    async def run(self, clients: int, enough: Callable[[], bool]) -> None:
        """Returns when `enough` says so and every open request has ended."""

        async def client() -> None:
            while not enough():
                await self._one()

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    async def _one(self) -> None:
        case = draw_case(self._rng, tokens=self._tokens)
        prompt_ids = prompt_ids_of(case)
        case = with_stop(case, prompt_ids)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await self._ask_open_gateway(case)
        except TimeoutError:
            self.tally.problems.append(f"no end within {_ANSWER_SECONDS:g} s: {case}")
            return
        except (OSError, EOFError, AssertionError, ValueError) as error:
            self.tally.problems.append(f"{type(error).__name__} {error}: {case}")
            return
        self._count(case, prompt_ids, answer)

    async def _ask_open_gateway(self, case: Case) -> Answer:
        """As a load balancer would: at a gateway that is not going away, again where one was."""
        while True:
            gateway = await self._open_gateway()
            try:
                answer = await ask(gateway.address, case.path, case.body, case.manner)
            except Unanswered as error:
                if gateway.open:
                    raise ValueError(f"{gateway.name} did not answer: {error}")
                self.tally.door_closed += 1
                continue
            if answer.status == 503 and not gateway.open:
                self.tally.refused[503] += 1
                continue
            return answer

    async def _open_gateway(self) -> Instance:
        async def one_is_open() -> bool:
            return any(gateway.open for gateway in self._fleet.gateways)

        await until(one_is_open, _ANSWER_SECONDS, "a gateway is open")
        return self._rng.choice([gateway for gateway in self._fleet.gateways if gateway.open])

    def _count(self, case: Case, prompt_ids: list[int], answer: Answer) -> None:
        tally = self.tally
        tally.manners[case.manner.kind] += 1
        tally.gaps += answer.gaps if case.manner.kind == "eager" else ()
        if answer.left and not answer.status:
            tally.left += 1
            return
        verdict = judge(case, prompt_ids, answer)
        if verdict.problems:
            tally.problems.append(f"{'; '.join(verdict.problems)}: {case}")
        tally.lost += verdict.lost
        tally.doubled += verdict.doubled
        tally.tokens += sum(len(choice.ids) for choice in answer.choices.values())
        if answer.status != 200:
            tally.refused[answer.status] += 1
        elif answer.error:
            tally.late += 1
        elif answer.left:
            tally.left += 1
        else:
            tally.streams += 1
