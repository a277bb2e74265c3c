"""Servers and channels as every service sets them up: statuses, health, reflection, limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import worker_pb2, worker_pb2_grpc
from services.common import rpc
from services.common.errors import STATUSES, ErrorCode, ShoalError, error_class


class Failing(worker_pb2_grpc.WorkerServicer):
    """Every method raises `error`; without one, it waits until it is cancelled."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def _fail(self) -> None:
        self.entered.set()
        if self.error is not None:
            raise self.error
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.GetInfoResponse:
        await self._fail()
        return worker_pb2.GetInfoResponse()

    async def Generate(
        self, request: Any, context: Any
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        yield worker_pb2.WorkerGenerateResponse(token_ids=[1])
        await self._fail()

    async def Session(
        self, requests: Any, context: Any
    ) -> AsyncIterator[worker_pb2.WorkerSessionResponse]:
        yield worker_pb2.WorkerSessionResponse()
        await self._fail()

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        return worker_pb2.DrainResponse(num_requests=3)

    async def FlushCache(self, request: Any, context: Any) -> worker_pb2.FlushCacheResponse:
        return worker_pb2.FlushCacheResponse()


@pytest.fixture
async def servicer() -> Failing:
    return Failing()


@pytest.fixture
async def server(servicer: Failing) -> AsyncIterator[rpc.Server]:
    server = rpc.Server(["shoal.v1.Worker"])
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: rpc.Server, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    address = await server.start(f"unix:{tmp_path}/s.sock")
    async with rpc.open_channel(address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.WorkerAsyncStub:
    return worker_pb2_grpc.WorkerStub(channel)


async def _unary(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=10)


async def _stream(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    await _read_all(stub.Generate(worker_pb2.WorkerGenerateRequest(), timeout=10))


async def _session(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    async def nothing() -> AsyncIterator[worker_pb2.WorkerSessionRequest]:
        await asyncio.Event().wait()
        yield worker_pb2.WorkerSessionRequest()

    await _read_all(stub.Session(nothing(), timeout=10))


async def _read_all(call: Any) -> None:
    try:
        async for _ in call:
            pass
    finally:
        call.cancel()  # grpc.aio does not, if the task is cancelled before the call has begun


CALLS = pytest.mark.parametrize("call", [_unary, _stream, _session])


async def _failure(call: Any, stub: worker_pb2_grpc.WorkerAsyncStub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(stub)
    return caught.value


@CALLS
@pytest.mark.parametrize("code", list(ErrorCode))
async def test_an_error_becomes_its_status(
    servicer: Failing, stub: worker_pb2_grpc.WorkerAsyncStub, call: Any, code: ErrorCode
) -> None:
    servicer.error = error_class(code)("what happened", param="stop", retry_after=1.2)
    failure = await _failure(call, stub)
    assert failure.code() is STATUSES[code].grpc
    assert failure.details() == "what happened"
    trailers: dict[str, Any] = dict(failure.trailing_metadata())  # type: ignore[arg-type]
    assert trailers["shoal-error-param"] == "stop"
    assert trailers["shoal-error-code"] == STATUSES[code].code
    assert trailers["retry-after"] == "2"


@CALLS
async def test_a_fault_of_ours_is_internal_and_tells_nothing(
    servicer: Failing,
    stub: worker_pb2_grpc.WorkerAsyncStub,
    call: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    servicer.error = ValueError("/a/secret/path")
    failure = await _failure(call, stub)
    assert (failure.code(), failure.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    faults = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(faults) == 1
    assert "/a/secret/path" in caplog.text  # the log has it


@CALLS
async def test_a_cancel_reaches_the_handler_and_is_no_fault(
    servicer: Failing,
    stub: worker_pb2_grpc.WorkerAsyncStub,
    call: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = asyncio.create_task(call(stub))
    await servicer.entered.wait()
    task.cancel()
    async with asyncio.timeout(1):
        await servicer.cancelled.wait()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not caplog.records


async def test_a_deadline_ends_the_handler(
    servicer: Failing, stub: worker_pb2_grpc.WorkerAsyncStub
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(1):
        await servicer.cancelled.wait()


async def test_a_good_call_goes_through(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    assert (await stub.Drain(worker_pb2.DrainRequest())).num_requests == 3


async def test_health_follows_readiness(server: rpc.Server, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    states = health_pb2.HealthCheckResponse
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="shoal.v1.Worker"))
    assert (await watch.read()).status == states.NOT_SERVING
    await server.set_serving(True)
    assert (await watch.read()).status == states.SERVING
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == states.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nonesuch"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch.cancel()


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"shoal.v1.Worker", "grpc.health.v1.Health"} <= names


async def test_port_0_is_answered_with_the_real_one(server: rpc.Server) -> None:
    address = await server.start("127.0.0.1:0")
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_limits_and_pings_agree_on_both_sides() -> None:
    client = dict(rpc.CHANNEL_OPTIONS)
    server = dict(rpc.server_options(public=False))
    public = dict(rpc.server_options(public=True))
    least = "grpc.http2.min_recv_ping_interval_without_data_ms"
    assert server[least] <= client["grpc.keepalive_time_ms"]
    for direction in ("send", "receive"):
        key = f"grpc.max_{direction}_message_length"
        assert client[key] == server[key] == 256 * 1024 * 1024
    assert public["grpc.max_receive_message_length"] == 16 * 1024 * 1024
    assert client["grpc.max_reconnect_backoff_ms"] <= 5000


async def test_messages_over_4_mib_pass(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    submit = worker_pb2.Submit(prompt_ids=[1 << 27] * 2_000_000)  # 10 MB
    pieces = stub.Generate(worker_pb2.WorkerGenerateRequest(submit=submit))
    assert await pieces.read() == worker_pb2.WorkerGenerateResponse(token_ids=[1])
    pieces.cancel()


def test_an_error_keeps_its_message() -> None:
    assert str(ShoalError("a sentence")) == "a sentence"


@pytest.mark.parametrize("method", ["GetInfo", "Generate"])
async def test_bytes_that_are_no_message_are_the_clients_fault(
    servicer: Failing, channel: grpc.aio.Channel, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    call: Any = channel.stream_stream(
        f"/shoal.v1.Worker/{method}", request_serializer=bytes, response_deserializer=bytes
    )(iter([b"\xff" * 20]))

    async def read_to_the_end() -> None:
        while await call.read():
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_the_end()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a message" in str(caught.value.details())
    assert not caplog.records
    assert not servicer.entered.is_set()
