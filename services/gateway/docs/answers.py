"""What the answers look like, for the OpenAPI document.

Answers are written by hand where a token has to be cheap, so these structs describe them
and do not make them; a test holds real answers to the schemas.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class ErrorBody(Struct):
    """What went wrong; `param` names the field of the request at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Struct):
    """The body of every answer that is no success."""

    error: ErrorBody


class PromptTokensDetails(Struct):
    """How much of the prompt was found in a cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """How many tokens were reasoning."""

    reasoning_tokens: int


class TokenUsage(Struct):
    """Token counts over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CalledFunction(Struct):
    """The function of a call; `arguments` is JSON as text."""

    name: str
    arguments: str


class CalledTool(Struct):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Struct):
    """What the model said; `content` is null beside calls without text."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(Struct):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """News of one choice."""

    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET


class CompletionChoice(Struct):
    """One of the answers; with `stream` it is one event's part of it."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType | None = UNSET


class TextCompletion(Struct):
    """A completion, whole or one event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET


class ResponseObject(Struct):
    """A response; `output` holds items of type message, reasoning and function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]


class ModelObject(Struct):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelListObject(Struct):
    """The served models."""

    object: Literal["list"]
    data: list[ModelObject]


class TokenizedObject(Struct):
    """A prompt's token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedObject(Struct):
    """The text of token ids."""

    prompt: str


class GeneratedText(Struct):
    """A whole answer of /generate to a `prompt`."""

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    usage: TokenUsage


class SGLangMeta(Struct):
    """What there is to know of a text; log-probabilities are [logprob, token id, null]."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_token_logprobs: list[list[float | int | None]] | UnsetType = UNSET
    output_top_logprobs: list[list[list[float | int | None]]] | UnsetType = UNSET


class SGLangText(Struct):
    """An answer of /generate in SGLang's shape, or one event of it: the text so far.

    Of the events, the last alone has the ids.
    """

    text: str
    meta_info: SGLangMeta
    output_ids: list[int] | UnsetType = UNSET


class ServerInfo(Struct):
    """What serves, and its limits."""

    version: str
    models: list[ModelObject]
    quantizations: dict[str, list[str]]
    limits: dict[str, int]


class Flushed(Struct):
    """The caches were dropped."""

    success: Literal[True]
