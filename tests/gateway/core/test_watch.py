"""What a gateway shows of its fleet and its requests, over scripted peers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from protos import common_pb2
from services.common.errors import ShoalError
from services.gateway.config import GatewayConfig
from services.gateway.http import build_app
from services.gateway.peers.session import SessionTimes
from services.gateway.peers.tokenizer import TokenizerPeer
from services.gateway.watch.feed import Watcher
from services.gateway.watch.shapes import FleetSnapshot, Instance, JourneyEvent
from services.gateway.watch.snapshot import snapshot
from tests.gateway.core.conftest import Rig, collect, make_rig, request
from tests.gateway.core.test_resume import read_until, worker_of


def seen(rig: Rig) -> FleetSnapshot:
    return snapshot(rig.core)


def only(snapshot: FleetSnapshot, service: str) -> Instance:
    (found,) = [each for each in snapshot.instances if each.service == service]
    return found


def events_of(rig: Rig) -> list[JourneyEvent]:
    (summary,) = rig.core.journeys.newest(10)
    journey = rig.core.journeys.find(summary.id)
    assert journey is not None
    return journey.events


def kinds(rig: Rig) -> list[str]:
    return [event.kind for event in events_of(rig)]


# -- the snapshot


async def test_every_instance_of_every_service_is_there(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2, tokenizers=2, detokenizers=1) as rig:
        fleet = seen(rig)
        assert [each.service for each in fleet.instances] == [
            *("worker", "worker", "tokenizer", "tokenizer", "detokenizer")
        ]
        assert {each.state for each in fleet.instances} == {"ready"}
        assert all(each.model == "fake" and each.epoch == "1" for each in fleet.instances)
        assert all(0 <= fleet.now - each.since < 60 for each in fleet.instances)
        assert all(each.heard is not None for each in fleet.instances)
        assert fleet.gateway.ready
        assert not fleet.gateway.reasons


async def test_a_load_is_shown_as_it_was_told(rig: Rig) -> None:
    load = rig.worker.pending.step.load
    load.num_running, load.num_waiting = 3, 1
    load.num_pages, load.num_free_pages, load.num_evictable_pages = 100, 40, 25
    load.num_prefix_query_tokens, load.num_prefix_hit_tokens = 200, 50
    load.step_us = 12_000
    told = asyncio.Event()
    rig.core.fleet.on_load = lambda worker: told.set()
    rig.worker.send()
    async with asyncio.timeout(10):
        await told.wait()
    engine = only(seen(rig), "worker").engine
    assert engine is not None
    assert (engine.running, engine.waiting) == (3, 1)
    assert (engine.pages, engine.pages_free, engine.pages_evictable) == (100, 40, 25)
    assert engine.prefix_hit_rate == 0.25
    assert engine.step_s == 0.012


async def test_one_that_dies_is_dead_and_one_never_seen_is_starting(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=1) as rig:
        await rig.worker.server.kill()
        await rig.until_fleet(lambda fleet: not fleet.workers.ready)
        gone = only(seen(rig), "worker")
        assert (gone.state, gone.heard) == ("dead", None)
        assert gone.detail
        assert not seen(rig).gateway.ready
        await rig.worker.server.start()
        await rig.until_fleet(lambda fleet: fleet.workers.ready)
        back = only(seen(rig), "worker")
        assert back.state == "ready"
        assert back.since >= gone.since
    never = TokenizerPeer(f"unix:{tmp_path}/nobody", SessionTimes(), lambda: None)
    for _ in range(2):
        assert never.absence == "starting"
        await never._run_session()
    assert "nobody" in never.why_absent


async def test_draining_is_shown(rig: Rig) -> None:
    rig.worker.drain()
    await rig.until_fleet(lambda fleet: not fleet.workers.ready)
    assert only(seen(rig), "worker").state == "draining"


async def test_an_open_breaker_is_shown(rig: Rig) -> None:
    rig.worker.reject_with = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="no")
    for _ in range(3):
        with pytest.raises(ShoalError):
            await rig.core.start(request())
    broken = only(seen(rig), "worker")
    assert broken.state == "breaker-open"
    assert broken.detail


# -- journeys


async def test_a_journey_from_arrival_to_end(rig: Rig) -> None:
    await collect(await rig.core.start(request(max_tokens=5)))
    assert kinds(rig) == [
        *("received", "encoded", "submitted", "accepted", "started"),
        *("first_token", "first_text", "last_token", "last_text", "ended"),
    ]
    events = {event.kind: event for event in events_of(rig)}
    assert events["encoded"].tokens == 5
    assert events["submitted"].address == rig.worker.server.address
    assert (events["last_token"].tokens, events["ended"].detail) == (5, "length")
    minute = seen(rig).gateway.minute
    assert (minute.requests, minute.tokens_in, minute.tokens_out) == (1, 5, 5)
    assert (minute.ttft.count, minute.errors, minute.cancelled) == (1, 0, 0)


async def test_parts_of_a_long_prompt_are_in_it(rig: Rig) -> None:
    rig.worker.auto = False
    generation = await rig.core.start(request())
    (handle,) = rig.worker.running
    rig.worker.pending.step.started.add(handle=handle, cached_tokens=2)
    rig.worker.pending.step.prefilled.add(handle=handle, num_tokens=4)
    rig.worker.send()
    rig.worker.auto = True
    await collect(generation)
    told = [(event.kind, event.tokens) for event in events_of(rig)]
    # The first step may have joined that frame, and it tells of a start too.
    assert told.index(("started", 2)) < told.index(("prefilled", 4))


async def test_a_move_is_in_it(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        generation = await rig.core.start(request(max_tokens=60))
        await read_until(generation, 5)
        await worker_of(rig).server.kill()
        await collect(generation)
        told = kinds(rig)
        assert told.count("submitted") == told.count("first_token") == 2
        assert told.index("worker_lost") < len(told) - told[::-1].index("submitted") - 1
        (summary,) = rig.core.journeys.newest(10)
        assert (summary.resumes, summary.output_tokens, summary.outcome) == (1, 60, "length")
        assert seen(rig).gateway.minute.resumes == 1


async def test_one_that_its_client_gave_up_is_cancelled(rig: Rig) -> None:
    generation = await rig.core.start(request(max_tokens=900))
    await read_until(generation, 2)
    await generation.aclose()
    assert events_of(rig)[-1].detail == "cancelled"
    minute = seen(rig).gateway.minute
    assert (minute.cancelled, minute.errors) == (1, 0)


async def test_one_that_was_refused_says_why(rig: Rig) -> None:
    with pytest.raises(ShoalError):
        await rig.core.start(request("x" * 2000))
    assert kinds(rig) == ["received", "ended"]
    assert events_of(rig)[-1].detail == "context_length_exceeded"
    assert seen(rig).gateway.minute.errors == 1


# -- the feed


async def test_steps_are_asked_for_only_while_somebody_watches(rig: Rig) -> None:
    with rig.core.feed.watch() as first, rig.core.feed.watch():
        await rig.until(lambda: rig.worker.watched == [True])
        await first.events()
    await rig.until(lambda: rig.worker.watched == [True, False])


async def test_watchers_get_snapshots_and_steps(rig: Rig) -> None:
    with rig.core.feed.watch() as watcher:
        assert await _next(watcher, "fleet")
        await rig.until(lambda: rig.worker.watched)
        rig.worker.pending.steps.add(
            number=7, began_us_ago=30_000, duration_us=20_000, num_prefill_tokens=5
        )
        rig.worker.send()
        told = await _next(watcher, "steps")
        assert told["address"] == rig.worker.server.address
        ((number, began, duration, bubble, prefill, decode),) = told["steps"]
        assert (number, duration, bubble, prefill, decode) == (7, 0.02, 0.0, 5, 0)
        assert 0 <= seen(rig).now - began < 60


async def test_a_loss_is_shown_at_once(rig: Rig) -> None:
    with rig.core.feed.watch() as watcher:
        await _next(watcher, "fleet")
        await rig.worker.server.kill()
        async with asyncio.timeout(5):
            states = [""]
            while states != ["dead"]:
                fleet = await _next(watcher, "fleet")
                states = [e["state"] for e in fleet["instances"] if e["service"] == "worker"]


async def test_a_gateway_that_ends_ends_the_streams(rig: Rig) -> None:
    with rig.core.feed.watch() as watcher:
        await rig.core.drain(1)
        while await watcher.events():
            pass
    with rig.core.feed.watch() as late:
        assert not await late.events()


async def test_a_fault_ends_the_streams_and_is_logged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(seen: object) -> FleetSnapshot:
        raise ZeroDivisionError

    monkeypatch.setattr("services.gateway.watch.feed.snapshot", broken)
    with rig.core.feed.watch() as watcher:
        async with asyncio.timeout(10):
            assert not await watcher.events()
    assert "fault while showing the fleet" in caplog.text


async def test_a_slow_watcher_costs_a_bounded_store() -> None:
    watcher = Watcher()
    for _ in range(1000):
        watcher.add("w", [])
        watcher.add("w", [0] * 100)  # type: ignore[list-item]  # only counted here
    watcher.close()
    assert sum(map(len, watcher._steps.values())) < 5000


async def _next(watcher: Watcher, name: str) -> Any:
    """The next event of that name."""
    async with asyncio.timeout(10):
        while True:
            for block in (await watcher.events()).decode().split("\n\n"):
                head, _, data = block.partition("\n")
                if head == f"event: {name}":
                    return json.loads(data.removeprefix("data: "))


# -- over HTTP


async def test_over_http(rig: Rig) -> None:
    app = build_app(rig.core, GatewayConfig(), CollectorRegistry(), watched=rig.core)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        body = {"prompt": "hello", "max_tokens": 3}
        await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        fleet = (await client.get("/fleet")).json()
        assert {each["service"] for each in fleet["instances"]} == {
            *("worker", "tokenizer", "detokenizer")
        }
        (listed,) = (await client.get("/fleet/requests?request_id=mine")).json()["requests"]
        assert listed["outcome"] == "length"
        journey = (await client.get(f"/fleet/requests/{listed['id']}")).json()
        assert journey["request"] == listed
        assert "hello" not in json.dumps(journey)
        assert (await client.get("/fleet/requests/999")).status_code == 404
        for limit in ("0", "501", "x", "٣"):
            answer = await client.get("/fleet/requests", params={"limit": limit})
            assert answer.status_code == 400, limit
        history = (await client.get("/fleet/history")).json()
        assert len(history["start"]) == len(history["tokens_out"])
