"""Several prompts of one call: nothing is left open, however the caller leaves."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from services.common.errors import Overloaded
from services.gateway.domain import Chunk, GenerationRequest, TextPrompt
from services.gateway.openai.fanout import start_all

REQUESTS = [
    GenerationRequest(request_id="r", model="m", prompt=TextPrompt(text))
    for text in ("now", "next turn", "never", "no")
]


class Endless:
    """A generation that ends when it is given up."""

    def __init__(self) -> None:
        self.closed = False

    async def __aiter__(self) -> Any:
        while True:
            yield Chunk(0, "a", [1])
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        self.closed = True


class Host:
    """Starts a generation at once, after a turn of the loop, never, or refuses it."""

    def __init__(self, *, refuses: bool) -> None:
        self.started: list[Endless] = []
        self._refuses = refuses

    async def start(self, request: GenerationRequest) -> Endless:
        assert isinstance(request.prompt, TextPrompt)
        if request.prompt.text == "never":
            await asyncio.Event().wait()
        if request.prompt.text == "no" and self._refuses:
            await asyncio.sleep(0)
            raise Overloaded("full")
        if request.prompt.text != "now":
            await asyncio.sleep(0)
        self.started.append(Endless())
        return self.started[-1]


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_start_left_at_any_turn_leaves_nothing_open(refuses: bool) -> None:
    for first, second in itertools.product(range(7), range(7)):
        host = Host(refuses=refuses)
        task = asyncio.ensure_future(start_all(host, REQUESTS))  # type: ignore[arg-type]
        await _cancel_twice(task, first, second)
        assert all(one.closed for one in host.started), (first, second)


async def test_an_end_left_at_any_turn_leaves_nothing_open() -> None:
    for first, second in itertools.product(range(7), range(7)):
        host = Host(refuses=False)
        whole = await start_all(host, REQUESTS[:2])  # type: ignore[arg-type]
        await anext(aiter(whole))
        task = asyncio.ensure_future(whole.aclose())
        await asyncio.sleep(0)  # one that never ran did nothing
        await _cancel_twice(task, first, second)
        assert all(one.closed for one in host.started), (first, second)


async def _cancel_twice(task: asyncio.Future[Any], first: int, second: int) -> None:
    for turns in (first, second):
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
