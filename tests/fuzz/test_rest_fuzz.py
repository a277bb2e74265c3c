"""Spoiled requests by the thousand against a real fleet, with a stream beside them.

No answer is a 5xx (but 504 where the request itself set a deadline), no process restarts, the
stream beside is undisturbed, and afterwards nothing is held anywhere. SHOAL_FUZZ_SEED draws the
same requests again; SHOAL_FULL=1 sends ten times as many.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.full import FULL
from tests.fuzz.mutate import Fuzzer, Shot
from tests.integration.served import ServedFleet
from tests.integration.test_fleet_life import assert_nothing_is_held

NUM_REQUESTS = 20_000 if FULL else 2_000
SEED = int(os.environ.get("SHOAL_FUZZ_SEED") or random.SystemRandom().randrange(1 << 32))
AT_ONCE = 12
PATIENCE = 120.0
REFUSALS = {400, 401, 404, 405, 408, 413, 415, 422, 429}
BESIDE = {"prompt": "the stream beside", "max_tokens": 100, "ignore_eos": True, "seed": 1}
LEAKS = ("Traceback", 'File "', "site-packages", "Error(")


def verdict(shot: Shot, response: httpx.Response) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    text = response.text
    if any(leak in text for leak in LEAKS) and not any(
        leak.encode() in shot.body for leak in LEAKS
    ):
        return "it tells of the inside"
    if response.status_code == 200:
        return _stream_fault(text) if _is_stream(response) else _json_fault(text)
    may_be_late = "x-request-timeout" in shot.headers or b'"timeout"' in shot.body
    if response.status_code not in REFUSALS and not (response.status_code == 504 and may_be_late):
        return f"status {response.status_code}"
    error = json.loads(text).get("error")
    if not (isinstance(error, dict) and error.get("message") and error.get("type")):
        return "no error envelope"
    return None


def _is_stream(response: httpx.Response) -> bool:
    return response.headers["content-type"].startswith("text/event-stream")


def _json_fault(text: str) -> str | None:
    return None if isinstance(json.loads(text), dict) else "not an object"


def _stream_fault(text: str) -> str | None:
    events = text.split("\n\n")
    if events[-1] or not text:
        return "an event without its end"
    if "event: response." in text:  # the Responses API ends with an event of its own
        return None
    return None if events[-2] == "data: [DONE]" else "no [DONE] at the end"


async def fire(client: httpx.AsyncClient, shots: Iterator[Shot], counts: Counter[str]) -> None:
    for shot in shots:
        sent = (
            f"SHOAL_FUZZ_SEED={SEED}: {shot.path} {shot.how} {shot.headers}\n{shot.body[:2000]!r}"
        )
        try:
            response = await client.post(shot.path, content=shot.body, headers=shot.headers)
        except httpx.TransportError as error:
            pytest.fail(f"no answer within {PATIENCE:g} s: {error!r}\nfor {sent}")
        fault = verdict(shot, response)
        assert fault is None, f"{fault}: {response.status_code} {response.text[:500]!r}\nfor {sent}"
        counts[str(response.status_code)] += 1


async def watch(client: httpx.AsyncClient, text: str, fired: asyncio.Event) -> int:
    """Streams the same request again and again; returns how often."""
    rounds = 0
    while not fired.is_set() or rounds == 0:
        assert await stream_text(client) == text
        rounds += 1
    return rounds


async def stream_text(client: httpx.AsyncClient) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json={**BESIDE, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


async def test_nothing_a_client_sends_does_harm(
    fleet: ServedFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fuzzer = Fuzzer(SEED)
    shots = (fuzzer.draw() for _ in range(NUM_REQUESTS))
    processes = {(entry["name"], entry["pid"]) for entry in fleet.processes()}
    counts: Counter[str] = Counter()
    fired = asyncio.Event()
    async with httpx.AsyncClient(base_url=fleet.url, timeout=PATIENCE) as client:
        beside = asyncio.create_task(watch(client, await stream_text(client), fired))
        try:
            await asyncio.gather(*(fire(client, shots, counts) for _ in range(AT_ONCE)))
        finally:
            fired.set()
        rounds = await beside
        assert (await client.get("/readyz")).status_code == 200
    with capsys.disabled():
        print(
            f"\nfuzz: {counts.total()} requests, SHOAL_FUZZ_SEED={SEED}, answers by status"
            f" {dict(sorted(counts.items()))}, {rounds} streams beside them undisturbed"
        )
    assert counts.total() == NUM_REQUESTS
    assert counts["200"] > NUM_REQUESTS / 50, (
        "hardly any body was served: they are spoiled too much"
    )
    assert {(entry["name"], entry["pid"]) for entry in fleet.processes()} == processes
    assert_nothing_is_held(fleet)
