"""shoal.v1.Tokenizer over gRPC: encodes in, ids out, each job's fault its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

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
from services.tokenizer.lanes import Encoded, Lanes, Prepare
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.session import Sessions
from services.tokenizer.to_proto import reasoning_to_proto

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
MAX_JOBS = 16_384  # in flight on one session

Tiny = tuple[tokenizer_pb2.EncodeRequest, Prepare]


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
            return await self.encode(request)
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

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """The answer to one prompt. Raises ShoalError."""
        begun = time.time_ns()
        error = "cancelled"
        tokens = 0
        try:
            encoded = await self._encoded(request)
            tokens, error = len(encoded.token_ids), ""
            return self._response(request, encoded, begun)
        except ShoalError as fault:
            error = fault.code.name.lower()
            raise
        finally:
            self._trace(request, begun, tokens, error)

    async def encode_tiny(self, prompts: Sequence[Tiny]) -> list[tokenizer_pb2.EncodeResult]:
        """The outcomes of prompts that `prepare_tiny` took, without their handles. It never
        waits; a fault that is no prompt's own is raised."""
        assert self.lanes is not None, "it took them"
        begun = time.time_ns()
        outcomes = self.lanes.encode_at_once([prepare for _, prepare in prompts])
        results = []
        for (request, _), outcome in zip(prompts, outcomes, strict=True):
            if isinstance(outcome, ShoalError):
                self._trace(request, begun, 0, outcome.code.name.lower())
                results.append(self.failed(outcome))
            else:
                self._trace(request, begun, len(outcome.token_ids), "")
                response = self._response(request, outcome, begun)
                results.append(tokenizer_pb2.EncodeResult(response=response))
        return results

    def prepare_tiny(self, request: tokenizer_pb2.EncodeRequest) -> Prepare | None:
        """How to prepare a prompt that may be encoded in this turn of the event loop; None for
        any other, which is for `encode`."""
        if self.lanes is None or request.WhichOneof("input") not in ("chat", "text"):
            return None
        prepare, size = prepare_from_proto(request)
        return prepare if self.lanes.takes_at_once(size) else None

    def failed(self, fault: BaseException) -> tokenizer_pb2.EncodeResult:
        """The outcome of a job that ended with a fault, without its handle."""
        if not isinstance(fault, ShoalError):
            log.error("fault in encoding a prompt", exc_info=fault)
            fault = InternalError("internal error")
        self._metrics.failures.labels(fault.code.name.lower()).inc()
        return tokenizer_pb2.EncodeResult(error=error_to_proto(fault))

    async def _encoded(self, request: tokenizer_pb2.EncodeRequest) -> Encoded:
        if self.lanes is None:
            raise _loading()
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("there is no prompt", param="prompt")
        if kind == "token_ids":
            encoded = Encoded(list(request.token_ids.ids))
            self.lanes.encoder.check_ids(encoded.token_ids)
            return encoded
        return await self.lanes.encode(*prepare_from_proto(request))

    def _response(
        self, request: tokenizer_pb2.EncodeRequest, encoded: Encoded, begun: int
    ) -> tokenizer_pb2.EncodeResponse:
        assert self.lanes is not None, "it has encoded"
        ids = encoded.token_ids
        self._metrics.seconds.observe((time.time_ns() - begun) / 1e9)
        self._metrics.tokens.value += len(ids)
        spelling = self.lanes.encoder.spell(ids) if request.return_token_strs else ()
        return tokenizer_pb2.EncodeResponse(
            token_ids=ids, token_strs=spelling, reasoning=reasoning_to_proto(encoded.reasoning)
        )

    def _trace(
        self, request: tokenizer_pb2.EncodeRequest, begun: int, tokens: int, error: str
    ) -> None:
        if self._tracing.enabled:
            trace = TraceContext(request.traceparent, request.tracestate)
            attributes = {} if error else {"gen_ai.usage.input_tokens": tokens}
            self._tracing.record("encode", trace, begun, time.time_ns(), attributes, error)


