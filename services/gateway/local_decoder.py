"""Decoding inside the gateway (`--detokenizers 0`): the detokenizer's core, called directly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.common.text.decoder import TextDecoder, TextDelta, build_decoder
from services.common.tracing import NO_TRACE, NoTracing, Span, TraceContext, Tracing
from services.gateway.domain import TextOptions
from services.gateway.peers.detokenizer import TextSink, TextStream


class LocalDecoder:
    """A `Decoder` that answers within the call."""

    def __init__(self, model: str, tracing: Tracing | None = None) -> None:
        """Loads the tokenizer of a model. Raises StartupError."""
        self.model = model
        self._tracing = tracing or NoTracing()
        self._decoder: TextDecoder = build_decoder(model)
        self._next_handle = 1

    @property
    def outstanding(self) -> int:
        """Open texts."""
        return len(self._decoder)

    def open(
        self,
        options: TextOptions,
        sink: TextSink,
        replay_ids: Sequence[int] = (),
        skip_chars: int = 0,
        trace: TraceContext = NO_TRACE,
    ) -> TextStream:
        handle = self._next_handle
        self._next_handle += 1
        delta = self._decoder.open(
            handle,
            stop=options.stop,
            include_stop_str_in_output=options.include_stop_str_in_output,
            skip_special_tokens=options.skip_special_tokens,
            replay_ids=replay_ids,
            skip_chars=skip_chars,
        )
        _tell(sink, delta)
        span = self._tracing.start("detokenize", trace)
        return _LocalText(self._decoder, handle, sink, span)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await asyncio.to_thread(self._decoder.decode, token_ids, skip_special_tokens=False)

    async def lookup(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        return [self._decoder.token_bytes(token_id) for token_id in token_ids]


class _LocalText:
    def __init__(self, decoder: TextDecoder, handle: int, sink: TextSink, span: Span) -> None:
        self._decoder = decoder
        self._handle = handle
        self._sink = sink
        self._span = span

    def push(self, token_ids: Sequence[int]) -> None:
        self._tell(self._decoder.feed(self._handle, token_ids))

    def end(self) -> None:
        self._tell(self._decoder.end(self._handle))

    def close(self) -> None:
        self._decoder.close(self._handle)
        self._span.end("closed")

    def _tell(self, delta: TextDelta | None) -> None:
        if delta is not None and delta.ended:
            self._span.set({"gen_ai.usage.output_tokens": delta.ids_consumed})
            self._span.end()
        _tell(self._sink, delta)


def _tell(sink: TextSink, delta: TextDelta | None) -> None:
    if delta is None:
        return
    sink.on_text(delta.text, delta.ids_consumed)
    if delta.ended:
        sink.on_text_end(delta.stop, delta.ids_consumed)
