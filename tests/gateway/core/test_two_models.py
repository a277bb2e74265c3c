"""Two models behind one gateway: each with tokenizers, detokenizers and workers of its own."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.core.test_processes import endpoints_of, service, until

pytestmark = pytest.mark.integration

MODELS = {"alpha": ("--model=byte",), "beta": ()}  # beta: the embedded model's vocabulary


@dataclass
class TwoModels:
    """The gateway's client, and the workers by model."""

    http: httpx.AsyncClient
    workers: dict[str, Process]
    flags: dict[str, tuple[str, ...]]

    async def complete(self, **body: Any) -> httpx.Response:
        body = {"prompt": "The cat sat on the mat.", "max_tokens": 8, "ignore_eos": True, **body}
        return await self.http.post("/v1/completions", json=body)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[TwoModels]:
    async with AsyncExitStack() as stack:
        addresses: dict[str, list[str]] = {"tokenizer": [], "detokenizer": [], "worker": []}
        workers: dict[str, Process] = {}
        flags: dict[str, tuple[str, ...]] = {}
        for name, model in MODELS.items():
            for role, known in addresses.items():
                known.append(f"unix:{tmp_path}/{role}-{name}")
                given = (*model, f"--served-model-name={name}", f"--address={known[-1]}")
                if role == "worker":
                    given = flags[name] = (*given, "--engine=fake", "--fake-step-ms=5")
                process = await stack.enter_async_context(service(role, *given))
                if role == "worker":
                    workers[name] = process
        gateway = await stack.enter_async_context(
            service(
                "gateway",
                *("--port=0", "--grpc-port=-1"),
                *(f"--{role}-addresses={','.join(known)}" for role, known in addresses.items()),
            )
        )
        url = f"http://{(await endpoints_of(gateway))['http']}"
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=60)
        )
        fleet = TwoModels(http, workers, flags)

        async def all_there() -> bool:
            listed = (await http.get("/v1/models")).json()["data"]
            answers = [await fleet.complete(model=card["id"]) for card in listed]
            return len(listed) == 2 and all(answer.is_success for answer in answers)

        await until(all_there, 60)
        yield fleet


async def check_that_each_has_its_own(fleet: TwoModels) -> None:
    cards = {card["id"]: card for card in (await fleet.http.get("/v1/models")).json()["data"]}
    assert sorted(cards) == ["alpha", "beta"]
    for _ in range(4):
        alpha = (await fleet.complete(model="alpha")).json()
        beta = (await fleet.complete(model="beta")).json()
        assert alpha["usage"]["prompt_tokens"] == 1 + len("The cat sat on the mat.")
        assert beta["usage"]["prompt_tokens"] < 10
        assert len(alpha["choices"][0]["text"]) == 8  # a byte a token
        assert (alpha["model"], beta["model"]) == ("alpha", "beta")
    unknown = await fleet.complete(model="gamma")
    assert unknown.status_code == 404
    assert "alpha, beta" in unknown.json()["error"]["message"]
    for path, body in (
        ("/tokenize", {"prompt": "cat"}),
        ("/detokenize", {"tokens": [99, 97, 116]}),
    ):
        answers = {
            name: (await fleet.http.post(path, json={"model": name, **body})).json()
            for name in MODELS
        }
        assert answers["alpha"] != answers["beta"], path


async def check_that_a_stream_waits_for_its_own(fleet: TwoModels) -> None:
    undisturbed = (await fleet.complete(model="beta", max_tokens=300)).json()["choices"][0]["text"]
    stream = asyncio.create_task(fleet.complete(model="beta", max_tokens=300))

    async def runs() -> bool:
        text = (await fleet.http.get("/metrics")).text
        return "shoal_fleet_requests_running 1.0" in text

    await until(runs, 30)
    fleet.workers["beta"].kill()
    await fleet.workers["beta"].wait()
    assert (await fleet.complete(model="alpha")).is_success  # which does not take it over
    assert not stream.done()
    async with service("worker", *fleet.flags["beta"]):
        answer = (await stream).json()
        assert answer["choices"][0]["text"] == undisturbed
        assert answer["usage"]["completion_tokens"] == 300


async def test_two_models_keep_apart(fleet: TwoModels) -> None:
    await check_that_each_has_its_own(fleet)
    await check_that_a_stream_waits_for_its_own(fleet)
