"""Two gateways on the same ports: both serve, one dies, the other does not notice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from services.common import rpc
from tests.integration.served import ServedFleet
from tests.programs import eventually


@pytest.fixture(scope="module")
def fleet() -> Iterator[ServedFleet]:
    with ServedFleet(
        *("--engine", "fake", "--model", "byte", "--fake-step-ms", "20"),
        *("--gateways", "2", "--workers", "2"),
    ) as served:
        yield served


def _admin(fleet: ServedFleet, name: str) -> httpx.Client:
    """A client of one gateway's admin address."""
    (entry,) = [entry for entry in fleet.processes("gateway") if entry["name"] == name]
    socket = entry["admin_address"].removeprefix("unix:")
    transport = httpx.HTTPTransport(uds=socket)
    return httpx.Client(transport=transport, base_url="http://admin", timeout=10)


def _sample(fleet: ServedFleet, name: str, series: str) -> float:
    with _admin(fleet, name) as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(series))


def _both_serve(fleet: ServedFleet, least: int) -> bool:
    """Each gateway has that many requests."""
    series = "shoal_gateway_requests_in_flight"
    names = [entry["name"] for entry in fleet.processes("gateway")]
    return all(_sample(fleet, name, series) >= least for name in names)


def _readyz(fleet: ServedFleet, name: str) -> int:
    """A gateway's status; 0 if it is not there."""
    try:
        with _admin(fleet, name) as client:
            return client.get("/readyz").status_code
    except httpx.TransportError:
        return 0


async def _stream(url: str, number: int, max_tokens: int) -> tuple[int, bool]:
    """A stream on a connection of its own: how many texts came, and whether it ended well."""
    body = {
        "prompt": f"{number:04d}" * 20,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    texts, done = 0, False
    async with (
        # Without `verify` a client reads every authority of the world first.
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, verify=False) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                texts += len(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    return texts, done


def test_both_serve_rest_and_each_has_its_own_metrics(fleet: ServedFleet) -> None:
    async def many() -> list[tuple[int, bool]]:
        gate = asyncio.Semaphore(50)

        async def one(number: int) -> tuple[int, bool]:
            async with gate:
                return await _stream(fleet.url, number, 4)

        return list(await asyncio.gather(*(one(number) for number in range(200))))

    assert asyncio.run(many()) == [(4, True)] * 200
    served = [
        _sample(fleet, name, "shoal_gateway_request_seconds_count")
        for name in ("gateway-0", "gateway-1")
    ]
    print(f"200 requests: {served} by gateway")
    assert sum(served) == 200
    assert min(served) >= 20  # the kernel spreads connections by their hash
    shared = httpx.get(f"{fleet.url}/metrics")
    assert shared.status_code == 404
    assert "--admin-address" in shared.text


async def test_both_serve_grpc(fleet: ServedFleet) -> None:
    table = fleet.processes("gateway")
    assert len({entry["address"] for entry in table}) == 1
    sampling = common_pb2.SamplingParams(max_tokens=2, ignore_eos=True)
    request = inference_pb2.GenerateRequest(
        text="hello", options=inference_pb2.GenerationOptions(sampling=sampling)
    )
    before = [
        _sample(fleet, entry["name"], "shoal_gateway_request_seconds_count") for entry in table
    ]
    for _ in range(24):  # a channel is a connection, and stays with one gateway
        async with rpc.open_channel(table[0]["address"]) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
            ids = [i async for answer in call for piece in answer.pieces for i in piece.token_ids]
            assert len(ids) == 2
    after = [
        _sample(fleet, entry["name"], "shoal_gateway_request_seconds_count") for entry in table
    ]
    assert all(b > a for a, b in zip(before, after, strict=True))


def test_a_killed_gateway_takes_its_own_streams_alone_and_returns(fleet: ServedFleet) -> None:
    victim, _ = fleet.processes("gateway")

    async def run() -> list[tuple[int, bool] | BaseException]:
        streams = [asyncio.create_task(_stream(fleet.url, number, 400)) for number in range(24)]
        await asyncio.to_thread(eventually, lambda: _both_serve(fleet, 3), timeout=60)
        os.kill(victim["pid"], signal.SIGKILL)
        return list(await asyncio.gather(*streams, return_exceptions=True))

    ends = asyncio.run(run())
    whole = [end for end in ends if not isinstance(end, BaseException)]
    cut = [end for end in ends if isinstance(end, BaseException)]
    print(f"{len(whole)} streams whole, {len(cut)} cut")
    assert whole == [(400, True)] * len(whole)
    assert whole
    assert cut
    assert all(isinstance(end, httpx.TransportError) for end in cut)

    def restarted() -> bool:
        (entry,) = [e for e in fleet.processes("gateway") if e["name"] == victim["name"]]
        return entry["pid"] not in (None, victim["pid"]) and entry["state"] == "ready"

    eventually(restarted, timeout=60)
    with _admin(fleet, victim["name"]) as client:
        assert client.get("/readyz").status_code == 200
    before = _sample(fleet, victim["name"], "shoal_gateway_request_seconds_count")
    for number in range(24):  # each on a connection of its own
        with httpx.Client(base_url=fleet.url, timeout=60, trust_env=False, verify=False) as client:
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert answer.is_success, number
    assert _sample(fleet, victim["name"], "shoal_gateway_request_seconds_count") > before


def test_a_gateway_that_drains_lets_the_others_have_new_connections(fleet: ServedFleet) -> None:
    leaving, _ = fleet.processes("gateway")

    async def run() -> None:
        streams = [asyncio.create_task(_stream(fleet.url, number, 300)) for number in range(20)]
        await asyncio.to_thread(eventually, lambda: _both_serve(fleet, 1), timeout=60)
        os.kill(leaving["pid"], signal.SIGTERM)
        await asyncio.to_thread(
            eventually, lambda: _readyz(fleet, leaving["name"]) in (503, 0), timeout=30
        )
        results = await asyncio.gather(*(_stream(fleet.url, 100 + n, 3) for n in range(20)))
        assert results == [(3, True)] * 20  # none met a gateway that refuses
        assert await asyncio.gather(*streams) == [(300, True)] * 20

    asyncio.run(run())
