"""Sessions on one side, the engine on the other: what a worker pod does.

The open sessions, the map of handles and what the engine last said are all the state
there is. The agent knows neither gRPC nor processes: it is given a way to send
commands, and is told of events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from protos import common_pb2, engine_pb2, worker_pb2
from services.common.errors import InvalidRequest, Overloaded, ShoalError, Unavailable
from services.common.tracing import NoTracing
from services.worker.metrics import WorkerMetrics
from services.worker.sessions import HandleMap, Session
from services.worker.spans import RequestSpans

MAX_LIVE = 16_384  # requests of one session: far more than an engine queues
RETRY_SECONDS = 1.0  # when a client may try again at a worker that loads or drains


class Agent:
    """Sessions on one side, the engine's events on the other.

    Every method returns at once. The engine answers each submission with rejected or,
    in the end, finished, aborted ones too; that answer, and nothing else, frees the
    map's entry.
    """

    def __init__(
        self,
        send: Callable[[engine_pb2.EngineCommand], None],
        metrics: WorkerMetrics,
        *,
        spans: RequestSpans | None = None,
        handoff: bool = False,
        withdraw: Callable[[int], bool] = lambda handle: False,
    ) -> None:
        """With `handoff`, draining hands every request back instead of finishing it.

        `withdraw` takes a submission back that was given to `send` and is not on its way
        yet, and says whether it did.
        """
        self.info: worker_pb2.WorkerInfo | None = None
        self.progress = worker_pb2.LoadProgress(phase="starting the engine")
        self.changed = asyncio.Event()  # readiness may have changed; the reader clears it
        self.draining = False
        self._handoff = handoff
        self._failure: ShoalError | None = None
        self._send = send
        self._withdraw = withdraw
        self._metrics = metrics
        self._spans = spans or RequestSpans(NoTracing())
        self._sessions: set[Session] = set()
        self._watchers: set[Session] = set()  # who want to hear of every step
        self._handles = HandleMap()
        self._last_frame = worker_pb2.StepFrame()
        self._flushes: deque[asyncio.Future[int]] = deque()  # unanswered ones, in order
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
        return len(self._handles)

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
        self._watch(session, on=False)
        self._metrics.num_sessions = len(self._sessions)
        command = engine_pb2.EngineCommand()
        for handle in list(session.names):
            self._abort(handle, command)
        self._dispatch(command)

    def receive(self, session: Session, request: worker_pb2.WorkerSessionRequest) -> None:
        """Passes a client's submissions on to the engine, and then its aborts."""
        if request.HasField("watch_steps"):
            self._watch(session, on=request.watch_steps)
        command = engine_pb2.EngineCommand()
        for submit in request.submits:
            self._submit(session, submit, command)
        self._dispatch(command)
        command = engine_pb2.EngineCommand()
        for name in request.aborts:
            handle = session.engine_handles.get(name)
            if handle is not None:
                self._abort(handle, command)
        self._dispatch(command)

    def _watch(self, session: Session, *, on: bool) -> None:
        """Tells the engine when the first session begins to watch its steps, or the last ends."""
        was_watched = bool(self._watchers)
        (self._watchers.add if on else self._watchers.discard)(session)
        if bool(self._watchers) != was_watched and self._failure is None:
            self._send(engine_pb2.EngineCommand(watch_steps=on))

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
        """Refuses new requests from now on; the others finish or are handed back."""
        self.draining = True
        self.changed.set()
        if self._handoff:
            self._hand_back()
        for session in self._sessions:
            session.outbox.notify()

    def _hand_back(self) -> None:
        """Gives every request to its client again, to be continued elsewhere.

        What was sampled and has not come here yet is sampled again there: the draw depends
        on nothing but the request.
        """
        command = engine_pb2.EngineCommand()
        for session in self._sessions:
            for handle in list(session.names):
                if self._handles.hand_back(handle):
                    self._metrics.handed_back(handle)
                    self._drop(handle, command)
        self._dispatch(command)

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
            _add_totals(event.step.load, event.stats)
            self._handle_step(event.step, event.stats)
        if event.steps:
            for session in self._watchers:
                session.add_steps(event.steps)
        if event.HasField("progress"):
            self.progress = event.progress
        if event.HasField("ready"):
            self.info = event.ready
            self._metrics.engine_ready(event.ready)
            self._last_frame.epoch = event.ready.epoch
            self.changed.set()
        if event.HasField("flushed_pages"):
            for _ in range(min(event.num_flushes, len(self._flushes))):  # a loss leaves none
                answer = self._flushes.popleft()
                if not answer.done():  # else its caller has left
                    answer.set_result(event.flushed_pages)

    def _handle_step(self, frame: worker_pb2.StepFrame, stats: engine_pb2.EngineStats) -> None:
        self._metrics.stepped(frame, stats)
        self._spans.stepped(frame)
        self._last_frame = frame
        self._deliver(frame)

    def _deliver(self, frame: worker_pb2.StepFrame) -> None:
        """Tells the sessions of a frame, and frees the handles that it ends."""
        freed = [item.handle for item in frame.rejected]
        for item in frame.finished:
            if self._handles.is_given_up(item.handle):
                item.reason = common_pb2.FINISH_REASON_ABORT  # its last rows were dropped
            self._metrics.finished(item)
            self._spans.finished(item.handle, item.reason)
            freed.append(item.handle)
        self._handles.deliver(frame, self._sessions)
        for handle in freed:
            self._release(handle)

    # Requests.

    def _submit(
        self, session: Session, submit: worker_pb2.Submit, command: engine_pb2.EngineCommand
    ) -> None:
        if self._failure is not None:
            error: ShoalError = self._failure
        elif self.draining:
            error = Unavailable("the worker is draining", retry_after=RETRY_SECONDS)
        elif submit.handle in session.engine_handles:
            error = InvalidRequest(f"handle {submit.handle} is in use", param="handle")
        elif len(session.names) >= MAX_LIVE:
            error = Overloaded(f"a session may have {MAX_LIVE} requests", retry_after=RETRY_SECONDS)
        else:
            handle = self._handles.claim(session, submit.handle)
            self._idle.clear()
            self._metrics.submitted(handle, submit)
            self._spans.submitted(handle, submit)
            command.submits.append(submit)
            command.submits[-1].handle = handle
            return
        session.reject(submit.handle, error)

    def _abort(self, handle: int, command: engine_pb2.EngineCommand) -> None:
        if self._handles.give_up(handle):
            self._metrics.aborted(handle)
            self._drop(handle, command)

    def _drop(self, handle: int, command: engine_pb2.EngineCommand) -> None:
        """Ends a request that was given up: through the engine, or here if that was not told
        of it yet."""
        if not self._withdraw(handle):
            command.aborts.append(handle)
            return
        last = self._last_frame
        frame = worker_pb2.StepFrame(epoch=last.epoch, step=last.step, load=last.load)
        frame.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_ABORT)
        self._deliver(frame)

    def _release(self, handle: int) -> None:
        self._handles.release(handle)
        self._metrics.forget(handle)
        self._spans.forget(handle)
        if not self._handles:
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


def _add_totals(load: worker_pb2.Load, stats: engine_pb2.EngineStats) -> None:
    """Puts into a load what clients may know of the engine's counters."""
    load.num_prefill_tokens = stats.num_prefill_tokens
    load.num_output_tokens = stats.num_output_tokens
    load.num_prefix_query_tokens = stats.num_prefix_query_tokens
    load.num_prefix_hit_tokens = stats.num_prefix_hit_tokens
    load.step_us = stats.step_us
    load.busy_us = stats.busy_us
    load.bubble_us = stats.bubble_us
