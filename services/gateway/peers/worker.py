"""The session to a worker: submissions and aborts out, step frames in.

Knows the structure-of-arrays frame and hands each request its own rows; what a
token means is the business of whoever submitted it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from protos import common_pb2, worker_pb2, worker_pb2_grpc
from services.common import rpc, wire
from services.common.errors import PeerLost, ShoalError
from services.gateway.domain import FinishReason, TokenLogprobs
from services.gateway.peers.session import Peer, SessionTimes

Request = worker_pb2.WorkerSessionRequest
Response = worker_pb2.WorkerSessionResponse

_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class Finished:
    """How a worker ended a request."""

    reason: FinishReason
    stop_token_id: int | None


class TokenSink(Protocol):
    """Whoever submitted a request to a worker. No call may block."""

    def on_accepted(self) -> None: ...

    def on_rejected(self, error: ShoalError) -> None:
        """Refused, or failed after it was accepted; nothing follows."""
        ...

    def on_started(self, cached_tokens: int) -> None:
        """Its prompt is being computed; that many of the tokens were cached."""
        ...

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None: ...

    def on_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        finished: Finished | None,
    ) -> None:
        """The next tokens; with `finished` nothing follows."""
        ...

    def on_worker_lost(self, error: PeerLost) -> None: ...


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

    def __init__(self, address: str, times: SessionTimes, changed: Callable[[], None]) -> None:
        super().__init__(address, times, changed)
        self.info: worker_pb2.WorkerInfo | None = None
        self.reported = worker_pb2.Load()
        self.prefixes: frozenset[int] = frozenset()
        self._unreported = 0  # submitted since the worker last reported its load

    @property
    def model(self) -> str:
        return self.info.model if self.info else ""

    @property
    def fingerprint(self) -> str:
        return self.info.fingerprint if self.info else ""

    @property
    def load(self) -> int:
        """Requests there: as reported, and what this gateway sent since or knows better."""
        reported = self.reported.num_running + self.reported.num_waiting
        return max(reported + self._unreported, self.outstanding)

    def submit(self, submit: worker_pb2.Submit, sink: TokenSink) -> Submission:
        """Sends a request; its handle is filled in. Raises PeerLost without a session."""
        submit.handle = self._add(sink)
        self.outbox.pending.submits.append(submit)
        self.outbox.notify()
        self._unreported += 1
        return Submission(self, submit.handle, sink)

    def abort(self, handle: int, sink: TokenSink) -> None:
        """Gives a request up, if the handle still is the sink's."""
        if self._remove(handle, sink):
            self.outbox.pending.aborts.append(handle)
            self.outbox.notify()

    async def flush_cache(self) -> None:
        """Drops the worker's unused prefixes. Raises ShoalError."""
        stub = worker_pb2_grpc.WorkerStub(self.channel())
        await self.call(stub.FlushCache(worker_pb2.FlushCacheRequest(), timeout=30))

    def _on_frame(self, frame: Response) -> None:
        if frame.draining:
            self._drain()
        if frame.HasField("info"):
            if self.info is None or frame.info.epoch != self.info.epoch:
                self.prefixes = frozenset()  # another engine, whose cache is cold
            self.info = frame.info
            self._greet()
        if frame.HasField("step"):
            self._on_step(frame.step)

    def _on_step(self, step: worker_pb2.StepFrame) -> None:
        if self.info and step.epoch and step.epoch != self.info.epoch:
            raise PeerLost(f"the engine of {self._name} restarted")
        if step.HasField("load"):
            self.reported = step.load
            self._unreported = 0
            if step.load.has_digest:
                self.prefixes = frozenset(step.load.prefix_digest)
        for handle in step.accepted:
            if sink := self._handlers.get(handle):
                sink.on_accepted()
        for started in step.started:
            if sink := self._handlers.get(started.handle):
                sink.on_started(started.cached_tokens)
        logprobs = self._take_logprobs(step)
        finished = {row.handle: row for row in step.finished}
        for handle, token_ids in _rows(step).items():
            self._deliver(handle, token_ids, logprobs.get(handle), finished.pop(handle, None))
        for handle, row in finished.items():
            self._deliver(handle, (), None, row)
        for rejected in step.rejected:
            if refused := self._free(rejected.handle):
                refused.on_rejected(wire.error_from_proto(rejected.error))

    def _deliver(
        self,
        handle: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        row: worker_pb2.Finished | None,
    ) -> None:
        sink = self._handlers.get(handle)
        if sink is None:
            return  # aborted meanwhile
        if row is None:
            sink.on_tokens(token_ids, logprobs, None)
            return
        self._free(handle)
        stop_id = row.stop_token_id if row.HasField("stop_token_id") else None
        reason = _REASONS.get(row.reason, "abort")
        sink.on_tokens(token_ids, logprobs, Finished(reason, stop_id))

    def _take_logprobs(self, step: worker_pb2.StepFrame) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities by handle; those of prompts are handed on at once."""
        by_handle: dict[int, list[TokenLogprobs]] = {}
        for row in step.logprobs:
            if row.prompt_tokens and (sink := self._handlers.get(row.handle)):
                sink.on_prompt_logprobs([_logprobs(token) for token in row.prompt_tokens])
            by_handle.setdefault(row.handle, []).extend(_logprobs(token) for token in row.tokens)
        return by_handle

    def _tell_lost(self, handler: TokenSink, error: PeerLost) -> None:
        handler.on_worker_lost(error)

    def _on_lost(self) -> None:
        self._unreported = 0

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


def _rows(step: worker_pb2.StepFrame) -> dict[int, list[int]]:
    """Token ids by handle; a merged frame may hold several rows of one handle."""
    token_ids = list(step.token_ids)
    rows: dict[int, list[int]] = {}
    end = 0
    for handle, count in zip(step.handles, step.counts, strict=True):
        start, end = end, end + count
        if handle in rows:
            rows[handle] += token_ids[start:end]
        else:
            rows[handle] = token_ids[start:end]
    return rows


def _logprobs(token: common_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(token.top_token_ids, token.top_logprobs, strict=True))
    return TokenLogprobs(token.token_id, token.logprob, top)
