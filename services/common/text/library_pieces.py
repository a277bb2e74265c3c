"""Pieces of whatever else the library can decode, by its own stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class LibraryPieces:
    """Whatever the library can decode, by its own stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def stream(self, *, skip_special_tokens: bool) -> _LibraryStream:
        return _LibraryStream(self._tokenizer, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class _LibraryStream:
    """DecodeStream has no end and gives up on texts whose beginning changes; the
    one-shot decode at the end makes the text whole."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._decode: Callable[[list[int]], str] = lambda token_ids: tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens
        )
        self._tokenizer = tokenizer
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._sent = 0

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            text += self._step(token_id)
        self._sent += len(text)
        return text

    def flush(self) -> str:
        return self._decode(self._token_ids)[self._sent :]

    def _step(self, token_id: int) -> str:
        if self._stream is None:
            return ""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # the library raises no narrower class
            if type(error) is not Exception:
                raise
            self._stream = None
            return ""
