"""A generation as the gateway's front ends and its core speak of it.

REST and gRPC turn their own requests into a `GenerationRequest`, and `Chunk`s
back into their own answers. Nothing here knows of either, nor of the sessions.

What each request makes anew is a `msgspec.Struct`: a frozen dataclass costs ten times as much.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import Struct, field

from services.common.tracing import TraceContext

FinishReason = Literal["stop", "length", "abort"]
ToolFormat = Literal["hermes", "llama3_json", "none"]
ReasoningFormat = Literal["deepseek_r1", "qwen3", "none"]
ReasoningState = Literal["unknown", "open", "closed"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes what is not plain text; see `shoal.v1.TokenizerInfo`.

    `reasoning_end_id` is the token </think>, where the vocabulary has it as one.
    """

    tools: ToolFormat = "none"
    reasoning: ReasoningFormat = "none"
    reasoning_end_id: int | None = None


class ToolCall(Struct, frozen=True):
    """One function call of an assistant message; `arguments` is JSON as text."""

    id: str
    name: str
    arguments: str


class Message(Struct, frozen=True):
    """One turn of a conversation. `content` None is JSON null."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatPrompt(Struct, frozen=True):
    """A conversation for the model's chat template."""

    messages: tuple[Message, ...]
    tools_json: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs_json: str = ""


class TextPrompt(Struct, frozen=True):
    """Text, encoded with the tokenizer's own BOS rule."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(Struct, frozen=True):
    """Token ids, used as they are."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Grammar(Struct, frozen=True):
    """What the text of an output must match; see `shoal.v1.Grammar`.

    `value` is a JSON schema as text, a regular expression, a Lark grammar, or with
    kind "choices" the strings to choose from. `param` names the request's field, for
    the error of a worker that cannot compile it.
    """

    kind: Literal["json_schema", "regex", "choices", "lark"]
    value: str | tuple[str, ...]
    param: str = ""


class Sampling(Struct, frozen=True):
    """Sampling options, every default filled in; see `shoal.v1.SamplingParams`.

    `max_tokens` None means the rest of the context; `seed` None is replaced by a
    random one before the request leaves the gateway.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class TextOptions(Struct, frozen=True):
    """Stop strings and rendering."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


class GenerationRequest(Struct, frozen=True):
    """One request: one prompt, n choices.

    `timeout` is in seconds from arrival. Field values were checked by the front end
    that made it (`services.gateway.validate`); what depends on the model (context,
    vocabulary) is checked by the core.
    """

    request_id: str
    model: str  # empty: the only one served
    prompt: Prompt
    sampling: Sampling = Sampling()
    text: TextOptions = TextOptions()
    n: int = 1
    timeout: float | None = None
    max_prompt_tokens: int | None = None  # of which the last are kept; 0 is what fits
    priority: int = 0
    cache_salt: str = ""
    traceparent: str = ""  # W3C trace context, and its state
    tracestate: str = ""
    tenant: str = ""  # whose share of the service it takes: the API key's name

    @property
    def trace(self) -> TraceContext:
        """The span that the request is part of."""
        return TraceContext(self.traceparent, self.tracestate)


class TokenLogprobs(Struct, frozen=True):
    """Log-probabilities of one token; `top` holds (token id, logprob), likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Chunk(Struct):
    """News of one choice.

    `token_ids` are the ids that went into the text since the last chunk of this
    choice (their bytes may still be held back), and `logprobs` theirs if asked for.
    The last chunk of a choice has a `finish_reason`.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that matched


class Usage(Struct, frozen=True):
    """Token counts over all choices, the prompt counted once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


# Takes the text of a choice, by its index, within the call; False if it cannot now.
TextWriter = Callable[[int, str], bool]


class Generation(Protocol):
    """A request that a worker has accepted."""

    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[TokenLogprobs] | None  # set before the first chunk, if asked for
    reasoning: ReasoningState  # whether the prompt leaves the model inside its reasoning

    @property
    def usage(self) -> Usage:
        """Counts so far; final once every choice has finished."""
        ...

    @property
    def ended(self) -> bool:
        """Every choice has finished and every chunk was taken."""
        ...

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks of all choices as they come; ends when every choice has finished.

        Raises a ShoalError if the request fails later.
        """
        ...

    def send_text_to(self, write: TextWriter) -> None:
        """Offers a shorter way for what is nothing but text, from now on.

        While the reader waits for a chunk, text may be given to `write` instead, in order
        with the chunks. A generation may also leave it and make chunks of everything.
        """
        ...

    async def aclose(self) -> None:
        """Gives the request up wherever it is; harmless after the end."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One served model."""

    id: str
    max_model_len: int
    created: int
    quantizations: tuple[str, ...] = ()  # of its workers' weights: none, int8 or both


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served, and if not, why ("no worker is ready").

    `draining` is the gateway's own state: it takes no new requests and will exit.
    """

    ready: bool
    reasons: tuple[str, ...] = ()
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A prompt's ids; each id's spelling if asked for; what the model can take at most."""

    token_ids: Sequence[int]
    token_strs: Sequence[str] | None
    max_model_len: int


class Gateway(Protocol):
    """The core that every front end calls."""

    async def start(self, request: GenerationRequest) -> Generation:
        """Encodes, checks, routes; returns when a worker has accepted every choice.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound, Overloaded,
            Unavailable, DeadlineExceeded.
        """
        ...

    async def tokenize(
        self, model: str, prompt: ChatPrompt | TextPrompt, *, return_token_strs: bool = False
    ) -> Tokenized:
        """The prompt's ids, and each id's spelling if asked for."""
        ...

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str: ...

    async def token_bytes(self, token_ids: Sequence[int], model: str = "") -> Sequence[bytes]:
        """The bytes of single tokens, for log-probabilities; cached."""
        ...

    async def dialect(self, model: str) -> Dialect:
        """How the model writes tool calls and reasoning.

        Raises:
            InvalidRequest, ModelNotFound, Unavailable.
        """
        ...

    def models(self) -> Sequence[ModelCard]: ...

    def model(self, id: str) -> ModelCard:
        """Raises ModelNotFound, or Unavailable while it is not known whether there is one."""

    def readiness(self) -> Readiness: ...

    async def flush_cache(self) -> None:
        """Drops every worker's unused prefixes."""
        ...
