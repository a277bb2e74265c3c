"""One session to one peer: connecting, heartbeats, the watchdog, handles.

Owns the connection to an address for as long as the address is known: it connects,
reads frames, notices loss, and connects again. A subclass says which RPC carries
the session and what a frame means. Nothing here knows of requests: whoever opens a
handle is told of frames and of loss by plain calls, which must not block.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from services.common import rpc
from services.common.errors import (
    STATUSES,
    InternalError,
    PeerLost,
    ShoalError,
    StartupError,
    error_class,
)
from services.common.tls import NO_TLS

log = logging.getLogger(__name__)

_MAX_HANDLE = 1 << 31
_WATCH_SECONDS = 2.0
# A watchdog that wakes this late was not running: the silence was ours, not the peer's.
_STALL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """How patient a session is, in seconds."""

    peer_timeout: float = rpc.PEER_TIMEOUT_SECONDS  # with handles open
    idle_peer_timeout: float = rpc.IDLE_PEER_TIMEOUT_SECONDS
    min_backoff: float = 0.1
    max_backoff: float = 2.0


Q = TypeVar("Q", bound=Message)  # what the gateway sends
A = TypeVar("A", bound=Message)  # what the peer sends
H = TypeVar("H")  # whoever opened a handle
R = TypeVar("R")  # what a unary call answers

# A unary call that ends so was not refused: its time ended, or its server did.
_LOST_CALL = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


class Peer(ABC, Generic[Q, A, H]):
    """One address and the session to it.

    `ready` means that the session stands, the peer has said what it is, and it takes
    new work. Handles count up to 2^31 and begin again at 1, past those that are open: one
    is used again only after all the others, so a late frame finds nobody rather than
    somebody else. Every session starts an empty table.
    """

    kind: ClassVar[str]

    def __init__(self, address: str, times: SessionTimes, changed: Callable[[], None]) -> None:
        self.address = address
        self.outbox: rpc.Outbox[Q] = self._new_outbox()
        self._times = times
        self._changed = changed
        self._handlers: dict[int, H] = {}
        self._next_handle = 1
        self._channel: grpc.aio.Channel | None = None
        self._connected = False
        self._draining = False
        self._was_ready = False
        self._was_seen = False
        self.absence: Literal["starting", "dead"] = "starting"  # what it is while not connected
        self.why_absent = ""
        self.since = asyncio.get_running_loop().time()  # when it came to be as it is now
        self.tls = NO_TLS  # how the address is reached
        self.on_idle: Callable[[], None] = lambda: None  # after the last open handle has gone
        self._last_heard = 0.0
        self._busy_since = 0.0  # when the first of the open handles was opened

    @property
    def ready(self) -> bool:
        return self._connected and not self._draining

    @property
    def connected(self) -> bool:
        """The session stands and the peer has said what it is."""
        return self._connected

    @property
    def draining(self) -> bool:
        """The peer finishes what it has and takes no new work."""
        return self._draining

    @property
    def heard(self) -> float | None:
        """When anything came from it last, in the loop's time; None while not connected."""
        return self._last_heard if self._connected else None

    @property
    def outstanding(self) -> int:
        """Handles open on this session."""
        return len(self._handlers)

    async def run(self) -> None:
        """Keeps a session to the address until cancelled."""
        backoff = self._times.min_backoff
        refused = ""
        try:
            while True:
                error = await self._run_session()
                if self._was_ready:
                    log.warning("lost a peer", extra={"peer": self._name, "reason": error.reason})
                    backoff = self._times.min_backoff
                    refused = ""
                else:
                    # Over TLS a person must hear of it, once: it may not mend by itself.
                    news = self.tls and error.reason != refused
                    level = logging.WARNING if news else logging.DEBUG
                    extra = {"peer": self._name, "reason": error.reason}
                    log.log(level, "cannot reach a peer", extra=extra)
                    refused = error.reason
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 1.6, self._times.max_backoff)
        finally:
            self._lose(self._lost("is no longer used"))
            self._on_released()

    async def _run_session(self) -> PeerLost:
        """One connection, from connecting to loss; returns why it ended."""
        self._was_ready = False
        self._last_heard = asyncio.get_running_loop().time()
        try:
            channel = rpc.open_channel(self.address, self.tls)
        except StartupError as fault:  # a certificate is being replaced, or is gone
            lost = self._lost(f"cannot be reached: {fault}")
            self.why_absent = lost.reason
            return lost
        call = self._open(channel)
        self._channel = channel
        tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self.outbox.run(call.write)),
            asyncio.create_task(self._watch()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = self._reason(done)
            self._lose(error)
            return error
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also when cancelled here: the session may be released while it is lost
                await channel.close(None)

    async def _read(self, call: grpc.aio.StreamStreamCall[Q, A]) -> None:
        loop = asyncio.get_running_loop()
        async for frame in call:
            self._last_heard = loop.time()
            self._on_frame(frame)

    async def _watch(self) -> None:
        """Raises PeerLost once the peer has been silent for too long."""
        loop = asyncio.get_running_loop()
        while (left := self._silence_ends() - loop.time()) > 0:
            pause = min(left, _WATCH_SECONDS)  # the end moves when a handle is opened
            wake_at = loop.time() + pause
            await asyncio.sleep(pause)
            if loop.time() - wake_at > _STALL_SECONDS:
                self._last_heard = loop.time()
        raise self._lost("was silent for too long")

    def _silence_ends(self) -> float:
        """When the peer is dead if nothing is heard of it; an idle peer beats more slowly."""
        idle_end = self._last_heard + self._times.idle_peer_timeout
        if not self._handlers:
            return idle_end
        busy_end = max(self._last_heard, self._busy_since) + self._times.peer_timeout
        return min(busy_end, idle_end)

    def _reason(self, done: set[asyncio.Task[None]]) -> PeerLost:
        # A task that counts as cancelled heard the peer's CANCELLED: an end like any other.
        ended = [task for task in done if not task.cancelled()]
        failures = [failure for task in ended if (failure := task.exception()) is not None]
        self._note_absence(failures)
        for failure in failures:
            if isinstance(failure, PeerLost):
                return failure
            if isinstance(failure, grpc.aio.AioRpcError):
                why = failure.details() or failure.code().name
                return self._lost(f"was lost: {why}")
        for failure in failures:
            if not isinstance(failure, asyncio.InvalidStateError):  # a write after the end
                log.error("fault in the session to %s", self._name, exc_info=failure)
        return self._lost("ended the session")

    def _note_absence(self, failures: list[BaseException]) -> None:
        """One that answers, but not with a session, is starting; so is one never seen yet."""
        answers = any(
            isinstance(failure, grpc.aio.AioRpcError) and "shoal-error-code" in _trailers(failure)
            for failure in failures
        )
        absence: Literal["starting", "dead"] = "dead"
        if not self._was_seen or (answers and not self._was_ready):
            absence = "starting"
        if self._connected or absence != self.absence:
            self.absence, self.since = absence, asyncio.get_running_loop().time()

    def _lose(self, error: PeerLost) -> None:
        """Forgets the session and tells every open handle."""
        self._on_lost()
        self.why_absent = error.reason
        handlers, self._handlers = self._handlers, {}
        was_connected, self._connected = self._connected, False
        self._draining = False
        self._channel = None
        self.outbox = self._new_outbox()
        for handler in handlers.values():
            self._tell_lost(handler, error)
        if handlers:
            self.on_idle()
        if was_connected:
            self._changed()

    def _greet(self) -> None:
        """The peer has said what it is: work may start."""
        self._connected = self._was_ready = self._was_seen = True
        self.since = asyncio.get_running_loop().time()
        log.info("connected to a peer", extra={"peer": self._name})
        self._changed()

    def _drain(self) -> None:
        """The peer takes no new work for the rest of this session."""
        if not self._draining:
            self._draining = True
            self.since = asyncio.get_running_loop().time()
            self._changed()

    def _add(self, handler: H) -> int:
        """A new handle. Raises PeerLost if there is no session."""
        if not self._connected:
            raise self._lost("is not connected")
        while self._next_handle in self._handlers:
            self._next_handle = self._next_handle % _MAX_HANDLE + 1
        if not self._handlers:
            self._busy_since = asyncio.get_running_loop().time()
        handle = self._next_handle
        self._next_handle = handle % _MAX_HANDLE + 1
        self._handlers[handle] = handler
        return handle

    def _remove(self, handle: int, handler: H) -> bool:
        """Frees a handle, if it still is the handler's: after a loss it is not."""
        if self._handlers.get(handle) is not handler:
            return False
        self._free(handle)
        return True

    def _free(self, handle: int) -> H | None:
        """Frees a handle; returns whose it was, None if it was free already."""
        handler = self._handlers.pop(handle, None)
        if handler is not None and not self._handlers:
            self.on_idle()
        return handler

    def _on_lost(self) -> None:
        """For a subclass to forget what it keeps of one session alone, before all else."""

    def _on_released(self) -> None:
        """For a subclass to forget the address."""

    def channel(self) -> grpc.aio.Channel:
        """The session's channel, for unary calls. Raises PeerLost if there is none."""
        if not self._connected or self._channel is None:
            raise self._lost("is not connected")
        return self._channel

    async def call(self, begun: Awaitable[R]) -> R:
        """Awaits a unary call on `channel`.

        Raises PeerLost if the session or the call's time ends first, and what the peer
        answered.
        """
        try:
            return await begun
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled the waiter: the session's channel was closed under the call.
            raise self._lost("was lost during a call")

    @property
    def _name(self) -> str:
        return f"{self.kind} {self.address}"

    def _lost(self, what: str) -> PeerLost:
        """What happened to the peer: with its address in the log alone."""
        return PeerLost(f"the {self.kind} was lost", reason=f"{self._name} {what}")

    @abstractmethod
    def _new_outbox(self) -> rpc.Outbox[Q]: ...

    @abstractmethod
    def _open(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Q, A]:
        """Starts the RPC that carries the session."""

    @abstractmethod
    def _tell_lost(self, handler: H, error: PeerLost) -> None:
        """Tells a handler that the session is gone, and its handle with it."""

    @abstractmethod
    def _on_frame(self, frame: A) -> None:
        """Hands a frame to its handlers. Raises PeerLost to end the session."""


def error_from_rpc(error: grpc.aio.AioRpcError) -> ShoalError:
    """The error that a unary call of a Shoal service ended with."""
    trailers = _trailers(error)
    kind = trailers.get("shoal-error-code")
    message = error.details() or error.code().name
    seconds = trailers.get("retry-after", "")
    retry_after = float(seconds) if seconds.isdecimal() else None
    if error.code() in _LOST_CALL:
        # What gRPC itself says of a lost call has addresses in it.
        told = message if kind else "a service of this fleet could not be reached"
        return PeerLost(told, reason=message, retry_after=retry_after)
    for code, status in STATUSES.items():
        if status.grpc is error.code() and kind in (None, status.code):
            param = trailers.get("shoal-error-param")
            return error_class(code)(message, param=param, retry_after=retry_after)
    return InternalError(message)


def _trailers(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return dict(cast(Iterable[tuple[str, str]], error.trailing_metadata() or ()))
