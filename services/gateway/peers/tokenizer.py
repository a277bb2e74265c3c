"""The session to a tokenizer: encodes in flight, answered by handle."""

from __future__ import annotations

import asyncio

import grpc.aio

from protos import tokenizer_pb2, tokenizer_pb2_grpc
from services.common import rpc, wire
from services.common.errors import PeerLost
from services.gateway.peers.session import Peer

Request = tokenizer_pb2.TokenizerSessionRequest
Response = tokenizer_pb2.TokenizerSessionResponse


class _Job:
    """One encode that somebody waits for."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[tokenizer_pb2.EncodeResponse] = loop.create_future()

    def on_lost(self, error: PeerLost) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class TokenizerPeer(Peer[Request, Response, _Job]):
    """One tokenizer."""

    kind = "tokenizer"
    info: tokenizer_pb2.TokenizerInfo | None = None

    @property
    def model(self) -> str:
        """The model whose tokenizer this is, as last heard; empty before that."""
        return self.info.model if self.info else ""

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """Encodes one prompt; cancelling the wait cancels the job.

        Raises:
            PeerLost: the tokenizer is gone; another can do it.
            ShoalError: what the tokenizer answered.
        """
        job = _Job()
        handle = self._add(job)
        self.outbox.pending.jobs.add(handle=handle, request=request)
        self.outbox.notify()
        try:
            return await job.answer
        finally:
            if self._remove(handle, job):
                self.outbox.pending.cancels.append(handle)
                self.outbox.notify()

    def _on_frame(self, frame: Response) -> None:
        if frame.draining:
            self._drain()
        if frame.HasField("info"):
            self.info = frame.info
            self._greet()
        for result in frame.results:
            job = self._free(result.handle)
            if job is None or job.answer.done():
                continue
            if result.HasField("error"):
                job.answer.set_exception(wire.error_from_proto(result.error))
            else:
                job.answer.set_result(result.response)

    def _tell_lost(self, handler: _Job, error: PeerLost) -> None:
        handler.on_lost(error)

    def _new_outbox(self) -> rpc.Outbox[Request]:
        return rpc.Outbox(Request)

    def _open(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Request, Response]:
        return tokenizer_pb2_grpc.TokenizerStub(channel).Session()  # type: ignore[call-arg]  # it is written to
