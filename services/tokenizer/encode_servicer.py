"""shoal.v1.Tokenizer over gRPC: encodes in, ids out, each job's fault its own."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator

from protos import tokenizer_pb2, tokenizer_pb2_grpc
from services.common.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    ShoalError,
    Unavailable,
)
from services.common.rpc import Outbox
from services.common.session import send_headers
from services.common.tracing import NoTracing, TraceContext, Tracing
from services.common.wire import error_to_proto
from services.tokenizer.from_proto import prepare_from_proto
from services.tokenizer.lanes import Encoded, Lanes
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.session import Sessions
from services.tokenizer.to_proto import reasoning_to_proto

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
MAX_JOBS = 16_384  # in flight on one session


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServicer):
    """The tokenizer's RPCs; raises ShoalError, which the server's interceptor maps.

    `lanes` and `info` are None until the model's files are loaded.
    """

    def __init__(
        self, sessions: Sessions, metrics: TokenizerMetrics, tracing: Tracing | None = None
    ) -> None:
        self.lanes: Lanes | None = None
        self.info: tokenizer_pb2.TokenizerInfo | None = None
        self._sessions = sessions
        self._metrics = metrics
        self._tracing = tracing or NoTracing()

    async def Encode(
        self,
        request: tokenizer_pb2.EncodeRequest,
        context: tokenizer_pb2_grpc._ServicerContext,
    ) -> tokenizer_pb2.EncodeResponse:
        """Renders and encodes one prompt."""
        self._sessions.change_work(1)
        try:
            return await self._encode(request)
        except ShoalError as error:
            self._metrics.failures.labels(error.code.name.lower()).inc()
            raise
        finally:
            self._sessions.change_work(-1)

    async def Session(  # type: ignore[override]  # the stub knows generators only
        self,
        request_iterator: AsyncIterator[tokenizer_pb2.TokenizerSessionRequest],
        context: tokenizer_pb2_grpc._ServicerContext,
    ) -> None:
        """Serves one client until it leaves, falls silent, or the process ends."""
        if self.info is None:
            raise _loading()
        session = _Session(self, self._sessions)
        session.outbox.pending.info.CopyFrom(self.info)
        session.outbox.notify()

        async def write(response: tokenizer_pb2.TokenizerSessionResponse) -> None:
            response.draining = self._sessions.draining
            await context.write(response)

        try:
            await send_headers(context)
            await self._sessions.serve(session.outbox, request_iterator, session.receive, write)
        finally:
            await session.close()

    async def _encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        trace = TraceContext(request.traceparent, request.tracestate)
        span = self._tracing.start("encode", trace)
        failure = "cancelled"
        try:
            response = await self._encode_prompt(request)
            span.set({"gen_ai.usage.input_tokens": len(response.token_ids)})
            failure = ""
            return response
        except ShoalError as error:
            failure = error.code.name.lower()
            raise
        finally:
            span.end(failure)

    async def _encode_prompt(
        self, request: tokenizer_pb2.EncodeRequest
    ) -> tokenizer_pb2.EncodeResponse:
        if self.lanes is None:
            raise _loading()
        start = time.monotonic()
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("there is no prompt", param="prompt")
        if kind == "token_ids":
            encoded = Encoded(list(request.token_ids.ids))
            self.lanes.encoder.check_ids(encoded.token_ids)
        else:
            prepare, size = prepare_from_proto(request)
            encoded = await self.lanes.encode(prepare, size)
        ids = encoded.token_ids
        self._metrics.seconds.observe(time.monotonic() - start)
        self._metrics.tokens.inc(len(ids))
        spelling = self.lanes.encoder.spell(ids) if request.return_token_strs else ()
        return tokenizer_pb2.EncodeResponse(
            token_ids=ids, token_strs=spelling, reasoning=reasoning_to_proto(encoded.reasoning)
        )

    def outcome(
        self, handle: int, task: asyncio.Task[tokenizer_pb2.EncodeResponse]
    ) -> tokenizer_pb2.EncodeResult:
        """What to answer for a finished job."""
        fault = task.exception()
        if fault is None:
            return tokenizer_pb2.EncodeResult(handle=handle, response=task.result())
        if not isinstance(fault, ShoalError):
            log.error("fault in encoding a prompt", exc_info=fault)
            fault = InternalError("internal error")
        self._metrics.failures.labels(fault.code.name.lower()).inc()
        return tokenizer_pb2.EncodeResult(handle=handle, error=error_to_proto(fault))

    def start(
        self, request: tokenizer_pb2.EncodeRequest
    ) -> asyncio.Task[tokenizer_pb2.EncodeResponse]:
        """Begins a job."""
        return asyncio.create_task(self._encode(request))


class _Session:
    """One client's jobs."""

    def __init__(self, servicer: TokenizerServicer, sessions: Sessions) -> None:
        self.outbox = Outbox(tokenizer_pb2.TokenizerSessionResponse, busy=lambda: bool(self._jobs))
        self._servicer = servicer
        self._sessions = sessions
        self._jobs: dict[int, asyncio.Task[tokenizer_pb2.EncodeResponse]] = {}

    def receive(self, request: tokenizer_pb2.TokenizerSessionRequest) -> None:
        for job in request.jobs:
            self._start(job)
        for handle in request.cancels:
            if task := self._jobs.get(handle):
                task.cancel()

    async def close(self) -> None:
        """Gives up what is in flight."""
        tasks = list(self._jobs.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, job: tokenizer_pb2.EncodeJob) -> None:
        error: ShoalError | None = None
        if job.handle in self._jobs:
            error = InvalidRequest(f"handle {job.handle} is in flight already")
        elif len(self._jobs) >= MAX_JOBS:
            message = f"a session may have {MAX_JOBS} jobs in flight"
            error = Overloaded(message, retry_after=_RETRY_SECONDS)
        if error is not None:
            self.outbox.pending.results.add(handle=job.handle, error=error_to_proto(error))
            self.outbox.notify()
            return
        task = self._servicer.start(job.request)
        self._jobs[job.handle] = task
        self._sessions.change_work(1)
        task.add_done_callback(functools.partial(self._finish, job.handle))

    def _finish(self, handle: int, task: asyncio.Task[tokenizer_pb2.EncodeResponse]) -> None:
        del self._jobs[handle]
        if not task.cancelled():
            self.outbox.pending.results.append(self._servicer.outcome(handle, task))
            self.outbox.notify()
        # Last, so that a drained process ends its sessions after this answer is pending.
        self._sessions.change_work(-1)


def _loading() -> Unavailable:
    return Unavailable("the tokenizer is still loading", retry_after=_RETRY_SECONDS)
