"""Writes responses: typed events with sequence numbers, or one `response` object."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.common.errors import ErrorCode, ShoalError
from services.gateway.domain import Chunk, FinishReason, Gateway, TokenLogprobs, Usage
from services.gateway.ids import new_id
from services.gateway.openai.answer import Choice, cached_tokens, served_model
from services.gateway.openai.fanout import FanOut
from services.gateway.openai.logprobs import chat_logprobs
from services.gateway.openai.output.parser import OutputPlan
from services.gateway.openai.output.pieces import Content
from services.gateway.openai.responses.items import Event, OutputItems, Status
from services.gateway.openai.responses.schema import LOGPROBS, ResponsesBody
from services.gateway.sse import json_object

# `response.error.code`, where the API has a word of its own.
_FAILURES = {ErrorCode.OVERLOADED: "rate_limit_exceeded"}


class ResponseAnswer:
    """One response. A chunk becomes events; a whole choice the same, unseen."""

    def __init__(
        self, body: ResponsesBody, plan: OutputPlan, gateway: Gateway, generation: FanOut
    ) -> None:
        self._body = body
        self._gateway = gateway
        self._parser = plan.parser(generation.generations[0].reasoning)
        self._items = OutputItems()
        self._sequence = 0
        self._logprobs: list[TokenLogprobs] = []  # of text that is held back
        self._finish_reason: FinishReason | None = None
        self._id = f"resp_{new_id()}"
        self._created = int(time.time())
        self._model = body.model or served_model(gateway)

    def first_events(self) -> bytes:
        started = self._response("in_progress", None)
        return self._encode(
            [
                {"type": "response.created", "response": started},
                {"type": "response.in_progress", "response": started},
            ]
        )

    async def events(self, chunk: Chunk) -> bytes:
        return self._encode(await self._take(chunk))

    def text_event(self, index: int, text: str) -> bytes | None:
        return None  # items are numbered as they come

    def last_events(self, usage: Usage) -> bytes:
        events = self._items.finish(self._status)
        response = self._response(self._status, usage)
        events.append({"type": f"response.{self._status}", "response": response})
        return self._encode(events)

    def failure(self, error: ShoalError) -> bytes:
        code = error.status.code or "server_error"
        said = {"code": code, "message": error.message, "param": error.param}
        response = self._response("failed", None)
        response["error"] = {
            "code": _FAILURES.get(error.code, "server_error"),
            "message": error.message,
        }
        return self._encode(
            [{"type": "error", **said}, {"type": "response.failed", "response": response}]
        )

    async def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        choice = choices[0]
        await self._take(
            Chunk(0, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason)
        )
        self._items.finish(self._status)
        return msgspec.json.encode(self._response(self._status, usage))

    async def _take(self, chunk: Chunk) -> list[Event]:
        """The events of a chunk. Log-probabilities go with the first content after them."""
        pieces = self._parser.feed(chunk.text, chunk.token_ids)
        if chunk.finish_reason is not None:
            self._finish_reason = chunk.finish_reason
            pieces = [*pieces, *self._parser.finish()]
        self._logprobs.extend(chunk.logprobs or ())
        events: list[Event] = []
        for piece in pieces:
            logprobs: Sequence[Any] = ()
            if self._logprobs and isinstance(piece, Content):
                logprobs = await chat_logprobs(self._gateway, self._model, self._logprobs)
                self._logprobs.clear()
            events += self._items.add(piece, logprobs)
        return events

    @property
    def _status(self) -> Status:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _encode(self, events: Sequence[Event]) -> bytes:
        """The events as the stream has them, numbered."""
        lines = []
        for event in events:
            data = json_object({**event, "sequence_number": self._sequence})
            lines.append(b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n")
            self._sequence += 1
        return b"".join(lines)

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        """The response as it stands."""
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "model": self._model,
            "output": self._items.items,
            "usage": None if usage is None else self._usage(usage),
            **_echo(self._body),
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": cached_tokens(usage),
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """What a response repeats of its request, defaults filled in."""
    format = body.text.format if body.text is not None else None
    shown: Any = {"type": "text"} if format is None else _given(format)
    wants_logprobs = LOGPROBS in (body.include or ())
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning is not None else None,
            "summary": None,
        },
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": shown},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0 if wants_logprobs else 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }


def _given(struct: msgspec.Struct) -> Mapping[str, Any]:
    """The fields of a struct that were given."""
    fields = msgspec.structs.asdict(struct)
    return {name: value for name, value in fields.items() if value is not None}
