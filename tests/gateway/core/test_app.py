"""The whole gateway process but for its process: listeners, health, drain."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from services.common import rpc
from services.common.errors import StartupError
from services.gateway import app as app_module
from services.gateway.app import SERVICE, Endpoints, serve
from services.gateway.config import GatewayConfig
from services.gateway.core import Core
from services.gateway.peers.session import SessionTimes
from tests.gateway.core.conftest import collect, joined, request
from tests.gateway.core.fakes import (
    Activity,
    FakeDetokenizer,
    FakeTokenizer,
    FakeWorker,
    expected_text,
    serving,
)


@dataclass
class App:
    endpoints: Endpoints
    stop: asyncio.Event
    task: asyncio.Task[int]
    worker: FakeWorker
    http: httpx.AsyncClient
    inference: inference_pb2_grpc.InferenceAsyncStub
    health: health_pb2_grpc.HealthStub

    async def becomes(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Waits until gRPC health says so."""
        call = self.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        async with asyncio.timeout(10):
            async for answer in call:
                if answer.status == status:
                    break
        call.cancel()


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    activity = Activity()
    worker = FakeWorker(tmp_path / "w", activity)
    tokenizer = FakeTokenizer(tmp_path / "t", activity)
    detokenizer = FakeDetokenizer(tmp_path / "d", activity)
    config = GatewayConfig(
        port=0,
        grpc_port=0,
        drain_timeout=5,
        worker_addresses=(worker.server.address,),
        tokenizer_addresses=(tokenizer.server.address,),
        detokenizer_addresses=(detokenizer.server.address,),
    )
    stop = asyncio.Event()
    started: asyncio.Future[Endpoints] = asyncio.get_running_loop().create_future()
    async with serving(worker, tokenizer, detokenizer):
        task = asyncio.create_task(serve(config, stop, started.set_result))
        endpoints = await started
        async with (
            httpx.AsyncClient(base_url=f"http://{endpoints.http}", trust_env=False) as http,
            rpc.open_channel(endpoints.grpc) as channel,
        ):
            app = App(
                endpoints,
                stop,
                task,
                worker,
                http,
                inference_pb2_grpc.InferenceStub(channel),
                health_pb2_grpc.HealthStub(channel),
            )
            await app.becomes(SERVING)
            yield app
        stop.set()
        assert await task == 0


async def test_rest_and_grpc_answer_alike(app: App) -> None:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 8}
    answer = await app.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text("hello", 8)
    sampling = common_pb2.SamplingParams(max_tokens=8)
    call = app.inference.Generate(
        inference_pb2.GenerateRequest(
            text="hello", options=inference_pb2.GenerationOptions(sampling=sampling)
        )
    )
    text = "".join([piece.text async for reply in call for piece in reply.pieces])
    assert text == expected_text("hello", 8)


async def test_health_follows_readiness(app: App) -> None:
    assert (await app.http.get("/readyz")).status_code == 200
    await app.worker.server.kill()
    await app.becomes(NOT_SERVING)
    answer = await app.http.get("/readyz")
    assert (answer.status_code, "no worker is ready" in answer.text) == (503, True)
    assert (await app.http.get("/livez")).status_code == 200
    await app.worker.server.start()
    await app.becomes(SERVING)


async def test_drain_lets_streams_finish(app: App) -> None:
    app.worker.auto = False
    body = {"model": "fake", "prompt": "hello", "max_tokens": 40, "stream": True}
    async with app.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.aiter_lines()
        app.worker.step()
        first = await anext(lines)
        app.stop.set()
        await app.becomes(NOT_SERVING)
        assert (await app.http.get("/readyz")).status_code == 503
        refused = await app.http.post("/v1/completions", json=body | {"stream": False})
        assert refused.status_code == 503
        app.worker.auto = True
        rest = [line async for line in lines]
    assert first.startswith("data: ")
    assert [line for line in rest if line][-1] == "data: [DONE]"
    assert await app.task == 0


async def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = GatewayConfig(port=port, grpc_port=-1, detokenizer_addresses=("unix:/nowhere",))
        with pytest.raises(StartupError, match=str(port)):
            await serve(config, asyncio.Event())


async def test_decoding_inside_the_gateway(tmp_path: Path) -> None:
    activity = Activity()
    worker = FakeWorker(tmp_path / "w", activity, model="byte")
    tokenizer = FakeTokenizer(tmp_path / "t", activity, model="byte")
    config = GatewayConfig(
        worker_addresses=(worker.server.address,),
        tokenizer_addresses=(tokenizer.server.address,),
        model="byte",
    )
    registry = CollectorRegistry()
    async with serving(worker, tokenizer):
        core = Core(config, registry, times=SessionTimes(min_backoff=0.01))
        task = asyncio.create_task(core.run())
        seen = -1
        while core.fleet.missing():
            seen = await core.fleet.change(seen)
        chunks = await collect(await core.start(request()))
        assert joined(chunks)[0] == expected_text("hello", 10)
        assert await core.detokenize("", [104, 105]) == "hi"
        assert list(await core.token_bytes([104])) == [b"h"]
        generation = await core.start(request(max_tokens=900))
        await anext(generation)
        await generation.aclose()
        handles = registry.get_sample_value("shoal_gateway_handles", {"peer": "detokenizer"})
        assert handles == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_client_that_takes_nothing_is_lost() -> None:
    with app_module._listen(GatewayConfig(port=0, unread_timeout=0.3)) as listener:
        listener.listen()
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            connection.settimeout(10)  # seconds after which nothing has ended it
            with pytest.raises(TimeoutError) as caught:
                connection.sendall(bytes(1 << 26))  # more than sockets hold
            assert caught.value.errno == errno.ETIMEDOUT  # the kernel's, not settimeout's
