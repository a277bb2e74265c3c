"""Faults under the embedded model: what is resumed may part only where two tokens nearly tie.

Sums of floats depend on the shape of a batch, and a resumed request is computed in other
batches. So each answer is held against the undisturbed one, and where they part, the margin
between the two tokens is measured by scoring both after the same ids, with the noise of the
draw where one was drawn. A margin over `MARGIN` is a fault; every parting is printed.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from tests.chaos import leftovers
from tests.chaos.client import Manner, ask
from tests.chaos.faults import KINDS, Chaos
from tests.chaos.fleet import Fleet, Shape, running_fleet
from tests.full import FULL

torch = pytest.importorskip("torch")

MARGIN = 1e-3  # float32 scores
_REQUESTS = 24 if FULL else 6
_FAULTS = 30 if FULL else 2
_MOST_FAULTS = 10 * _FAULTS  # until a stream has moved
_MOVES = "shoal_gateway_resumes_total"
_TOKENS = 64 if FULL else 40
_CLIENTS = 6
_MEAN_PAUSE = 3.0 if FULL else 1.5
_HARD = ("kill", "kill rank", "freeze", "reset", "partition", "flapping link", "restart")
_IN_CI = ("kill", "reset")
_SHAPE = Shape(
    workers=2,
    tokenizers=1,
    detokenizers=1,
    gateways=1,
    model="",
    worker_flags=("--num-threads=1", "--num-pages=1024"),
    gateway_flags=("--max-resumes=20", "--hold-timeout=60"),
)
_OPENINGS = (
    "The sea was calm that morning, and",
    "def fibonacci(n):",
    "Once upon a time, in a village by the river,",
    "1, 1, 2, 3, 5, 8,",
    "List three primary colours:",
    "从前有一个小村庄，",
)


async def test_texts_part_only_within_the_margin(seed: int, rng: random.Random) -> None:
    torch.set_num_threads(1)
    kinds = [kind for kind in KINDS if kind.name in (_HARD if FULL else _IN_CI)]
    requests = [_request(rng, number) for number in range(_REQUESTS)]
    async with running_fleet(_SHAPE, rng) as fleet:
        undisturbed = await _ask_all(fleet, requests)
        chaos = Chaos(fleet, random.Random(rng.random()), kinds)
        moves = 0.0

        def enough() -> bool:  # the dice may hit none who serves a stream
            return len(chaos.done) >= (_FAULTS if moves else _MOST_FAULTS)

        faults = asyncio.create_task(chaos.run(enough, _MEAN_PAUSE))
        answers = []
        try:
            while not faults.done():
                answers.append(await _ask_all(fleet, requests))
                moves = await fleet.total(fleet.gateways, _MOVES)
            await faults
        finally:
            faults.cancel()
            await asyncio.gather(faults, return_exceptions=True)
        await fleet.ready()
        moves = await fleet.total(fleet.gateways, _MOVES)
        margins = []
        for round_answers in answers:
            for request, before, after in zip(requests, undisturbed, round_answers, strict=True):
                if before != after:
                    margins.append(await _margin(fleet, request, before, after))
        await leftovers.nothing_held(fleet)
    print(
        f"real model: {len(answers) * len(requests)} streams of {_TOKENS} tokens,"
        f" {len(chaos.done)} faults {dict(chaos.counts)}, {moves:.0f} moves,"
        f" {len(margins)} partings, largest margin {max(margins, default=0):.2e}"
    )
    assert moves > 0
    assert max(margins, default=0.0) < MARGIN


def _request(rng: random.Random, number: int) -> dict[str, Any]:
    """Greedy and seeded in turn; no filters, whose boundaries would be margins of their own."""
    body = {
        "prompt": f"{rng.choice(_OPENINGS)} {number}",
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "temperature": 0,
    }
    if number % 2:
        body |= {"temperature": 0.8, "seed": rng.randrange(1 << 31)}
    return body


async def _ask_all(fleet: Fleet, requests: list[dict[str, Any]]) -> list[list[int]]:
    """The ids of every answer, each of which must be whole."""
    gate = asyncio.Semaphore(_CLIENTS)

    async def one(body: dict[str, Any]) -> list[int]:
        async with gate, asyncio.timeout(300):
            answer = await ask(fleet.gateways[0].address, "/v1/completions", body, Manner("eager"))
        assert (answer.status, answer.error, answer.dones) == (200, {}, 1)
        (choice,) = answer.choices.values()
        assert choice.ends == [("length", None)]
        assert len(choice.ids) == _TOKENS
        return choice.ids

    return list(await asyncio.gather(*map(one, requests)))


async def _margin(
    fleet: Fleet, request: dict[str, Any], before: list[int], after: list[int]
) -> float:
    """By how much the undisturbed token's score was above the other's where they part."""
    step = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
    scores = [
        await _score(fleet, request, before[:step], token) for token in (before[step], after[step])
    ]
    margin = abs(scores[0] - scores[1])
    print(f"{request['prompt']!r} parts at step {step}, margin {margin:.2e}")
    return margin


async def _score(fleet: Fleet, request: dict[str, Any], ids: list[int], token: int) -> float:
    """What the sampler compares: the log-probability, by temperature and noise if drawn."""
    gateway = fleet.gateways[0].address
    whole = await ask(
        gateway, "/v1/completions", {**request, "max_tokens": 1, "stream": False}, Manner("eager")
    )
    assert whole.prompt_ids is not None
    body = {
        "prompt": [*whole.prompt_ids, *ids, token],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 0,
    }
    answer = await ask(gateway, "/v1/completions", body, Manner("eager"))
    logprob = answer.choices[0].logprobs[-1]
    temperature: float = request["temperature"]
    if not temperature:
        return logprob
    return logprob / temperature + _noise(request["seed"], len(ids), token)


def _noise(seed: int, position: int, token: int) -> float:
    """The Gumbel noise of one draw."""
    from services.worker.engine.draw import gumbel, row_keys

    keys = row_keys(np.array([seed], np.uint64), np.array([position], np.uint64))
    low, high = (torch.as_tensor(key).reshape(1, 1) for key in keys)
    return float(gumbel(low, high, torch.tensor([[token]]))[0, 0])
