"""A gateway without a fleet: it plays back what a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from services.common.errors import ModelNotFound, ShoalError
from services.gateway.domain import (
    ChatPrompt,
    Chunk,
    Dialect,
    GenerationRequest,
    ModelCard,
    Readiness,
    ReasoningState,
    TextPrompt,
    TextWriter,
    Tokenized,
    TokenLogprobs,
    TokenPrompt,
    Usage,
)

MODEL = "fake/model"

Step = Chunk | ShoalError | Exception | asyncio.Event


def words(*texts: str, index: int = 0, finish: str = "stop") -> list[Step]:
    """One chunk a text, the last of them finishing; token ids count up from 100."""
    steps: list[Step] = [Chunk(index, text, [100 + i]) for i, text in enumerate(texts)]
    last = steps[-1]
    assert isinstance(last, Chunk)
    last.finish_reason = finish  # type: ignore[assignment]
    return steps


@dataclass
class FakeGeneration:
    """Plays its steps: a chunk is given, an error raised, an event waited for.

    Text alone goes straight to the writer that was offered, if it takes it.
    """

    steps: Sequence[Step]
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    reasoning: ReasoningState = "unknown"
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)  # at an event to wait for
    completion_tokens: int = 0
    num_played: int = 0
    write: TextWriter = lambda index, text: False

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_token_ids), self.completion_tokens, cached_tokens=1)

    @property
    def ended(self) -> bool:
        return self.num_played == len(self.steps)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for step in self.steps:
            self.num_played += 1
            if isinstance(step, asyncio.Event):
                self.reached.set()
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                self.completion_tokens += len(step.token_ids)
                bare = not (step.finish_reason or step.logprobs)
                if not (bare and step.text and self.write(step.index, step.text)):
                    yield replace(step)

    def send_text_to(self, write: TextWriter) -> None:
        self.write = write

    async def aclose(self) -> None:
        self.closed.set()


def hello(request: GenerationRequest) -> list[Step]:
    """Hello world for every choice, the choices taking turns."""
    each = [words("Hello", f" world{index}", index=index) for index in range(request.n)]
    return [step for turn in zip(*each, strict=True) for step in turn]


@dataclass
class FakeGateway:
    """Implements `services.gateway.domain.Gateway`."""

    script: Callable[[GenerationRequest], Sequence[Step]] = hello
    refusal: ShoalError | Exception | None = None
    hold_start: asyncio.Event | None = None  # start waits for it
    readiness_now: Readiness = field(default_factory=lambda: Readiness(True))
    model_dialect: Dialect = field(default_factory=lambda: Dialect("hermes"))
    reasoning: ReasoningState = "unknown"
    prompt_scores: Sequence[TokenLogprobs] | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    generations: list[FakeGeneration] = field(default_factory=list)
    starting: asyncio.Event = field(default_factory=asyncio.Event)
    start_cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    flushed: int = 0

    async def start(self, request: GenerationRequest) -> FakeGeneration:
        self.requests.append(request)
        self._check_model(request.model)
        self.starting.set()
        if self.hold_start is not None:
            try:
                await self.hold_start.wait()
            except asyncio.CancelledError:
                self.start_cancelled.set()
                raise
        if self.refusal is not None:
            raise self.refusal
        generation = FakeGeneration(
            self.script(request), encode(request.prompt), self.prompt_scores, self.reasoning
        )
        self.generations.append(generation)
        return generation

    async def tokenize(
        self, model: str, prompt: ChatPrompt | TextPrompt, *, return_token_strs: bool = False
    ) -> Tokenized:
        self._check_model(model)
        ids = encode(prompt)
        return Tokenized(ids, [chr(i) for i in ids] if return_token_strs else None, 8192)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        self._check_model(model)
        return "".join(chr(i) for i in token_ids)

    async def token_bytes(self, token_ids: Sequence[int], model: str = "") -> Sequence[bytes]:
        """Id 0 to 255 is that byte; a larger one the character."""
        self._check_model(model)
        return [bytes([i]) if i < 256 else chr(i).encode() for i in token_ids]

    async def dialect(self, model: str) -> Dialect:
        self._check_model(model)
        return self.model_dialect

    def models(self) -> Sequence[ModelCard]:
        return [ModelCard(MODEL, 8192, 1_700_000_000, ("int8", "none"))]

    def model(self, id: str) -> ModelCard:
        self._check_model(id)
        return self.models()[0]

    def readiness(self) -> Readiness:
        return self.readiness_now

    async def flush_cache(self) -> None:
        self.flushed += 1

    def _check_model(self, model: str) -> None:
        if model not in ("", MODEL):
            raise ModelNotFound(
                f"The model {model!r} does not exist; served: {MODEL}", param="model"
            )


def encode(prompt: ChatPrompt | TextPrompt | TokenPrompt) -> Sequence[int]:
    """One id a character."""
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids
    if isinstance(prompt, TextPrompt):
        return [ord(char) for char in prompt.text]
    return [ord(char) for message in prompt.messages for char in message.content or ""]
