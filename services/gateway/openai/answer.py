"""What the endpoints' answers have in common, streamed and plain.

An `Answer` turns chunks into events, or collected choices into a body. It knows
nothing of sockets; `services.gateway.sse` and `services.gateway.http` do the sending.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from services.gateway.domain import (
    Chunk,
    FinishReason,
    Gateway,
    GenerationRequest,
    TokenLogprobs,
    Usage,
)
from services.gateway.openai.fanout import FanOut


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

    async def events(self, chunk: Chunk) -> bytes:
        """The events of a chunk; empty if it has nothing to tell."""
        ...

    def last_events(self, usage: Usage) -> bytes:
        """What follows the last chunk, before [DONE]."""
        ...

    async def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole answer as one JSON object."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A decoded call: what to generate, and how to answer."""

    requests: tuple[GenerationRequest, ...]
    stream: bool
    answer: Callable[[Gateway, FanOut], Answer]


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, object: str, gateway: Gateway, model: str) -> Head:
        """A head with a fresh id; an unnamed model is the served one."""
        if not model:
            model = next((card.id for card in gateway.models()), "")
        return cls(f"{prefix}-{uuid.uuid4().hex}", object, int(time.time()), model)

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


def usage_fields(usage: Usage) -> dict[str, Any]:
    """`usage` as the API has it; at least one prompt token always counts as computed."""
    cached = min(usage.cached_tokens, max(usage.prompt_tokens - 1, 0))
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage_event(prefix: bytes, usage: Usage) -> bytes:
    """The event with the counts and no choices."""
    return prefix + b',"choices":[],"usage":' + msgspec.json.encode(usage_fields(usage)) + b"}\n\n"
