"""shoal.v1.Worker over gRPC: streams in, streams out, no decisions.

A session's reader never waits for its writer, nor the engine for either: what
cannot be written yet merges in the session's outbox.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator

from protos import worker_pb2, worker_pb2_grpc
from services.common.errors import Unavailable
from services.common.rpc import IDLE_PEER_TIMEOUT_SECONDS
from services.common.session import in_time, run_session, send_headers, serve_client
from services.common.wire import error_from_proto
from services.worker.agent import Agent

_MAX_DEADLINE_MS = (1 << 32) - 1


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """The worker's RPCs; raises ShoalError, which the server's interceptor maps."""

    def __init__(self, agent: Agent, *, peer_timeout: float = IDLE_PEER_TIMEOUT_SECONDS) -> None:
        self._agent = agent
        self._peer_timeout = peer_timeout

    async def Session(  # type: ignore[override]  # the stub knows generators only
        self,
        request_iterator: AsyncIterator[worker_pb2.WorkerSessionRequest],
        context: worker_pb2_grpc._ServicerContext,
    ) -> None:
        """Serves one client until it leaves, falls silent, or the worker ends."""
        session, info = self._agent.open_session()
        session.outbox.pending.info.CopyFrom(info)
        session.outbox.notify()

        async def write(response: worker_pb2.WorkerSessionResponse) -> None:
            self._agent.stamp(response)
            await context.write(response)

        try:
            await send_headers(context)
            await serve_client(
                session.outbox,
                request_iterator,
                functools.partial(self._agent.receive, session),
                write,
                session.ended,
                peer_timeout=self._peer_timeout,
            )
        finally:
            self._agent.close_session(session)

    async def Generate(  # type: ignore[override]
        self,
        request: worker_pb2.WorkerGenerateRequest,
        context: worker_pb2_grpc._ServicerContext,
    ) -> None:
        """Streams one generation: a session of one request, aborted when the call ends early."""
        submit = request.submit
        submit.handle = 0
        _limit_deadline(submit, context.time_remaining())
        session, _ = self._agent.open_session()
        send = in_time(context.write, self._peer_timeout)

        async def write(message: worker_pb2.WorkerSessionResponse) -> None:
            step = message.step
            if step.rejected:
                raise error_from_proto(step.rejected[0].error)
            response = worker_pb2.WorkerGenerateResponse(token_ids=step.token_ids)
            for row in step.logprobs:
                response.logprobs.extend(row.tokens)
                response.prompt_logprobs.extend(row.prompt_tokens)
            if step.finished:
                response.finished.CopyFrom(step.finished[0])
                response.finished.handle = 0
            if response.ByteSize():
                await send(response)
            if step.finished:
                session.end()  # once it is written
            if step.moved:
                raise Unavailable("the worker is going away; resume the request elsewhere")

        try:
            await send_headers(context)
            self._agent.receive(session, worker_pb2.WorkerSessionRequest(submits=[submit]))
            await run_session(session.outbox, write, session.ended)
        finally:
            self._agent.close_session(session)

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: worker_pb2_grpc._ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        """What the worker is, or how far it has come in loading."""
        if self._agent.info is not None:
            return worker_pb2.GetInfoResponse(info=self._agent.info)
        return worker_pb2.GetInfoResponse(progress=self._agent.progress)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: worker_pb2_grpc._ServicerContext
    ) -> worker_pb2.DrainResponse:
        """Refuses new requests from now on, and hands the others back if that is how it drains;
        the process stays until it is told to end."""
        self._agent.drain()
        return worker_pb2.DrainResponse(num_requests=self._agent.num_requests)

    async def FlushCache(
        self, request: worker_pb2.FlushCacheRequest, context: worker_pb2_grpc._ServicerContext
    ) -> worker_pb2.FlushCacheResponse:
        """Drops every cached prefix that no request uses."""
        return worker_pb2.FlushCacheResponse(num_pages=await self._agent.flush_cache())


def _limit_deadline(submit: worker_pb2.Submit, seconds: float | None) -> None:
    """Lets the request's deadline be the call's, if that is sooner."""
    if seconds is None:
        return
    milliseconds = min(max(0, int(seconds * 1000)), _MAX_DEADLINE_MS)
    if not submit.HasField("deadline_ms") or milliseconds < submit.deadline_ms:
        submit.deadline_ms = milliseconds
