"""How the fleet learns that a service is ready: gRPC health, GetInfo, the gateway's stdout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import worker_pb2, worker_pb2_grpc
from services.common.rpc import open_channel
from services.fleet.child import is_announcement
from services.fleet.service import Progress, Service

_PROGRESS_SECONDS = 0.5  # between two looks at a loading worker
_READYZ_SECONDS = 0.1  # between two looks at a gateway that is not ready yet
_RETRY_SECONDS = 1.0  # after a broken watch
_HTTP_TIMEOUT_SECONDS = 5.0


class HealthProbe:
    """Follows grpc.health.v1 by its Watch stream: no polling once a service is ready."""

    async def watch(self, service: Service) -> AsyncIterator[Progress]:
        """News of the service, for ever."""
        async with open_channel(service.spec.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    request = health_pb2.HealthCheckRequest()
                    async for answer in stub.Watch(request, wait_for_ready=True):
                        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
                        yield Progress(ready=serving)
                except grpc.aio.AioRpcError:
                    yield Progress(ready=False)
                await asyncio.sleep(_RETRY_SECONDS)


class WorkerProbe:
    """Health, and how far loading has come while it is not ready."""

    def __init__(self) -> None:
        self.model = ""  # as the worker names it, once it is ready

    async def watch(self, service: Service) -> AsyncIterator[Progress]:
        """News of the worker, for ever."""
        news: asyncio.Queue[Progress] = asyncio.Queue()
        health = asyncio.create_task(self._health(service, news))
        try:
            async with open_channel(service.spec.address) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                progress = await news.get()
                while True:
                    if progress.ready:
                        self.model = await _model_name(stub)
                        yield progress
                        progress = await news.get()
                        continue
                    yield await _load_progress(stub)
                    try:
                        async with asyncio.timeout(_PROGRESS_SECONDS):
                            progress = await news.get()
                    except TimeoutError:
                        continue
        finally:
            health.cancel()
            await asyncio.gather(health, return_exceptions=True)

    async def _health(self, service: Service, news: asyncio.Queue[Progress]) -> None:
        async for progress in HealthProbe().watch(service):
            news.put_nowait(progress)


async def _load_progress(stub: worker_pb2_grpc.WorkerAsyncStub) -> Progress:
    try:
        answer = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_RETRY_SECONDS)
    except grpc.aio.AioRpcError:
        return Progress(ready=False)
    load = answer.progress
    return Progress(ready=False, phase=load.phase, done=load.done, total=load.total)


async def _model_name(stub: worker_pb2_grpc.WorkerAsyncStub) -> str:
    try:
        answer = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_RETRY_SECONDS)
    except grpc.aio.AioRpcError:
        return ""
    return answer.info.model


@dataclass(frozen=True, slots=True)
class GatewayAddresses:
    """Where the gateway really listens, `host:port`; `grpc` may be empty."""

    http: str
    grpc: str

    @classmethod
    def parse(cls, line: str) -> GatewayAddresses | None:
        """Reads the JSON line that a gateway prints; None for any other line."""
        if not is_announcement(line):
            return None
        value = json.loads(line)
        return cls(value["http"], value["grpc"])


class GatewayProbe:
    """Reads the gateway's addresses from its stdout, then waits for the whole path's /readyz."""

    def __init__(self) -> None:
        self.addresses: GatewayAddresses | None = None

    async def watch(self, service: Service) -> AsyncIterator[Progress]:
        """Ends when the gateway has been ready once."""
        while (addresses := GatewayAddresses.parse(await service.stdout.get())) is None:
            pass
        self.addresses = addresses
        yield Progress(ready=False, phase="waiting for the services")
        async with admin_client(service.spec.admin_address) as client:
            await wait_readyz(client)
        yield Progress(ready=True)


def admin_client(address: str) -> httpx.AsyncClient:
    """A client of a service's admin address, `unix:/path`: no keys, no TLS."""
    # Without TLS there is nothing to verify, and loading the CA certificates takes 30 ms.
    transport = httpx.AsyncHTTPTransport(verify=False, uds=address.removeprefix("unix:"))
    return httpx.AsyncClient(
        transport=transport, base_url="http://admin", timeout=_HTTP_TIMEOUT_SECONDS
    )


async def wait_readyz(client: httpx.AsyncClient) -> None:
    """Returns once the gateway says that requests can be served."""
    while True:
        try:
            answer = await client.get("/readyz")
        except httpx.TransportError:
            pass
        else:
            if answer.status_code == 200:
                return
        await asyncio.sleep(_READYZ_SECONDS)
