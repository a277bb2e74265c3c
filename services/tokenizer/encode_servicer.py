"""shoal.v1.Tokenizer over gRPC: encodes in, ids out, each job's fault its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
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
from services.tokenizer.lanes import TINY_CHARACTERS, Encoded, Lanes, Prepare
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.session import Sessions
from services.tokenizer.to_proto import reasoning_to_proto

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
MAX_JOBS = 16_384  # in flight on one session


@dataclass(slots=True)
class Receipt:
    """When a prompt came: the wall clock's time for its span, the steady one's for how long it
    takes. Both in nanoseconds."""

    wall: int
    steady: int

    @classmethod
    def now(cls) -> Receipt:
        return cls(time.time_ns(), time.monotonic_ns())

    @property
    def age(self) -> int:
        return time.monotonic_ns() - self.steady


@dataclass(slots=True)
class Job:
    """A prompt on its way to its ids. `plan`: how to prepare it, and about how many characters
    it has; None for ids, and where there is no prompt."""

    request: tokenizer_pb2.EncodeRequest
    receipt: Receipt
    plan: tuple[Prepare, int] | None

    @classmethod
    def of(cls, request: tokenizer_pb2.EncodeRequest, receipt: Receipt) -> Job:
        to_encode = request.WhichOneof("input") in ("chat", "text")
        return cls(request, receipt, prepare_from_proto(request) if to_encode else None)

    @property
    def tiny(self) -> bool:
        """Whether it may be encoded on the event loop."""
        return self.plan is not None and self.plan[1] <= TINY_CHARACTERS


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
            return await self.encode(Job.of(request, Receipt.now()))
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
        session = EncodeSession(self, self._sessions)
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

    async def encode(self, job: Job, *, in_thread: bool = False) -> tokenizer_pb2.EncodeResponse:
        """The answer to one prompt; `in_thread`: not on the event loop. Raises ShoalError."""
        error = "cancelled"
        tokens = 0
        try:
            encoded = await self._encoded(job, in_thread)
            tokens, error = len(encoded.token_ids), ""
            response = self._response(job, encoded)
            self._count(job, tokens)
            return response
        except ShoalError as fault:
            error = fault.code.name.lower()
            raise
        finally:
            self._trace(job, tokens, error)

    def claim_turn(self, num_tiny: int) -> int:
        """How many tiny prompts `encode_tiny` may be given in this turn of the event loop."""
        assert self.lanes is not None, "it has a session"
        return self.lanes.claim_turn(num_tiny)

    def encode_tiny(self, jobs: Sequence[Job]) -> list[tokenizer_pb2.EncodeResult]:
        """The outcomes of tiny prompts, without their handles. Raises a fault that is no
        prompt's own; then none of them counts as encoded or failed."""
        assert self.lanes is not None, "it has a session"
        outcomes = self.lanes.encode_at_once([job.plan[0] for job in jobs if job.plan])
        results = [
            tokenizer_pb2.EncodeResult(error=error_to_proto(outcome))
            if isinstance(outcome, ShoalError)
            else tokenizer_pb2.EncodeResult(response=self._response(job, outcome))
            for job, outcome in zip(jobs, outcomes, strict=True)
        ]
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, ShoalError):
                code = outcome.code.name.lower()
                self._metrics.failures.labels(code).inc()
                self._trace(job, 0, code)
            else:
                self._count(job, len(outcome.token_ids))
                self._trace(job, len(outcome.token_ids), "")
        return results

    def failed(self, fault: BaseException) -> tokenizer_pb2.EncodeResult:
        """The outcome of a job that ended with a fault, without its handle."""
        if not isinstance(fault, ShoalError):
            log.error("fault in encoding a prompt", exc_info=fault)
            fault = InternalError("internal error")
        self._metrics.failures.labels(fault.code.name.lower()).inc()
        return tokenizer_pb2.EncodeResult(error=error_to_proto(fault))

    async def _encoded(self, job: Job, in_thread: bool) -> Encoded:
        if self.lanes is None:
            raise _loading()
        if job.plan is not None:
            encode = self.lanes.encode_in_thread if in_thread else self.lanes.encode
            return await encode(*job.plan)
        if not job.request.HasField("token_ids"):
            raise InvalidRequest("there is no prompt", param="prompt")
        encoded = Encoded(list(job.request.token_ids.ids))
        self.lanes.encoder.check_ids(encoded.token_ids)
        return encoded

    def _response(self, job: Job, encoded: Encoded) -> tokenizer_pb2.EncodeResponse:
        assert self.lanes is not None, "it has encoded"
        ids = encoded.token_ids
        spelling = self.lanes.encoder.spell(ids) if job.request.return_token_strs else ()
        return tokenizer_pb2.EncodeResponse(
            token_ids=ids, token_strs=spelling, reasoning=reasoning_to_proto(encoded.reasoning)
        )

    def _count(self, job: Job, num_tokens: int) -> None:
        self._metrics.seconds.observe(job.receipt.age / 1e9)
        self._metrics.tokens.value += num_tokens

    def _trace(self, job: Job, num_tokens: int, error: str) -> None:
        if self._tracing.enabled:
            trace = TraceContext(job.request.traceparent, job.request.tracestate)
            attributes = {} if error else {"gen_ai.usage.input_tokens": num_tokens}
            begun, end = job.receipt.wall, job.receipt.wall + job.receipt.age
            self._tracing.record("encode", trace, begun, end, attributes, error)


