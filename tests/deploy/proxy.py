"""A proxy before the API server that can end watches, and ask for versions that are too old."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.deploy.cluster import Cluster
from tests.gateway.discovery.fake_api import served


class ApiProxy:
    """Passes GETs on with the caller's own token; what the server answers is the server's."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.url = ""
        self.num_lists = 0
        self.num_expired = 0  # watches that the API server answered with 410
        self._client = client
        self._dropped = asyncio.Event()
        self._old = False

    def drop(self) -> None:
        """Ends the watches that are open."""
        self._dropped.set()
        self._dropped = asyncio.Event()

    def age_next_watch(self) -> None:
        """The next watch begins at the first version there ever was."""
        self._old = True

    async def answer(self, request: Request) -> Response:
        params = dict(request.query_params)
        headers = {"Authorization": request.headers["authorization"]}
        if "watch" not in params:
            self.num_lists += 1
            got = await self._client.get(request.url.path, params=params, headers=headers)
            return Response(got.content, got.status_code)
        if self._old:
            params["resourceVersion"], self._old = "1", False
        return StreamingResponse(self._watch(request.url.path, params, headers, self._dropped))

    async def _watch(
        self, path: str, params: dict[str, str], headers: dict[str, str], dropped: asyncio.Event
    ) -> AsyncIterator[str]:
        async with AsyncExitStack() as stack:
            upstream = self._client.stream("GET", path, params=params, headers=headers)
            lines = (await stack.enter_async_context(upstream)).aiter_lines()
            ended = asyncio.ensure_future(dropped.wait())
            stack.callback(ended.cancel)
            while True:
                line = asyncio.ensure_future(anext(lines, None))
                await asyncio.wait({line, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not line.done():
                    line.cancel()
                    await asyncio.wait({line})
                    return
                if (text := line.result()) is None:
                    return
                self.num_expired += '"code":410' in text
                yield text + "\n"


@asynccontextmanager
async def proxied(cluster: Cluster) -> AsyncIterator[ApiProxy]:
    """A proxy, without TLS, for as long as the context."""
    async with cluster.client() as client:
        client.headers.pop("Authorization")  # the right of everything is not passed on
        client.timeout = httpx.Timeout(60)
        proxy = ApiProxy(client)
        app = Starlette(routes=[Route("/{path:path}", proxy.answer)])
        async with served(app) as proxy.url:
            try:
                yield proxy
            finally:
                proxy.drop()
