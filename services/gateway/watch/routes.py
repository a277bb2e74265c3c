"""`/fleet` and its kin over HTTP: snapshots and journeys as JSON, the feed as events."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.common.errors import InvalidRequest
from services.gateway.asgi import BodyLimits, read_body, while_connected
from services.gateway.sse import EventStream
from services.gateway.watch.feed import Feed
from services.gateway.watch.journeys import Journeys
from services.gateway.watch.shapes import RequestJourney, RequestList
from services.gateway.watch.snapshot import Seen, snapshot

MAX_LISTED = 500
_PAUSE_SECONDS = 0.1  # between two writes to one watcher


class Watched(Seen, Protocol):
    """The gateway that is watched."""

    @property
    def journeys(self) -> Journeys: ...
    @property
    def feed(self) -> Feed: ...


def watch_routes(watched: Watched, limits: BodyLimits, keepalive: float) -> list[Route]:
    """The routes over one gateway; `services.gateway.watch.shapes` says what they answer."""

    async def fleet(request: Request) -> Response:
        return _json(snapshot(watched))

    async def history(request: Request) -> Response:
        return _json(watched.recent.history(_now()))

    async def requests(request: Request) -> Response:
        limit = _limit(request.query_params.get("limit", "100"))
        request_id = request.query_params.get("request_id", "")
        listed = watched.journeys.newest(limit, request_id)
        return _json(RequestList(_now(), time.time(), listed))

    async def journey(request: Request) -> Response:
        found = watched.journeys.find(request.path_params["id"])
        if found is None:
            raise HTTPException(404, "No such request is kept: it is too old, or another gateway's")
        summary = found.summary()
        return _json(RequestJourney(_now(), time.time(), summary, found.events, found.left_out))

    return [
        Route("/fleet", fleet),
        Route("/fleet/history", history),
        Route("/fleet/events", _FeedEndpoint(watched.feed, limits, keepalive), methods=["GET"]),
        Route("/fleet/requests", requests),
        Route("/fleet/requests/{id}", journey),
    ]


class _FeedEndpoint:
    """One stream of events for each call."""

    def __init__(self, feed: Feed, limits: BodyLimits, keepalive: float) -> None:
        self._feed = feed
        self._limits = limits
        self._keepalive = keepalive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, self._limits)
        stream = EventStream(send, keepalive=self._keepalive)
        error = await while_connected(
            scope,
            receive,
            self._serve(stream),
            until_tick=stream.until_keepalive,
            tick=stream.keep_alive,
        )
        if error is not None:
            raise error

    async def _serve(self, stream: EventStream) -> None:
        await stream.start()
        with self._feed.watch() as watcher:
            while events := await watcher.events():
                await stream.write(events)
                await asyncio.sleep(_PAUSE_SECONDS)
        await stream.end()


def _now() -> float:
    return time.monotonic()


def _limit(text: str) -> int:
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LISTED))
    if not (digits and 1 <= int(text) <= MAX_LISTED):
        raise InvalidRequest(f"limit must be an integer from 1 to {MAX_LISTED}", param="limit")
    return int(text)


def _json(value: msgspec.Struct) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(value), media_type="application/json", headers=headers)