class EncodeSession:
    """One client's jobs. The tiny ones of a message are done together, in the next turn of the
    event loop and as many as a turn allows; each other has a task."""

    def __init__(self, servicer: TokenizerServicer, sessions: Sessions) -> None:
        self.outbox = Outbox(tokenizer_pb2.TokenizerSessionResponse, busy=lambda: bool(self._jobs))
        self._servicer = servicer
        self._sessions = sessions
        self._jobs: dict[int, asyncio.Task[tokenizer_pb2.EncodeResponse] | None] = {}
        self._closed = False

    def receive(self, request: tokenizer_pb2.TokenizerSessionRequest) -> None:
        receipt = Receipt.now()
        tiny: dict[int, Job] = {}
        for message in request.jobs:
            handle = message.handle
            if (error := self._refusal(handle)) is not None:
                self._answer(handle, tokenizer_pb2.EncodeResult(error=error_to_proto(error)))
                continue
            job = Job.of(message.request, receipt)
            if job.tiny:
                self._jobs[handle] = None
                tiny[handle] = job
            else:
                self._start(handle, job)
        for handle in request.cancels:
            if tiny.pop(handle, None):
                del self._jobs[handle]
            elif task := self._jobs.get(handle):
                task.cancel()
        if tiny:
            self._sessions.change_work(len(tiny))
            asyncio.get_running_loop().call_soon(self._encode_tiny, tiny)

    async def close(self) -> None:
        """Gives up what is in flight."""
        self._closed = True
        tasks = list(filter(None, self._jobs.values()))
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

    def _start(self, handle: int, job: Job) -> None:
        task = asyncio.create_task(self._servicer.encode(job, in_thread=True))
        self._jobs[handle] = task
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

    def _encode_tiny(self, tiny: Mapping[int, Job]) -> None:
        for handle in tiny:
            del self._jobs[handle]
        if not self._closed:
            items = list(tiny.items())
            num_now = self._servicer.claim_turn(len(items))
            now, later = items[:num_now], items[num_now:]
            try:
                results = self._servicer.encode_tiny([job for _, job in now])
            except Exception:  # one of them is at fault: now each by itself, which tells whose
                now, later, results = [], items, []
            for (handle, _), result in zip(now, results, strict=True):
                self._answer(handle, result)
            for handle, job in later:
                self._start(handle, job)
        self._sessions.change_work(-len(tiny))


def _loading() -> Unavailable:
    return Unavailable("the tokenizer is still loading", retry_after=_RETRY_SECONDS)
