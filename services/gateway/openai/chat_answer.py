"""Writes chat completions: `chat.completion.chunk` events, or one `chat.completion`.

`ChatAnswer` is for outputs that are all content, where a token costs little;
`ParsedChatAnswer` takes outputs apart into reasoning, content and tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from services.common.errors import ShoalError
from services.gateway.domain import Chunk, Gateway, Usage
from services.gateway.openai.answer import (
    Choice,
    Head,
    failure_events,
    usage_end,
    usage_event,
    usage_fields,
)
from services.gateway.openai.fanout import FanOut
from services.gateway.openai.logprobs import chat_logprobs
from services.gateway.openai.output.parser import OutputParser, OutputPlan
from services.gateway.openai.output.pieces import CallStart, Content, Piece, Reasoning
from services.gateway.sse import DONE, json_object, json_text


class ChatOptions(Struct, frozen=True):
    """What an answer must know of its request."""

    model: str
    stream: bool
    logprobs: bool
    token_ids: bool
    usage: bool
    counts_on: bool  # every event has the counts so far


class ChatAnswer:
    """An answer whose text is all content."""

    def __init__(self, options: ChatOptions, gateway: Gateway, generation: FanOut) -> None:
        self._gateway = gateway
        self._model = options.model
        self._logprobs = options.logprobs
        self._token_ids = options.token_ids
        self._usage = options.usage
        self._prompt_token_ids = generation.generations[0].prompt_token_ids
        name = "chat.completion.chunk" if options.stream else "chat.completion"
        self._head = Head.new("chatcmpl", name, gateway, options.model)
        self._event = self._head.event_prefix()
        self._content: dict[int, bytes] = {}  # choice -> its content event up to the text
        self._counting = generation if options.counts_on else None
        self._set_end(usage_end(None) if options.usage else b"}\n\n")

    def first_events(self) -> bytes:
        return b""

    async def events(self, chunk: Chunk) -> bytes:
        """The events of a chunk: role if it is the choice's first, text, finish."""
        before = b""
        self._count()
        content = self._content.get(chunk.index)
        if content is None:
            content = self._delta(chunk.index) + b'{"content":'
            self._content[chunk.index] = content
            before = self._role_event(chunk.index)
        details = chunk.logprobs or (self._token_ids and chunk.token_ids)
        if details:
            before += content + json_text(chunk.text) + await self._detailed_end(chunk)
        elif chunk.text:
            before += content + json_text(chunk.text) + self._text_end
        if chunk.finish_reason is not None:
            before += self._finish_event(chunk, chunk.finish_reason)
        return before

    def text_event(self, index: int, text: str) -> bytes | None:
        content = self._content.get(index)
        if content is None or self._token_ids or self._counting is not None:
            return None
        return content + json_text(text) + self._text_end

    def last_events(self, usage: Usage) -> bytes:
        if not self._usage:
            return DONE
        return usage_event(self._event, self._usage_fields(usage)) + DONE

    def failure(self, error: ShoalError) -> bytes:
        return failure_events(error)

    async def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        answer = self._head.fields()
        answer["choices"] = [await self._choice(choice) for choice in choices]
        answer["usage"] = self._usage_fields(usage)
        if self._token_ids:
            answer["prompt_token_ids"] = list(self._prompt_token_ids)
        return msgspec.json.encode(answer)

    async def _choice(self, choice: Choice) -> dict[str, Any]:
        message, finish_reason = self._message(choice)
        fields: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._logprobs:
            content = await chat_logprobs(self._gateway, self._model, choice.logprobs)
            fields["logprobs"] = {"content": content, "refusal": None}
        if self._token_ids:
            fields["token_ids"] = choice.token_ids
        return fields

    def _message(self, choice: Choice) -> tuple[dict[str, Any], str | None]:
        """A choice's message and its finish reason."""
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return message, choice.finish_reason

    def _usage_fields(self, usage: Usage) -> dict[str, Any]:
        return usage_fields(usage)

    def _set_end(self, end: bytes) -> None:
        self._end = end
        self._text_end = b'},"logprobs":null,"finish_reason":null}]' + end

    def _count(self) -> None:
        """The events to come have the counts so far, if they were asked for."""
        if self._counting is not None:
            self._set_end(usage_end(self._usage_fields(self._counting.usage)))

    def _delta(self, index: int) -> bytes:
        return self._event + b',"choices":[{"index":%d,"delta":' % index

    def _role_event(self, index: int) -> bytes:
        end = self._text_end
        if self._token_ids:
            ids = msgspec.json.encode(list(self._prompt_token_ids))
            end = end.replace(b"}]", b'}],"prompt_token_ids":' + ids, 1)
        return self._delta(index) + b'{"role":"assistant","content":""' + end

    async def _detailed_end(self, chunk: Chunk) -> bytes:
        end = b'},"logprobs":null'
        if chunk.logprobs:
            content = await chat_logprobs(self._gateway, self._model, chunk.logprobs)
            end = b'},"logprobs":' + msgspec.json.encode({"content": content, "refusal": None})
        if self._token_ids:
            end += b',"token_ids":' + msgspec.json.encode(list(chunk.token_ids))
        return end + b',"finish_reason":null}]' + self._end

    def _finish_event(self, chunk: Chunk, finish_reason: str | None) -> bytes:
        return (
            self._delta(chunk.index)
            + b'{},"logprobs":null,"finish_reason":'
            + msgspec.json.encode(finish_reason)
            + b',"stop_reason":'
            + msgspec.json.encode(chunk.stop_reason)
            + b"}]"
            + self._end
        )


