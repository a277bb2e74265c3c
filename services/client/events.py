"""Event streams of the OpenAI API: bytes in, typed chunks out.

A chunk is decoded into a few fields in about a microsecond; the rest of it is skipped. What
knows of connections and clocks is elsewhere.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.client.endpoint import ApiError, message_of

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """What a chat chunk adds to a message."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # newer servers' name of the same
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    """One choice of a chunk; chat has a delta, completions a text."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def thought(self) -> str:
        """The text of the reasoning in it."""
        delta = self.delta
        return "" if delta is None else delta.reasoning_content or delta.reasoning or ""

    @property
    def said(self) -> str:
        """The text of the answer in it."""
        return self.text or ("" if self.delta is None else self.delta.content or "")

    @property
    def has_output(self) -> bool:
        """Whether the model made any of it: a role alone, or an empty text, is none."""
        return bool(self.said or self.thought or (self.delta and self.delta.tool_calls))


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Counts of tokens, as the server has them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """One event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Raises ApiError if it is no chunk, or is the server's report of a failure."""
    try:
        chunk = _decoder.decode(data)
    except msgspec.DecodeError:
        raise ApiError(f"the server sent an event that is no chunk: {_short(data)}")
    if chunk.error is not None:
        raise ApiError(message_of({"error": chunk.error}) or "the server failed")
    return chunk


class EventSplitter:
    """Cuts a stream of bytes into the data of its events.

    Lines may end in LF or CRLF; several data lines are one event; comments are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are whole now."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *blocks, self._rest = data.split(b"\n\n")
        return [event for block in blocks if (event := _data_of(block))]

    def close(self) -> list[bytes]:
        """The last event of a stream that lacks the empty line at its end."""
        return self.feed(b"\n\n")


def _data_of(block: bytes) -> bytes:
    if b"\n" not in block:
        return block[5:].lstrip(b" ") if block.startswith(b"data:") else b""
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines)


def _short(data: bytes) -> str:
    return data[:200].decode("utf-8", "replace")
