"""What the endpoints' answers have in common, streamed and plain.

An `Answer` turns chunks into events, or collected choices into a body. It knows
nothing of sockets; `services.gateway.sse` and `services.gateway.http` do the sending.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from services.common.errors import ShoalError
from services.gateway.domain import (
    Chunk,
    FinishReason,
    Gateway,
    GenerationRequest,
    TokenLogprobs,
    Usage,
)
from services.gateway.ids import new_id
from services.gateway.openai.decode import Caller
from services.gateway.openai.errors import envelope
from services.gateway.openai.fanout import FanOut
from services.gateway.sse import DONE, json_event


@dataclass(slots=True)
class Choice:
    """One choice, whole."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, chunk: Chunk) -> None:
        """Takes in the next chunk of this choice."""
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        if chunk.logprobs:
            self.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.stop_reason = chunk.stop_reason


async def collect(generation: FanOut) -> list[Choice]:
    """All choices of a generation, in order.

    Raises:
        ShoalError: what the generation raised.
    """
    count = len(generation.generations) * generation.n
    choices = [Choice(index) for index in range(count)]
    async for chunk in generation:
        choices[chunk.index].add(chunk)
    return choices


class Answer(Protocol):
    """How one endpoint writes an answer."""

    def first_events(self) -> bytes:
        """What a stream begins with, before any chunk; may be empty."""
        ...

    async def events(self, chunk: Chunk) -> bytes:
        """The events of a chunk; empty if it has nothing to tell."""
        ...

    def text_event(self, index: int, text: str) -> bytes | None:
        """The event of a chunk that is nothing but text; None if `events` must write it."""
        ...

    def last_events(self, usage: Usage) -> bytes:
        """What follows the last chunk and ends the stream."""
        ...

    def failure(self, error: ShoalError) -> bytes:
        """What ends the stream when the rest of the answer cannot be had."""
        ...

    async def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole answer as one JSON object."""
        ...


class Job(Struct, frozen=True):
    """A decoded call: what to generate, and how to answer.

    `params` are the names of fields that this endpoint calls otherwise than chat does.
    """

    requests: tuple[GenerationRequest, ...]
    stream: bool
    answer: Callable[[Gateway, FanOut], Answer]
    params: Mapping[str, str] = msgspec.field(default_factory=dict)


class Head(Struct, frozen=True):
    """What every object of one answer repeats."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, object: str, gateway: Gateway, model: str) -> Head:
        """A head with a fresh id; an unnamed model is the served one."""
        model = model or served_model(gateway)
        return cls(f"{prefix}-{new_id()}", object, int(time.time()), model)

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def event_prefix(self) -> bytes:
        """The bytes of an event up to the object's own fields."""
        return b"data: " + msgspec.json.encode(self.fields())[:-1]


def served_model(gateway: Gateway) -> str:
    """The name of the model that a request gets which names none."""
    return next((card.id for card in gateway.models()), "")


# Reads a body, which it may take from others' hands as long as it needs.
Parse = Callable[[bytes, Caller, Gateway], Awaitable[Job]]


def cached_tokens(usage: Usage) -> int:
    """How much of the prompt was found in a cache; at least one token always is computed."""
    return min(usage.cached_tokens, max(usage.prompt_tokens - 1, 0))


def usage_fields(usage: Usage, *, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """`usage` as the API has it; None says nothing of reasoning."""
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(usage)},
    }
    if reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return fields


def usage_end(usage: Mapping[str, Any] | None) -> bytes:
    """What ends an event after its choices, where usage was asked for."""
    return b',"usage":' + msgspec.json.encode(usage) + b"}\n\n"


def usage_event(prefix: bytes, usage: Mapping[str, Any]) -> bytes:
    """The event with the counts and no choices."""
    return prefix + b',"choices":[]' + usage_end(usage)


def failure_events(error: ShoalError) -> bytes:
    """The end of a stream that failed: the error, no finish_reason, and [DONE].

    As vLLM: clients that wait for [DONE] would hang on a connection that a proxy keeps open.
    """
    return json_event(envelope(error)) + DONE