class ParsedChatAnswer(ChatAnswer):
    """An answer whose text may hold reasoning and tool calls."""

    def __init__(
        self, options: ChatOptions, plan: OutputPlan, gateway: Gateway, generation: FanOut
    ) -> None:
        super().__init__(options, gateway, generation)
        self._plan = plan
        self._reasoning = generation.generations[0].reasoning
        self._parsers: dict[int, OutputParser] = {}

    async def events(self, chunk: Chunk) -> bytes:
        """The events of a chunk: role if it is the choice's first, a delta each piece, finish.

        Logprobs and token ids go with the chunk's first delta.
        """
        self._count()
        before = b"" if chunk.index in self._parsers else self._role_event(chunk.index)
        parser = self._parser(chunk.index)
        pieces = parser.feed(chunk.text, chunk.token_ids)
        if chunk.finish_reason is not None:
            pieces = [*pieces, *parser.finish()]
        deltas = [delta_fields(piece) for piece in pieces]
        start = self._delta(chunk.index)
        if chunk.logprobs or (self._token_ids and chunk.token_ids):
            first = deltas.pop(0) if deltas else {"content": ""}
            before += start + _open_object(first) + await self._detailed_end(chunk)
        for delta in deltas:
            before += start + _open_object(delta) + self._text_end
        if chunk.finish_reason is not None:
            before += self._finish_event(chunk, parser.finish_reason(chunk.finish_reason))
        return before

    def text_event(self, index: int, text: str) -> bytes | None:
        return None  # the parser needs the token ids too

    def _message(self, choice: Choice) -> tuple[dict[str, Any], str | None]:
        parser = self._parser(choice.index)
        pieces = [*parser.feed(choice.text, choice.token_ids), *parser.finish()]
        return (
            message_fields(pieces, reasons=self._plan.reasons),
            parser.finish_reason(choice.finish_reason),
        )

    def _usage_fields(self, usage: Usage) -> dict[str, Any]:
        if not self._plan.reasons:
            return usage_fields(usage)
        tokens = sum(parser.reasoning_tokens for parser in self._parsers.values())
        return usage_fields(usage, reasoning_tokens=tokens)

    def _parser(self, index: int) -> OutputParser:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._plan.parser(self._reasoning)
        return parser


def delta_fields(piece: Piece) -> dict[str, Any]:
    """A piece as the `delta` of an event."""
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    if isinstance(piece, CallStart):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def message_fields(pieces: Sequence[Piece], *, reasons: bool) -> dict[str, Any]:
    """The pieces of one output as a message; with `reasons` it says whether it reasoned."""
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, Reasoning):
            reasoning += piece.text
        elif isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        else:
            calls[piece.index]["function"]["arguments"] += piece.text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not content else content,
        "refusal": None,
    }
    if reasons:
        message["reasoning_content"] = reasoning or None
    if calls:
        message["tool_calls"] = calls
    return message


def _open_object(fields: Mapping[str, Any]) -> bytes:
    """An object of JSON without its closing bracket, on one line for every reader."""
    return json_object(fields)[:-1]
