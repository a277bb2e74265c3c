"""The pod's one map: which client's request is which in the engine.

Clients name their requests with handles of their own; the engine gets handles that
are unique in it, and its frames go back under the clients' names. That map, the
sessions and what the engine last said are all the state there is. The agent knows
neither gRPC nor processes: it is given a way to send commands, and is told of events.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protos import common_pb2, engine_pb2, worker_pb2
from services.common.errors import InvalidRequest, ShoalError, Unavailable
from services.common.rpc import Outbox
from services.common.wire import error_to_proto
from services.worker.metrics import WorkerMetrics

MAX_HANDLE = (1 << 32) - 1
RETRY_SECONDS = 1.0  # when a client may try again at a worker that loads or drains


class Session:
    """One client: what it calls its requests, and what it will be sent next."""

    def __init__(self) -> None:
        self.outbox = Outbox(worker_pb2.WorkerSessionResponse)
        # Done when the worker ends the session: with a result to end it in order,
        # with an exception to abort it.
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.engine_handles: dict[int, int] = {}  # the client's handle -> the engine's
        self.names: dict[int, int] = {}  # the engine's handle -> the client's

    def add(self, frame: worker_pb2.StepFrame) -> None:
        """Merges a frame, under the client's names, into what is sent next."""
        step = self.outbox.pending.step
        digest = () if frame.load.prefix_digest else step.load.prefix_digest[:]
        # Lists grow; the load is replaced, zeros included, which a merge would skip. Only
        # its digest stays until there is a newer one: most frames come without.
        step.ClearField("load")
        step.MergeFrom(frame)
        if digest:
            step.load.prefix_digest.extend(digest)
        self.outbox.notify()

    def reject(self, handle: int, error: ShoalError) -> None:
        self.outbox.pending.step.rejected.add(handle=handle, error=error_to_proto(error))
        self.outbox.notify()

    def end(self, error: ShoalError | None = None) -> None:
        """Asks the session's stream to end; the first reason stands."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            self.ended.exception()  # a stream that ended by itself reads it no more


@dataclass(slots=True)
class _Rows:
    """One session's rows of a frame."""

    handles: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Agent:
    """Sessions on one side, the engine's events on the other.

    Every method returns at once. The engine answers each submission with rejected or,
    in the end, finished, aborted ones too; that answer, and nothing else, frees the
    map's entry.
    """

    def __init__(
        self, send: Callable[[engine_pb2.EngineCommand], None], metrics: WorkerMetrics
    ) -> None:
        self.info: worker_pb2.WorkerInfo | None = None
        self.progress = worker_pb2.LoadProgress(phase="starting the engine")
        self.changed = asyncio.Event()  # readiness may have changed; the reader clears it
        self.draining = False
        self._failure: ShoalError | None = None
        self._send = send
        self._metrics = metrics
        self._sessions: set[Session] = set()
        self._owners: dict[int, Session] = {}  # the engine's handle -> whose it is
        self._aborted: set[int] = set()  # engine handles whose rows nobody waits for
        self._last_handle = 0
        self._last_frame = worker_pb2.StepFrame()
        self._flushes: list[asyncio.Future[int]] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """New requests are taken."""
        return self.info is not None and not self.draining and self._failure is None

    @property
    def failed(self) -> bool:
        """The engine is lost."""
        return self._failure is not None

    @property
    def num_requests(self) -> int:
        """Requests that the engine has not ended yet."""
        return len(self._owners)

    # What clients do.

    def open_session(self) -> tuple[Session, worker_pb2.WorkerInfo]:
        """A new session. Raises Unavailable while the engine loads and after its loss."""
        session, info = Session(), self._require_engine()
        self._sessions.add(session)
        self._metrics.num_sessions = len(self._sessions)
        return session, info

    def close_session(self, session: Session) -> None:
        """Forgets a client that is gone and gives its requests up."""
        self._sessions.discard(session)
        self._metrics.num_sessions = len(self._sessions)
        command = engine_pb2.EngineCommand()
        for handle in session.names:
            self._abort(handle, command)
        self._dispatch(command)

    def receive(self, session: Session, request: worker_pb2.WorkerSessionRequest) -> None:
        """Passes a client's submissions and aborts on, in one command to the engine."""
        command = engine_pb2.EngineCommand()
        for submit in request.submits:
            self._submit(session, submit, command)
        for name in request.aborts:
            handle = session.engine_handles.get(name)
            if handle is not None:
                self._abort(handle, command)
        self._dispatch(command)

    def stamp(self, response: worker_pb2.WorkerSessionResponse) -> None:
        """Completes what is about to be sent: progress and load go with every message."""
        if not response.step.epoch:  # nothing from the engine is in it
            last = self._last_frame
            response.step.epoch, response.step.step = last.epoch, last.step
            response.step.load.CopyFrom(last.load)
        response.draining = self.draining

    async def flush_cache(self) -> int:
        """Drops the engine's prefix cache and returns the number of pages freed.

        Raises Unavailable when there is no engine, or it is lost before it answers.
        """
        self._require_engine()
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(answer)
        self._send(engine_pb2.EngineCommand(flush_cache=True))
        return await answer

    # The pod's life.

    def drain(self) -> None:
        """Refuses new requests from now on; the running ones finish."""
        self.draining = True
        self.changed.set()
        for session in self._sessions:
            session.outbox.notify()

    async def idle(self) -> None:
        """Returns once no request is left."""
        await self._idle.wait()

    def end_sessions(self) -> None:
        """Ends every session: in order if it has nothing left, as lost if it has."""
        for session in self._sessions:
            unfinished = Unavailable("the worker shut down before the request finished")
            session.end(unfinished if session.names else None)

    def fail(self) -> None:
        """The engine is lost: ends every session and every call with Unavailable."""
        self._failure = Unavailable("the worker's engine is lost")
        self.changed.set()
        for session in self._sessions:
            session.end(self._failure)
        for answer in self._flushes:
            if not answer.done():
                answer.set_exception(self._failure)
        self._flushes.clear()

    # What the engine does.

    def handle_event(self, event: engine_pb2.EngineEvent) -> None:
        """Takes in one event of rank 0."""
        if event.HasField("step"):
            self._handle_step(event.step, event.stats)
        if event.HasField("progress"):
            self.progress = event.progress
        if event.HasField("ready"):
            self.info = event.ready
            self._metrics.engine_ready(event.ready.model)
            self._last_frame.epoch = event.ready.epoch
            self.changed.set()
        if event.HasField("flushed_pages"):
            for answer in self._flushes:  # the rank answers all that came together at once
                if not answer.done():  # else its caller has left
                    answer.set_result(event.flushed_pages)
            self._flushes.clear()

    def _handle_step(self, frame: worker_pb2.StepFrame, stats: engine_pb2.EngineStats) -> None:
        self._metrics.stepped(frame, stats)
        self._last_frame = frame
        freed = [item.handle for item in frame.rejected]
        for item in frame.finished:
            if item.handle in self._aborted:
                item.reason = common_pb2.FINISH_REASON_ABORT  # its last rows were dropped
            self._metrics.finished(item.handle, item.reason)
            freed.append(item.handle)
        self._deliver(frame)
        for handle in freed:
            self._release(handle)

    def _deliver(self, frame: worker_pb2.StepFrame) -> None:
        if len(self._sessions) == 1 and not self._aborted:
            (session,) = self._sessions
            if _has_news(frame):
                _rename(frame, session.names)
                session.add(frame)
            return  # without news, the session's heartbeat is enough
        for session, part in self._split(frame).items():
            part.epoch, part.step = frame.epoch, frame.step
            part.load.CopyFrom(frame.load)
            session.add(part)

    def _split(self, frame: worker_pb2.StepFrame) -> dict[Session, worker_pb2.StepFrame]:
        """Each open session's part of a frame, without the rows of aborted requests."""
        parts = {session: worker_pb2.StepFrame() for session in self._sessions}
        for session, rows in self._split_rows(frame).items():
            parts[session].handles.extend(rows.handles)
            parts[session].counts.extend(rows.counts)
            parts[session].token_ids.extend(rows.token_ids)
        for handle in frame.accepted:
            session = self._owners[handle]
            if session in parts:
                parts[session].accepted.append(session.names[handle])
        for group in ("rejected", "finished", "logprobs"):
            for item in getattr(frame, group):
                session = self._owners[item.handle]
                if session in parts and not (group == "logprobs" and item.handle in self._aborted):
                    copy = getattr(parts[session], group).add()
                    copy.CopyFrom(item)
                    copy.handle = session.names[item.handle]
        to_all = bool(frame.load.prefix_digest)
        return {session: part for session, part in parts.items() if to_all or part.ByteSize()}

    def _split_rows(self, frame: worker_pb2.StepFrame) -> dict[Session, _Rows]:
        """The rows by session, in plain lists: appending to a message's list is slow."""
        parts: defaultdict[Session, _Rows] = defaultdict(_Rows)
        owners, aborted = self._owners, self._aborted
        token_ids = frame.token_ids[:]
        start = 0
        for handle, count in zip(frame.handles[:], frame.counts[:], strict=True):
            if handle not in aborted:
                session = owners[handle]
                rows = parts[session]
                rows.handles.append(session.names[handle])
                rows.counts.append(count)
                rows.token_ids += token_ids[start : start + count]
            start += count
        return parts

    # The map.

    def _submit(
        self, session: Session, submit: worker_pb2.Submit, command: engine_pb2.EngineCommand
    ) -> None:
        if submit.handle in session.engine_handles:
            error: ShoalError = InvalidRequest(f"handle {submit.handle} is in use", param="handle")
        elif not self.ready:
            error = Unavailable("the worker is draining", retry_after=RETRY_SECONDS)
        else:
            handle = self._new_handle()
            session.engine_handles[submit.handle] = handle
            session.names[handle] = submit.handle
            self._owners[handle] = session
            self._idle.clear()
            self._metrics.submitted(handle)
            command.submits.append(submit)
            command.submits[-1].handle = handle
            return
        session.reject(submit.handle, error)

    def _new_handle(self) -> int:
        while True:
            self._last_handle = self._last_handle % MAX_HANDLE + 1
            if self._last_handle not in self._owners:
                return self._last_handle

    def _abort(self, handle: int, command: engine_pb2.EngineCommand) -> None:
        if handle not in self._aborted:
            self._aborted.add(handle)
            self._metrics.aborted(handle)
            command.aborts.append(handle)

    def _release(self, handle: int) -> None:
        session = self._owners.pop(handle)
        del session.engine_handles[session.names.pop(handle)]
        self._aborted.discard(handle)
        self._metrics.forget(handle)
        if not self._owners:
            self._idle.set()

    def _dispatch(self, command: engine_pb2.EngineCommand) -> None:
        if command.submits or command.aborts:
            self._send(command)

    def _require_engine(self) -> worker_pb2.WorkerInfo:
        if self._failure is not None:
            raise self._failure
        if self.info is None:
            message = f"the worker is loading: {self.progress.phase}"
            raise Unavailable(message, retry_after=RETRY_SECONDS)
        return self.info


def _has_news(frame: worker_pb2.StepFrame) -> bool:
    """A frame that a client waits for, or that tells it about the cache; most are."""
    return bool(
        frame.handles
        or frame.accepted
        or frame.rejected
        or frame.finished
        or frame.logprobs
        or frame.load.prefix_digest
    )


def _rename(frame: worker_pb2.StepFrame, names: Mapping[int, int]) -> None:
    """Puts the client's handles in place of the engine's, in every part of a frame."""
    for handles in (frame.handles, frame.accepted):
        if handles:
            handles[:] = [names[handle] for handle in handles[:]]  # a copied list iterates faster
    for group in (frame.rejected, frame.finished, frame.logprobs):
        for item in group:
            item.handle = names[item.handle]
