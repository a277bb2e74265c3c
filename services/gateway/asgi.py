"""What the REST front end does below Starlette: bodies, lost clients, request ids, keys.

Nothing here knows of generations or of the OpenAI API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common import logs
from services.common.errors import Cancelled, InvalidRequest, TooLarge, Unauthenticated
from services.gateway.ids import new_id
from services.gateway.json_depth import DepthGauge
from services.gateway.keys import KeyRing
from services.gateway.link import LINK, Link
from services.gateway.openai.errors import error_response

_REQUEST_ID = b"x-request-id"
_MAX_REQUEST_ID = 256
_OPEN_PATHS = frozenset(("/livez", "/readyz", "/health", "/"))  # for those who have no keys yet
_OPEN_FILES = "/web/"  # what the page at / consists of: the same for everybody


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How long and how deeply nested a body may be."""

    max_bytes: int
    max_depth: int


async def read_body(scope: Scope, receive: Receive, limits: BodyLimits) -> bytes:
    """The whole body, counted while it comes.

    Raises:
        TooLarge: as soon as it is known to be over the limit.
        InvalidRequest: if it is nested too deeply.
        Cancelled: if the client leaves before the end.
    """
    limit, depth = limits.max_bytes, _DepthLimit(limits.max_depth)
    announced = header(scope, b"content-length") or ""
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left before the end of the body")
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
        await depth.check(pieces)
        if not message.get("more_body", False):
            return b"".join(pieces)


class _DepthLimit:
    """Raises InvalidRequest for a body that is too deep, once enough of it has come.

    Almost no body has more brackets than it may be deep, and is looked at any closer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_open = 0
        self._gauge: DepthGauge | None = None

    async def check(self, pieces: Sequence[bytes]) -> None:
        """Takes in the last of the pieces; all of them are those so far."""
        self._num_open += pieces[-1].count(b"[") + pieces[-1].count(b"{")
        if self._num_open <= self._limit:
            return
        unseen = pieces[-1:] if self._gauge else pieces
        self._gauge = self._gauge or DepthGauge()
        for piece in unseen:
            self._gauge.feed(piece)
            await asyncio.sleep(0)  # the others' turn
        if self._gauge.deepest > self._limit:
            raise InvalidRequest(f"the body is nested more than {self._limit} deep")


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes")


async def while_connected(
    scope: Scope,
    receive: Receive,
    work: Awaitable[None],
    *,
    until_tick: Callable[[], float],
    tick: Callable[[], Awaitable[None]],
) -> Exception | None:
    """Awaits `work`, and cancels it the moment the client leaves.

    Call it once the body is read: nobody else may then ask for messages. `tick` is called
    whenever the seconds that `until_tick` gave have passed. Returns what `work` raised; None
    if it ended well, or the client left.
    """
    task = asyncio.current_task()
    assert task is not None, "servers call applications in tasks"
    watch = _Watch(task, until_tick, tick)
    watch.begin(scope, receive)
    try:
        await work
    except asyncio.CancelledError:
        if not watch.client_left or task.uncancel():
            raise  # the server itself is ending
        return None
    except Exception as error:
        fault: Exception | None = error
    else:
        fault = None
    finally:
        watch.end()
    if watch.client_left:  # just as the work ended
        task.uncancel()
    try:
        return fault
    finally:
        del fault  # it holds this frame, and would be garbage in a cycle


class _Watch:
    """Cancels a task when its client leaves, and ticks meanwhile."""

    def __init__(
        self,
        task: asyncio.Task[Any],
        until_tick: Callable[[], float],
        tick: Callable[[], Awaitable[None]],
    ) -> None:
        self.client_left = False
        self._task = task
        self._until_tick = until_tick
        self._tick = tick
        self._loop = task.get_loop()
        self._timer = self._loop.call_later(until_tick(), self._on_time)
        self._ticking: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._asking: asyncio.Task[None] | None = None

    def begin(self, scope: Scope, receive: Receive) -> None:
        extensions: Mapping[str, Any] = scope.get("extensions") or {}
        if LINK in extensions:
            self._link = extensions[LINK]["link"]
            self._link.when_gone(self._leave)
        else:  # as below other servers: wait for the one message that tells
            self._asking = self._loop.create_task(_disconnected(receive))
            self._asking.add_done_callback(self._on_asked)

    def end(self) -> None:
        self._timer.cancel()
        if self._link is not None:
            self._link.when_gone(None)
        for task in (self._ticking, self._asking):
            if task is not None:
                task.cancel()

    def _on_asked(self, asking: asyncio.Task[None]) -> None:
        if not asking.cancelled():
            self._leave()

    def _leave(self) -> None:
        if not self.client_left:
            self.client_left = True
            self._task.cancel()

    def _on_time(self) -> None:
        self._ticking = self._loop.create_task(self._tick_once())

    async def _tick_once(self) -> None:
        await self._tick()
        self._timer = self._loop.call_later(self._until_tick(), self._on_time)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def headers(scope: Scope, name: bytes) -> list[str]:
    """The values of a request's headers of a name, which is in lower case."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def header(scope: Scope, name: bytes) -> str | None:
    """The first of them."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


class RequestIds:
    """Middleware: every request has an id, and every response names it.

    The client's own `x-request-id` is kept, less what a header may not carry, and cut
    at 256 characters. It is for logs only, and may repeat.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, _REQUEST_ID)
        request_id = _printable(given or "") or new_id()
        scope.setdefault("state", {})["request_id"] = request_id
        logs.bind(request_id=request_id)
        named = (_REQUEST_ID, request_id.encode("latin-1"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), named]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _printable(text: str) -> str:
    kept = "".join(char for char in text if char >= " " and not "\x7f" <= char <= "\x9f")
    return kept[:_MAX_REQUEST_ID].strip()


class RequireKey:
    """Middleware: turns away whoever has no key, but for probes and the page's own files.

    The name of the caller's key is left in the scope's state as `tenant`.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            try:
                tenant = self._keys.identify(Headers(scope=scope)) if self._keys else ""
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FILES)


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Lets pages of these origins call from a browser; the app itself if there are none.

    A browser's preflight has no key, so this stands before whatever asks for one.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[_REQUEST_ID.decode(), "retry-after"],
        max_age=86_400,
    )
