"""A rolling update under open streams: workers hand their requests back, nobody waits."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.served import ServedFleet
from tests.programs import eventually

TOKENS = 600


@pytest.fixture(scope="module")
def fleet() -> Iterator[ServedFleet]:
    with ServedFleet(
        *("--engine", "fake", "--model", "byte", "--fake-step-ms", "5", "--workers", "2"),
        *("--detokenizers", "2", "--drain", "handoff", "--drain-timeout", "120"),
    ) as served:
        yield served


async def _complete(client: httpx.AsyncClient, number: int) -> tuple[str, int]:
    """A completion's text and its number of tokens."""
    body = {"prompt": f"number {number}", "max_tokens": TOKENS, "ignore_eos": True, "seed": 1}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    return whole["choices"][0]["text"], whole["usage"]["completion_tokens"]


def _roll(fleet: ServedFleet, role: str) -> None:
    """Restarts every instance of a role, one after the other, by SIGTERM."""
    for entry in fleet.processes(role):
        os.kill(entry["pid"], signal.SIGTERM)

        def replaced(name: str = entry["name"], pid: int = entry["pid"]) -> bool:
            (now,) = [e for e in fleet.processes(role) if e["name"] == name]
            return now["pid"] not in (None, pid) and now["state"] == "ready"

        took = eventually(replaced, timeout=60)
        print(f"{entry['name']} replaced after {took:.1f} s")


async def test_a_rolling_update_waits_for_nobody_and_loses_nothing(fleet: ServedFleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=120, trust_env=False) as client:
        undisturbed = await asyncio.gather(*(_complete(client, n) for n in range(8)))
        for role in ("worker", "detokenizer"):
            streams = [asyncio.create_task(_complete(client, n)) for n in range(8)]
            await asyncio.to_thread(
                eventually,
                lambda: fleet.total("worker", "vllm:num_requests_running") == 8,
                timeout=30,
            )
            started = time.monotonic()
            await asyncio.to_thread(_roll, fleet, role)
            print(f"{role}s rolled in {time.monotonic() - started:.1f} s")
            assert await asyncio.gather(*streams) == undisturbed
            assert fleet.total("gateway", "shoal_gateway_handoffs_total", peer=role) > 0
            assert fleet.total("gateway", "shoal_gateway_resumes_total", peer=role) == 0