class _Session:
    """One client's jobs. The tiny ones of a message are done together, in the next turn of the
    event loop; each other has a task."""

    def __init__(self, servicer: TokenizerServicer, sessions: Sessions) -> None:
        self.outbox = Outbox(tokenizer_pb2.TokenizerSessionResponse, busy=lambda: bool(self._jobs))
        self._servicer = servicer
        self._sessions = sessions
        self._jobs: dict[int, asyncio.Task[tokenizer_pb2.EncodeResponse] | None] = {}
        self._batches: set[asyncio.Task[list[tokenizer_pb2.EncodeResult]]] = set()

    def receive(self, request: tokenizer_pb2.TokenizerSessionRequest) -> None:
        tiny: dict[int, Tiny] = {}
        for job in request.jobs:
            if (error := self._refusal(job.handle)) is not None:
                self._answer(job.handle, tokenizer_pb2.EncodeResult(error=error_to_proto(error)))
            elif prepare := self._servicer.prepare_tiny(job.request):
                self._jobs[job.handle] = None
                tiny[job.handle] = job.request, prepare
            else:
                self._start(job.handle, job.request)
        for handle in request.cancels:
            if tiny.pop(handle, None):
                del self._jobs[handle]
            elif task := self._jobs.get(handle):
                task.cancel()
        if tiny:
            self._start_tiny(tiny)

    async def close(self) -> None:
        """Gives up what is in flight."""
        tasks = [*self._batches, *filter(None, self._jobs.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _refusal(self, handle: int) -> ShoalError | None:
        if handle in self._jobs:
            return InvalidRequest(f"handle {handle} is in flight already")
        if len(self._jobs) >= MAX_JOBS:
            message = f"a session may have {MAX_JOBS} jobs in flight"
            return Overloaded(message, retry_after=_RETRY_SECONDS)
        return None

    def _answer(self, handle: int, result: tokenizer_pb2.EncodeResult) -> None:
        result.handle = handle
        self.outbox.pending.results.append(result)
        self.outbox.notify()

    def _start(self, handle: int, request: tokenizer_pb2.EncodeRequest) -> None:
        task = self._jobs[handle] = asyncio.create_task(self._servicer.encode(request))
        self._sessions.change_work(1)
        task.add_done_callback(partial(self._finish, handle))

    def _finish(self, handle: int, task: asyncio.Task[tokenizer_pb2.EncodeResponse]) -> None:
        del self._jobs[handle]
        if not task.cancelled():
            fault = task.exception()
            if fault is not None:
                self._answer(handle, self._servicer.failed(fault))
            else:
                self._answer(handle, tokenizer_pb2.EncodeResult(response=task.result()))
        # Last, so that a drained process ends its sessions after this answer is pending.
        self._sessions.change_work(-1)

    def _start_tiny(self, tiny: Mapping[int, Tiny]) -> None:
        task = asyncio.create_task(self._servicer.encode_tiny(list(tiny.values())))
        self._batches.add(task)
        self._sessions.change_work(len(tiny))
        task.add_done_callback(partial(self._finish_tiny, tiny))

    def _finish_tiny(
        self, tiny: Mapping[int, Tiny], task: asyncio.Task[list[tokenizer_pb2.EncodeResult]]
    ) -> None:
        self._batches.discard(task)
        for handle in tiny:
            del self._jobs[handle]
        if not task.cancelled():
            if task.exception() is not None:  # one of them is at fault: now each by itself
                for handle, (request, _) in tiny.items():
                    self._start(handle, request)
            else:
                for handle, result in zip(tiny, task.result(), strict=True):
                    self._answer(handle, result)
        self._sessions.change_work(-len(tiny))


def _loading() -> Unavailable:
    return Unavailable("the tokenizer is still loading", retry_after=_RETRY_SECONDS)
