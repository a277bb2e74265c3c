"""The session to a detokenizer: frames of ids out, frames of text in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc
import grpc.aio

from protos import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.common import rpc, wire
from services.common.errors import PeerLost, ShoalError
from services.common.tracing import NO_TRACE, TraceContext
from services.gateway.domain import TextOptions
from services.gateway.peers.session import Peer

Request = tokenizer_pb2.DetokenizerSessionRequest
Response = tokenizer_pb2.DetokenizerSessionResponse


class TextSink(Protocol):
    """Whoever opened a text. No call may block."""

    def on_text(self, text: str, ids_consumed: int) -> None:
        """New text; `ids_consumed` ids, from the first, have been taken in."""
        ...

    def on_text_end(self, stop: str | None, ids_consumed: int) -> None:
        """All text has come. With a stop string, the match needed `ids_consumed` ids."""
        ...

    def on_text_error(self, error: ShoalError) -> None:
        """The text cannot be decoded; nothing follows."""
        ...

    def on_decoder_lost(self, error: PeerLost) -> None: ...

    def on_decoder_draining(self) -> None:
        """The detokenizer will finish what it has and then go."""
        ...


class TextStream(Protocol):
    """One text that is being decoded. Every call is harmless after its end."""

    def push(self, token_ids: Sequence[int]) -> None:
        """The next ids."""
        ...

    def end(self) -> None:
        """No ids follow: what is held back comes out."""
        ...

    def close(self) -> None:
        """Nobody waits for the text any more."""
        ...


class Decoder(Protocol):
    """What the gateway needs of a detokenizer, in another process or in this one."""

    def open(
        self,
        options: TextOptions,
        sink: TextSink,
        replay_ids: Sequence[int] = (),
        skip_chars: int = 0,
        trace: TraceContext = NO_TRACE,
    ) -> TextStream:
        """Begins a text, or takes one over. Raises PeerLost without a session."""
        ...

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. Raises ShoalError."""
        ...

    async def lookup(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """The bytes of single tokens. Raises ShoalError."""
        ...


class _RemoteText:
    """A text on a detokenizer's session."""

    def __init__(self, peer: DetokenizerPeer, handle: int, sink: TextSink) -> None:
        self._peer = peer
        self._handle = handle
        self._sink = sink

    def push(self, token_ids: Sequence[int]) -> None:
        self._peer.push(self._handle, self._sink, token_ids)

    def end(self) -> None:
        self._peer.end_text(self._handle, self._sink)

    def close(self) -> None:
        self._peer.close_text(self._handle, self._sink)


class _Outbox(rpc.Outbox[Request]):
    """Ids wait in lists, which cost a token less than a message's fields."""

    def __init__(self) -> None:
        super().__init__(Request)
        self._handles: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []

    def add(self, handle: int, token_ids: Sequence[int]) -> None:
        """Ids of a text, behind what is pending of it."""
        self._handles.append(handle)
        self._counts.append(len(token_ids))
        self._token_ids += token_ids
        self.notify()

    def _take(self) -> Request:
        message = super()._take()
        message.handles.extend(self._handles)
        message.counts.extend(self._counts)
        message.token_ids.extend(self._token_ids)
        self._handles, self._counts, self._token_ids = [], [], []
        return message


class DetokenizerPeer(Peer[Request, Response, TextSink]):
    """One detokenizer."""

    kind = "detokenizer"
    info: tokenizer_pb2.TokenizerInfo | None = None
    outbox: _Outbox

    @property
    def model(self) -> str:
        """The model whose tokenizer this is, as last heard; empty before that."""
        return self.info.model if self.info else ""

    def open(
        self,
        options: TextOptions,
        sink: TextSink,
        replay_ids: Sequence[int] = (),
        skip_chars: int = 0,
        trace: TraceContext = NO_TRACE,
    ) -> TextStream:
        handle = self._add(sink)
        self.outbox.pending.opens.add(
            handle=handle,
            options=common_pb2.TextOptions(
                stop=options.stop,
                include_stop_str_in_output=options.include_stop_str_in_output,
                skip_special_tokens=options.skip_special_tokens,
            ),
            replay_ids=replay_ids,
            skip_chars=skip_chars,
            traceparent=trace.traceparent,
            tracestate=trace.tracestate,
        )
        self.outbox.notify()
        return _RemoteText(self, handle, sink)

    def push(self, handle: int, sink: TextSink, token_ids: Sequence[int]) -> None:
        """A text's next ids, if the handle still is the sink's."""
        if self._handlers.get(handle) is sink:
            self.outbox.add(handle, token_ids)

    def end_text(self, handle: int, sink: TextSink) -> None:
        """Says that no ids follow, if the handle still is the sink's."""
        if self._handlers.get(handle) is sink:
            self.outbox.pending.ends.append(handle)
            self.outbox.notify()

    def close_text(self, handle: int, sink: TextSink) -> None:
        """Gives a text up, if the handle still is the sink's."""
        if self._remove(handle, sink):
            self.outbox.pending.closes.append(handle)
            self.outbox.notify()

    async def decode(self, token_ids: Sequence[int]) -> str:
        stub = tokenizer_pb2_grpc.DetokenizerStub(self.channel())
        request = tokenizer_pb2.DecodeRequest(token_ids=token_ids, skip_special_tokens=False)
        answer = await self.call(stub.Decode(request, timeout=self._times.idle_peer_timeout))
        return answer.text

    async def lookup(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        stub = tokenizer_pb2_grpc.DetokenizerStub(self.channel())
        request = tokenizer_pb2.LookupRequest(token_ids=token_ids)
        answer = await self.call(stub.Lookup(request, timeout=self._times.peer_timeout))
        return answer.token_bytes

    def _on_frame(self, frame: Response) -> None:
        drain_begins = frame.draining and not self._draining
        if frame.draining:
            self._drain()
        if frame.HasField("info"):
            self.info = frame.info
            self._greet()
        find = self._handlers.get
        rows = zip(frame.handles, frame.texts, frame.ids_consumed, strict=True)
        for handle, text, consumed in rows:
            if sink := find(handle):
                sink.on_text(text, consumed)
        for ended in frame.ended:
            ended_sink = self._free(ended.handle)
            if ended_sink is None:
                continue  # closed meanwhile
            if ended.HasField("error"):
                ended_sink.on_text_error(wire.error_from_proto(ended.error))
            else:
                stop = ended.stop if ended.HasField("stop") else None
                ended_sink.on_text_end(stop, ended.ids_consumed)
        if drain_begins:
            for open_sink in list(self._handlers.values()):
                open_sink.on_decoder_draining()

    def _tell_lost(self, handler: TextSink, error: PeerLost) -> None:
        handler.on_decoder_lost(error)

    def _new_outbox(self) -> rpc.Outbox[Request]:
        return _Outbox()

    def _open(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Request, Response]:
        return tokenizer_pb2_grpc.DetokenizerStub(channel).Session()  # type: ignore[call-arg]  # it is written to
