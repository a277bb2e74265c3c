"""The session to a worker: submissions and aborts out, step frames in.

Knows the structure-of-arrays frame and hands each request its own rows; what a
token means is the business of whoever submitted it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from protos import worker_pb2, worker_pb2_grpc
from services.common import rpc, wire
from services.common.errors import InternalError, PeerLost, ShoalError, Unavailable
from services.gateway.domain import TokenLogprobs
from services.gateway.peers.breaker import Breaker, State
from services.gateway.peers.load import WorkerLoad
from services.gateway.peers.session import Peer, SessionTimes
from services.gateway.peers.speed import Speed
from services.gateway.peers.steps import Finished, TokenSink, finished_of, rows_of, token_logprobs
from services.gateway.prefix_index import PrefixIndex

Request = worker_pb2.WorkerSessionRequest
Response = worker_pb2.WorkerSessionResponse

log = logging.getLogger(__name__)


class Submission:
    """One request on one worker, until it ends there."""

    def __init__(self, peer: WorkerPeer, handle: int, sink: TokenSink) -> None:
        self.peer = peer
        self._handle = handle
        self._sink = sink

    def abort(self) -> None:
        """Gives the request up; nothing more is heard of it. Harmless after its end."""
        self.peer.abort(self._handle, self._sink)


class WorkerPeer(Peer[Request, Response, TokenSink]):
    """One worker. `info` is what it last said of itself, also while it is away."""

    kind = "worker"

    def __init__(
        self,
        address: str,
        times: SessionTimes,
        changed: Callable[[], None],
        index: PrefixIndex,
    ) -> None:
        super().__init__(address, times, changed)
        self.info: worker_pb2.WorkerInfo | None = None
        self.model = ""
        self.fingerprint = ""
        self.breaker = Breaker()
        self.on_load: Callable[[WorkerPeer], None] = lambda peer: None  # after a load was told
        self.on_breaker_open: Callable[[], None] = lambda: None
        self.on_steps: Callable[[WorkerPeer, Sequence[worker_pb2.EngineStep]], None] = _ignore
        self.speed = Speed()
        self._watched = False  # this session was asked for the engine's steps
        self._index = index
        self._load = WorkerLoad()
        self._unproven: set[int] = set()  # handles without a token yet
        self._clock = asyncio.get_running_loop().time

    @property
    def ready(self) -> bool:
        return (
            self._connected
            and not self._draining
            and (self.breaker.closed or self.breaker.allows(self._clock()))
        )

    @property
    def breaker_state(self) -> State:
        return self.breaker.state(self._clock())

    @property
    def broken(self) -> bool:
        """Only its circuit breaker keeps it from being ready."""
        return self._connected and not self._draining and not self.ready

    @property
    def load(self) -> int:
        """Requests there: as reported, and what this gateway sent since or knows better."""
        return self._load.total(len(self._handlers))

    @property
    def room(self) -> int:
        """Requests it can take before they would only wait there."""
        max_running = self.info.max_running_requests if self.info else 0
        return self._load.room(max_running, len(self._handlers))

    @property
    def reported(self) -> worker_pb2.Load:
        """What it last told of its load."""
        return self._load.reported

    def submit(self, submit: worker_pb2.Submit, sink: TokenSink) -> Submission:
        """Sends a request; its handle is filled in. Raises PeerLost without a session."""
        submit.handle = self._add(sink)
        self.outbox.pending.submits.append(submit)
        self.outbox.notify()
        self._load.send(submit.handle)
        self._unproven.add(submit.handle)
        if not self.breaker.closed:
            self.breaker.sending(self._clock())
            self._announce_next_chance()
        return Submission(self, submit.handle, sink)

    def abort(self, handle: int, sink: TokenSink) -> None:
        """Gives a request up, if the handle still is the sink's."""
        if self._remove(handle, sink):
            self.outbox.pending.aborts.append(handle)
            self.outbox.notify()

    def watch_steps(self, *, on: bool) -> None:
        """Asks for every engine step (`on_steps`), or for none, if that is news here."""
        if self._connected and on != self._watched:
            self._watched = on
            self.outbox.pending.watch_steps = on
            self.outbox.notify()

    async def flush_cache(self) -> None:
        """Drops the worker's unused prefixes. Raises ShoalError."""
        stub = worker_pb2_grpc.WorkerStub(self.channel())
        await self.call(stub.FlushCache(worker_pb2.FlushCacheRequest(), timeout=30))
        self._index.forget(self.address)

    def _on_frame(self, frame: Response) -> None:
        drain_begins = frame.draining and not self._draining
        if frame.draining:
            self._drain()
        if frame.HasField("info"):
            self._introduce(frame.info)
        if frame.HasField("step"):
            self._on_step(frame.step)
        if frame.steps:
            self.on_steps(self, frame.steps)
        if drain_begins:
            for sink in list(self._handlers.values()):
                sink.on_worker_draining()

    def _introduce(self, info: worker_pb2.WorkerInfo) -> None:
        if self.info is None or info.epoch != self.info.epoch:
            self._index.forget(self.address)  # another engine, whose cache is cold
            self.speed = Speed()
        self.info = info
        self.model, self.fingerprint = info.model, info.fingerprint
        self.breaker.reconnect(self._clock())
        self._greet()

    def _on_step(self, step: worker_pb2.StepFrame) -> None:
        if self.info and step.epoch and step.epoch != self.info.epoch:
            raise self._lost("restarted its engine")
        if step.HasField("load"):
            self._take_load(step.load)
        if step.compiling:
            self._load.compile(step.compiling)
        for handle in step.accepted:
            self._load.drop(handle)  # what was reported beside it counts it
            if sink := self._handlers.get(handle):
                sink.on_accepted()
        for started in step.started:
            if sink := self._handlers.get(started.handle):
                sink.on_started(started.cached_tokens)
        for part in step.prefilled:
            if sink := self._handlers.get(part.handle):
                sink.on_prefilled(part.num_tokens)
        self._deliver_rows(step)
        for moved in step.moved:
            if handed_back := self._free(moved):
                handed_back.on_moved()
        for rejected in step.rejected:
            self._refuse(rejected.handle, wire.error_from_proto(rejected.error))
        if step.HasField("load"):
            self.on_load(self)

    def _take_load(self, load: worker_pb2.Load) -> None:
        self._load.report(load)
        self.speed.observe(self._last_heard, load)
        if load.has_digest:
            self._index.report(self.address, load.prefix_digest)

    def _refuse(self, handle: int, error: ShoalError) -> None:
        unproven = handle in self._unproven
        sink = self._free(handle)
        if self._draining and isinstance(error, Unavailable):
            if sink is not None:  # it had been on its way when the worker began to drain
                sink.on_moved()
            return
        if unproven and isinstance(error, Unavailable | InternalError):
            self._fail()
        if sink is not None:
            sink.on_rejected(error)

    def _deliver_rows(self, step: worker_pb2.StepFrame) -> None:
        """Tokens and ends. Most rows are nothing but the next token of a request."""
        rows = rows_of(step)
        if step.finished or step.logprobs or self._unproven:
            logprobs = self._take_logprobs(step)
            finished = {row.handle: finished_of(row) for row in step.finished}
            for handle, token_ids in rows.items():
                self._deliver(handle, token_ids, logprobs.get(handle), finished.pop(handle, None))
            for handle, end in finished.items():
                self._deliver(handle, (), None, end)
            return
        find = self._handlers.get
        for handle, token_ids in rows.items():
            if sink := find(handle):  # else it was aborted meanwhile
                sink.on_tokens(token_ids, None, None)

    def _deliver(
        self,
        handle: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        finished: Finished | None,
    ) -> None:
        sink = self._handlers.get(handle)
        if sink is None:
            return  # aborted meanwhile
        if handle in self._unproven:
            self._prove(handle, finished)
        if finished is not None:
            self._free(handle)
        sink.on_tokens(token_ids, logprobs, finished)

    def _prove(self, handle: int, finished: Finished | None) -> None:
        """The first that is heard of a request: its first token, or its end without one."""
        self._unproven.discard(handle)
        if finished is not None and finished.reason == "abort":
            self._fail()
            return
        was_closed = self.breaker.closed
        self.breaker.succeed()
        if not was_closed:
            self.since = self._clock()
            self._changed()

    def _fail(self) -> None:
        was_ready, num_openings = self.ready, self.breaker.num_openings
        self.breaker.fail(self._clock())
        if self.breaker.num_openings > num_openings:  # also again, by a probe that failed
            self.on_breaker_open()
            self._announce_next_chance()
        if was_ready and not self.ready:
            self.since = self._clock()
            log.warning("a worker's circuit breaker opened", extra={"peer": self._name})
            self._changed()

    def _announce_next_chance(self) -> None:
        """Wakes those who wait for a worker when the breaker lets a probe through."""
        asyncio.get_running_loop().call_at(self.breaker.next_chance, self._changed)

    def _free(self, handle: int) -> TokenSink | None:
        self._unproven.discard(handle)
        self._load.drop(handle)
        return super()._free(handle)

    def _take_logprobs(self, step: worker_pb2.StepFrame) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities by handle; those of prompts are handed on at once."""
        by_handle: dict[int, list[TokenLogprobs]] = {}
        for row in step.logprobs:
            if row.prompt_tokens and (sink := self._handlers.get(row.handle)):
                sink.on_prompt_logprobs([token_logprobs(token) for token in row.prompt_tokens])
            by_handle.setdefault(row.handle, []).extend(
                token_logprobs(token) for token in row.tokens
            )
        return by_handle

    def _tell_lost(self, handler: TokenSink, error: PeerLost) -> None:
        handler.on_worker_lost(error)

    def _on_lost(self) -> None:
        if self._unproven and not self._draining:
            self._fail()  # once, however many it took with it
        self._unproven.clear()
        self._load.lose_session()
        self._watched = False

    def _on_released(self) -> None:
        self._index.forget(self.address)

    def _new_outbox(self) -> rpc.Outbox[Request]:
        return rpc.Outbox(Request)

    def _open(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Request, Response]:
        return worker_pb2_grpc.WorkerStub(channel).Session()  # type: ignore[call-arg]  # it is written to


async def flush_all(peers: Sequence[WorkerPeer]) -> None:
    """Flushes several workers at once. Raises the first error after all have answered."""
    results = await asyncio.gather(*(peer.flush_cache() for peer in peers), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _ignore(worker: WorkerPeer, steps: Sequence[worker_pb2.EngineStep]) -> None:
    pass
