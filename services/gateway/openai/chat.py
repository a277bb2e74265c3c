"""POST /v1/chat/completions: the body in, and the answer out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.common.errors import InvalidRequest
from services.gateway.domain import Chunk, Gateway, Usage
from services.gateway.openai.answer import Choice, Head, Job, usage_event, usage_fields
from services.gateway.openai.chat_prompt import chat_prompt
from services.gateway.openai.decode import (
    Caller,
    decode,
    generation_request,
    integer,
    refuse,
    refuse_common,
    sampling,
    unsupported,
)
from services.gateway.openai.fanout import FanOut
from services.gateway.openai.logprobs import chat_logprobs
from services.gateway.openai.schema import REFUSED_IN_CHAT, ChatBody
from services.gateway.sse import json_text

MAX_TOP_LOGPROBS = 20


def parse_chat(raw: bytes, caller: Caller) -> Job:
    """Decodes and checks a body.

    Raises:
        InvalidRequest, Unsupported.
    """
    body = decode(raw, ChatBody)
    refuse_common(body)
    refuse(body, REFUSED_IN_CHAT)
    _refuse_tool_use(body)
    newer = integer("max_completion_tokens", body.max_completion_tokens)
    if newer is not None and newer < 1:
        raise InvalidRequest(
            "max_completion_tokens must be at least 1", param="max_completion_tokens"
        )
    older = integer("max_tokens", body.max_tokens)
    request = generation_request(
        body,
        caller,
        chat_prompt(body, reasoning_effort=body.reasoning_effort),
        sampling(
            body,
            max_tokens=older if newer is None else newer,
            logprobs=_num_logprobs(body),
        ),
    )
    stream = bool(body.stream)
    return Job((request,), stream, lambda gateway, whole: ChatAnswer(body, gateway, whole))


def _refuse_tool_use(body: ChatBody) -> None:
    """Tools may be shown to the model, but not yet called."""
    if body.tool_choice is not None and body.tool_choice not in ("none", "auto"):
        raise unsupported("tool_choice")
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools")


def _num_logprobs(body: ChatBody) -> int | None:
    top = integer("top_logprobs", body.top_logprobs)
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be an integer from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    if body.logprobs:
        return top or 0
    if top is not None:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None


class ChatAnswer:
    """Writes `chat.completion.chunk` events, or one `chat.completion`."""

    def __init__(self, body: ChatBody, gateway: Gateway, generation: FanOut) -> None:
        self._gateway = gateway
        self._model = body.model or ""
        self._logprobs = bool(body.logprobs)
        self._token_ids = bool(body.return_token_ids)
        self._prompt_token_ids = generation.generations[0].prompt_token_ids
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        name = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = Head.new("chatcmpl", name, gateway, self._model)
        self._event = self._head.event_prefix()
        self._content: dict[int, bytes] = {}  # choice -> its content event up to the text
        self._end = b',"usage":null}\n\n' if self._usage else b"}\n\n"
        self._text_end = b'},"logprobs":null,"finish_reason":null}]' + self._end

    async def events(self, chunk: Chunk) -> bytes:
        """The events of a chunk: role if it is the choice's first, text, finish."""
        before = b""
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
            before += self._finish_event(chunk)
        return before

    def last_events(self, usage: Usage) -> bytes:
        return usage_event(self._event, usage) if self._usage else b""

    async def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        answer = self._head.fields()
        answer["choices"] = [await self._choice(choice) for choice in choices]
        answer["usage"] = usage_fields(usage)
        if self._token_ids:
            answer["prompt_token_ids"] = list(self._prompt_token_ids)
        return msgspec.json.encode(answer)

    async def _choice(self, choice: Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._logprobs:
            content = await chat_logprobs(self._gateway, self._model, choice.logprobs)
            fields["logprobs"] = {"content": content, "refusal": None}
        if self._token_ids:
            fields["token_ids"] = choice.token_ids
        return fields

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

    def _finish_event(self, chunk: Chunk) -> bytes:
        return (
            self._delta(chunk.index)
            + b'{},"logprobs":null,"finish_reason":'
            + msgspec.json.encode(chunk.finish_reason)
            + b',"stop_reason":'
            + msgspec.json.encode(chunk.stop_reason)
            + b"}]"
            + self._end
        )
