"""An API server that knows EndpointSlices, in this process: list, watch and faults on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from services.common.admin import EmbeddedServer

Json = dict[str, Any]


def endpoint(address: str, *, ready: bool | None = True, terminating: bool = False) -> Json:
    conditions: Json = {} if ready is None else {"ready": ready}
    return {"addresses": [address], "conditions": {**conditions, "terminating": terminating}}


def endpoint_slice(
    name: str, *endpoints: Json, service: str = "worker", kind: str = "IPv4", port: int = 50051
) -> Json:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": kind,
        "ports": [{"name": "admin", "port": 9090}, {"name": "grpc", "port": port}],
        "endpoints": list(endpoints),
    }


class FakeApi:
    """The slices of namespace "llm". `faults` are statuses that the next calls answer with."""

    def __init__(self) -> None:
        self.slices: dict[str, Json] = {}
        self.faults: list[int] = []
        self.tokens: list[str] = []
        self.num_lists = 0
        self.num_watches = 0
        self._version = 0
        self._watches: list[asyncio.Queue[Json | None]] = []
        self._watching = asyncio.Event()

    def put(self, item: Json) -> None:
        """Adds or changes a slice, and tells the watches."""
        name = item["metadata"]["name"]
        self._tell("MODIFIED" if name in self.slices else "ADDED", item)
        self.slices[name] = item

    def put_silently(self, item: Json) -> None:
        """Changes a slice as if the event were lost."""
        self.slices[item["metadata"]["name"]] = item

    def delete(self, name: str) -> None:
        self._tell("DELETED", self.slices.pop(name))

    def expire(self) -> None:
        """Tells the watches that their resource version is too old."""
        self._tell("ERROR", {"kind": "Status", "code": 410, "message": "too old"})

    def drop_watches(self) -> None:
        for queue in self._watches:
            queue.put_nowait(None)
        self._watching.clear()

    async def watched(self) -> None:
        """Returns once there is a watch."""
        await self._watching.wait()

    def _tell(self, kind: str, item: Json) -> None:
        self._version += 1
        for queue in self._watches:
            queue.put_nowait({"type": kind, "object": item})

    async def _answer(self, request: Request) -> Response:
        assert request.query_params["labelSelector"] == "kubernetes.io/service-name=worker"
        self.tokens.append(request.headers.get("authorization", ""))
        if self.faults:
            return JSONResponse({"kind": "Status"}, self.faults.pop(0))
        if "watch" not in request.query_params:
            self.num_lists += 1
            items = list(self.slices.values())
            return JSONResponse(
                {"metadata": {"resourceVersion": str(self._version)}, "items": items}
            )
        self.num_watches += 1
        assert request.query_params["resourceVersion"] == str(self._version)
        seconds = float(request.query_params["timeoutSeconds"])
        return StreamingResponse(self._events(seconds), media_type="application/json")

    async def _events(self, seconds: float) -> AsyncIterator[str]:
        queue: asyncio.Queue[Json | None] = asyncio.Queue()
        self._watches.append(queue)
        self._watching.set()
        try:
            async with asyncio.timeout(seconds):
                while (event := await queue.get()) is not None:
                    yield json.dumps(event) + "\n"
        except TimeoutError:
            return
        finally:
            self._watches.remove(queue)

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Serves on loopback; yields the base URL."""
        path = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
        app = Starlette(routes=[Route(path, self._answer)])
        async with served(app, port) as url:
            try:
                yield url
            finally:
                self.drop_watches()


@asynccontextmanager
async def served(app: Starlette, port: int = 0) -> AsyncIterator[str]:
    """Serves an app on loopback; yields the base URL. Open streams must end by themselves."""
    config = uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=0)
    server = EmbeddedServer(config)
    listener = config.bind_socket()
    listener.listen()  # so that nobody is refused while the server starts
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()
