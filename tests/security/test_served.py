"""A served fleet with keys, under a crowd of idle and crippled connections."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from services.common import rpc
from tests.integration.served import ServedFleet
from tests.programs import eventually

pytestmark = pytest.mark.integration

KEY = "a-key-that-nobody-may-read"
MARKER = "a-prompt-that-nobody-may-read"
AUTH = {"authorization": f"Bearer {KEY}"}
READ_TIMEOUT = 5
NUM_IDLE = 2000
NUM_CRIPPLED = 200


@pytest.fixture(scope="module")
def fleet() -> Iterator[ServedFleet]:
    environment = {"SHOAL_API_KEY": f"tester:{KEY}", "SHOAL_READ_TIMEOUT": str(READ_TIMEOUT)}
    os.environ.update(environment)
    try:
        served = ServedFleet("--engine", "fake", "--model", "byte", "--log-format", "json")
    finally:
        for name in environment:
            del os.environ[name]
    with served:
        yield served


def _pid(fleet: ServedFleet) -> int:
    (gateway,) = fleet.processes("gateway")
    return int(gateway["pid"])


def _num_fds(fleet: ServedFleet) -> int:
    return len(os.listdir(f"/proc/{_pid(fleet)}/fd"))


def _complete(client: httpx.Client) -> float:
    """One completion; the seconds it took."""
    start = time.monotonic()
    answer = client.post("/v1/completions", json={"prompt": MARKER, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    return time.monotonic() - start


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_a_crowd_of_idle_clients_holds_nobody_up(fleet: ServedFleet) -> None:
    """2,000 that say nothing, 200 that trickle a request, 200 that are half closed."""
    address = _address(fleet.url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\n".encode()
    with ExitStack() as crowd, httpx.Client(base_url=fleet.url, headers=AUTH, timeout=60) as client:
        _complete(client)
        before = _num_fds(fleet)

        def connect(first_words: bytes = b"") -> socket.socket:
            connection = crowd.enter_context(socket.create_connection(address, timeout=60))
            if first_words:
                connection.sendall(first_words)
            return connection

        for _ in range(NUM_IDLE):
            connect()
        trickling = [connect(head) for _ in range(NUM_CRIPPLED)]
        trickling += [connect(head + b"Content-Length: 99\r\n\r\n{") for _ in range(NUM_CRIPPLED)]
        for _ in range(NUM_CRIPPLED):
            connect(head).shutdown(socket.SHUT_WR)
        _complete(client)  # the crowd has been accepted by now
        slowest = max(_complete(client) for _ in range(20))
        assert slowest < 20, "an answer among idle connections took seconds"
        eventually(lambda: _num_fds(fleet) <= before + 2, timeout=60, what="the crowd is cut off")
        answers = [connection.recv(64) for connection in trickling[:: NUM_CRIPPLED // 4]]
        assert {answer.split(b" ")[1] for answer in answers} == {b"408"}
        _complete(client)
    eventually(lambda: _num_fds(fleet) <= before, timeout=30, what="descriptors come back")


async def test_idle_grpc_connections_hold_nobody_up(fleet: ServedFleet) -> None:
    (gateway,) = fleet.processes("gateway")
    host, _, port = gateway["address"].rpartition(":")
    before = _num_fds(fleet)
    with ExitStack() as crowd:
        for number in range(NUM_CRIPPLED):
            connection = crowd.enter_context(socket.create_connection((host, int(port)), 60))
            if number % 2:
                connection.sendall(b"PRI * HTTP/2.0\r\n")  # and no more of it
        async with rpc.open_channel(gateway["address"]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            metadata = (("x-api-key", KEY),)
            request = inference_pb2.TokenizeRequest(text="abc")
            for _ in range(20):
                assert (await stub.Tokenize(request, metadata=metadata, timeout=30)).token_ids
    eventually(lambda: _num_fds(fleet) <= before + 2, timeout=60, what="descriptors come back")


async def _pieces(
    stub: inference_pb2_grpc.InferenceAsyncStub, metadata: tuple[tuple[str, str], ...]
) -> list[inference_pb2.GenerateResponse]:
    call = stub.Generate(inference_pb2.GenerateRequest(text="a"), metadata=metadata, timeout=30)
    return [answer async for answer in call]


async def test_grpc_is_guarded_but_for_health(fleet: ServedFleet) -> None:
    (gateway,) = fleet.processes("gateway")
    async with rpc.open_channel(gateway["address"]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=30)).status
        stub = inference_pb2_grpc.InferenceStub(channel)
        refused: tuple[tuple[tuple[str, str], ...], ...] = (
            (),
            (("authorization", "Bearer wrong"),),
            (("x-api-key", "tester"),),
        )
        for metadata in refused:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListModels(
                    inference_pb2.ListModelsRequest(), metadata=metadata, timeout=30
                )
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _pieces(stub, metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        big = (("authorization", f"Bearer {KEY}"), ("x-big", "y" * 100_000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=big, timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        good = await stub.ListModels(
            inference_pb2.ListModelsRequest(), metadata=big[:1], timeout=30
        )
        assert good.models


def test_the_level_of_each_log_can_be_changed(fleet: ServedFleet) -> None:
    for entry in fleet.processes():
        transport = httpx.HTTPTransport(uds=entry["admin_address"].removeprefix("unix:"))
        with httpx.Client(transport=transport, base_url="http://admin", timeout=30) as admin:
            assert admin.get("/loglevel").text == "info\n"
            assert admin.post("/loglevel").status_code == 400
            assert admin.post("/loglevel?level=loud").status_code == 400
            assert admin.post("/loglevel?level=debug").text == "debug\n"
            assert admin.get("/loglevel").text == "debug\n"
            if entry["role"] == "gateway":
                headers = {**AUTH, "x-request-id": "of-interest"}
                body = {"prompt": MARKER, "max_tokens": 4}
                url = f"{fleet.url}/v1/completions"
                assert httpx.post(url, json=body, headers=headers, timeout=30).status_code == 200

                def told() -> bool:
                    return any("a request ended" in line for line in list(fleet.log))

                eventually(told, timeout=30)
            admin.post("/loglevel?level=info")
    (line,) = [line for line in fleet.log if "a request ended" in line]
    assert json.loads(line)["request_id"] == "of-interest"


def test_metrics_are_for_operators(fleet: ServedFleet) -> None:
    assert httpx.get(f"{fleet.url}/metrics", timeout=30).status_code == 401
    assert httpx.get(f"{fleet.url}/metrics", headers=AUTH, timeout=30).status_code == 200
    assert fleet.total("gateway", "shoal_gateway_peers_ready") == 3  # from the admin address


def test_nothing_tells_a_key_or_a_prompt(fleet: ServedFleet) -> None:
    """Not the logs, which held debug lines too, nor files, nor what processes show."""
    info = httpx.get(f"{fleet.url}/server_info", headers=AUTH, timeout=30).text
    told = [info, (fleet.run_dir / "fleet.json").read_text(), *fleet.log]
    for process in fleet.tree():
        told += process.cmdline()
    for secret in (KEY, MARKER):
        assert not [text for text in told if secret in text]
    (worker,) = fleet.processes("worker")
    assert KEY.encode() not in Path(f"/proc/{worker['pid']}/environ").read_bytes()
