"""shoal.v1.Detokenizer over gRPC: frames of ids in, frames of text out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from protos import tokenizer_pb2, tokenizer_pb2_grpc
from services.common.errors import InvalidRequest, Overloaded, ShoalError, Unavailable
from services.common.rpc import Outbox
from services.common.session import send_headers
from services.common.text.decoder import TextDecoder, TextDelta
from services.common.tracing import NoTracing, Span, TraceContext, Tracing
from services.common.wire import error_to_proto
from services.tokenizer.metrics import DetokenizerMetrics
from services.tokenizer.session import Sessions

_RETRY_SECONDS = 1.0
_LONG_DECODE = 16_384  # ids; more are decoded off the event loop
MAX_OPEN_TEXTS = 16_384  # of one session


class DetokenizerServicer(tokenizer_pb2_grpc.DetokenizerServicer):
    """The detokenizer's RPCs; raises ShoalError, which the server's interceptor maps.

    `decoder` and `info` are None until the model's files are loaded.
    """

    def __init__(
        self, sessions: Sessions, metrics: DetokenizerMetrics, tracing: Tracing | None = None
    ) -> None:
        self.decoder: TextDecoder | None = None
        self.info: tokenizer_pb2.TokenizerInfo | None = None
        self._sessions = sessions
        self._metrics = metrics
        self._tracing = tracing or NoTracing()

    async def Decode(
        self,
        request: tokenizer_pb2.DecodeRequest,
        context: tokenizer_pb2_grpc._ServicerContext,
    ) -> tokenizer_pb2.DecodeResponse:
        """Decodes a whole list of ids at once."""
        decoder = self._loaded()
        ids: Sequence[int] = list(request.token_ids)
        if max(ids, default=0) >= decoder.vocab_size:
            raise InvalidRequest(
                f"token id {max(ids)} is not in the vocabulary of {decoder.vocab_size}",
                param="tokens",
            )
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        if len(ids) > _LONG_DECODE:
            text = await asyncio.to_thread(decoder.decode, ids, skip_special_tokens=skip)
        else:
            text = decoder.decode(ids, skip_special_tokens=skip)
        self._metrics.tokens.inc(len(ids))
        return tokenizer_pb2.DecodeResponse(text=text)

    async def Lookup(
        self,
        request: tokenizer_pb2.LookupRequest,
        context: tokenizer_pb2_grpc._ServicerContext,
    ) -> tokenizer_pb2.LookupResponse:
        """The bytes of single tokens."""
        token_bytes = self._loaded().token_bytes
        return tokenizer_pb2.LookupResponse(
            token_bytes=[token_bytes(token_id) for token_id in request.token_ids]
        )

    async def Session(  # type: ignore[override]  # the stub knows generators only
        self,
        request_iterator: AsyncIterator[tokenizer_pb2.DetokenizerSessionRequest],
        context: tokenizer_pb2_grpc._ServicerContext,
    ) -> None:
        """Serves one client until it leaves, falls silent, or the process ends."""
        session = _Session(self._loaded().session(), self._sessions, self._metrics, self._tracing)
        if self.info is not None:
            session.outbox.pending.info.CopyFrom(self.info)
        session.outbox.notify()

        async def write(response: tokenizer_pb2.DetokenizerSessionResponse) -> None:
            response.draining = self._sessions.draining
            await context.write(response)

        try:
            await send_headers(context)
            await self._sessions.serve(session.outbox, request_iterator, session.receive, write)
        finally:
            session.close()

    def _loaded(self) -> TextDecoder:
        if self.decoder is None:
            raise Unavailable("the detokenizer is still loading", retry_after=_RETRY_SECONDS)
        return self.decoder


class _Session:
    """One client's texts."""

    def __init__(
        self,
        decoder: TextDecoder,
        sessions: Sessions,
        metrics: DetokenizerMetrics,
        tracing: Tracing | None = None,
    ) -> None:
        self.outbox = Outbox(
            tokenizer_pb2.DetokenizerSessionResponse, busy=lambda: len(self._decoder) > 0
        )
        self._decoder = decoder
        self._sessions = sessions
        self._metrics = metrics
        self._tracing = tracing or NoTracing()
        self._spans: dict[int, Span] = {}  # of the open texts, where there is tracing

    def receive(self, request: tokenizer_pb2.DetokenizerSessionRequest) -> None:
        """Applies a frame. Raises InvalidRequest if its lists do not fit each other."""
        open_before = len(self._decoder)
        try:
            self._apply(request)
        finally:  # a frame that fails half-way has opened and closed texts too
            self._sessions.change_work(len(self._decoder) - open_before)

    def close(self) -> None:
        """Forgets the client's texts."""
        self._sessions.change_work(-len(self._decoder))
        for handle in list(self._spans):
            self._end_span(handle, error="the client left")

    def _apply(self, request: tokenizer_pb2.DetokenizerSessionRequest) -> None:
        if len(request.handles) != len(request.counts):
            raise InvalidRequest("the frame has not as many counts as handles")
        if sum(request.counts) != len(request.token_ids):
            raise InvalidRequest("the frame has not as many ids as its rows count")
        rows: list[tuple[int, TextDelta]] = []
        for opening in request.opens:
            try:
                delta = self._open(opening)
            except ShoalError as error:
                self._fail(opening.handle, error)
                continue
            if opening.replay_ids:
                rows.append((opening.handle, delta))
        ids, start = list(request.token_ids), 0
        for handle, count in zip(request.handles, request.counts, strict=True):
            row = self._decoder.feed(handle, ids[start : start + count])
            start += count
            if row is not None:
                rows.append((handle, row))
        for handle in request.ends:
            if (row := self._decoder.end(handle)) is not None:
                rows.append((handle, row))
        for handle in request.closes:
            self._decoder.close(handle)
            self._end_span(handle, error="closed")
        if ids:
            self._metrics.tokens.inc(len(ids))
        self._send(rows)

    def _open(self, opening: tokenizer_pb2.OpenText) -> TextDelta:
        """Begins a text. Raises InvalidRequest or Overloaded, which are its own."""
        options = opening.options
        if not all(options.stop):
            raise InvalidRequest("a stop string must not be empty", param="stop")
        if len(self._decoder) >= MAX_OPEN_TEXTS:
            message = f"a session may have {MAX_OPEN_TEXTS} open texts"
            raise Overloaded(message, retry_after=_RETRY_SECONDS)
        if self._tracing.enabled:
            self._end_span(opening.handle, error="opened anew")
            trace = TraceContext(opening.traceparent, opening.tracestate)
            self._spans[opening.handle] = self._tracing.start("detokenize", trace)
        self._metrics.tokens.inc(len(opening.replay_ids))
        return self._decoder.open(
            opening.handle,
            stop=options.stop,
            include_stop_str_in_output=options.include_stop_str_in_output,
            skip_special_tokens=(
                options.skip_special_tokens if options.HasField("skip_special_tokens") else True
            ),
            replay_ids=list(opening.replay_ids),
            skip_chars=opening.skip_chars,
        )

    def _fail(self, handle: int, error: ShoalError) -> None:
        """Answers a text that was not opened, and forgets one that had its handle."""
        self._decoder.close(handle)
        self._end_span(handle, error=error.code.name.lower())
        self.outbox.pending.ended.add(handle=handle, error=error_to_proto(error))
        self.outbox.notify()

    def _end_span(self, handle: int, *, num_tokens: int = 0, error: str = "") -> None:
        if span := self._spans.pop(handle, None):
            span.set({"gen_ai.usage.output_tokens": num_tokens})
            span.end(error)

    def _send(self, rows: Sequence[tuple[int, TextDelta]]) -> None:
        """Adds rows to what is sent next."""
        if not rows:
            return
        pending = self.outbox.pending
        pending.handles.extend([handle for handle, _ in rows])
        pending.texts.extend([row.text for _, row in rows])
        pending.ids_consumed.extend([row.ids_consumed for _, row in rows])
        pending.held_chars.extend([row.held_chars for _, row in rows])
        for handle, row in rows:
            if row.ended:
                self._end_span(handle, num_tokens=row.ids_consumed)
                pending.ended.add(handle=handle, stop=row.stop, ids_consumed=row.ids_consumed)
                if row.stop is not None:
                    self._metrics.stops.inc()
        self.outbox.notify()
