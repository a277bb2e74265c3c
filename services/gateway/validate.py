"""The ranges of a generation's fields, the same for REST and gRPC.

Only what can be said without the model is checked here; the context length and
the vocabulary are the core's business. Field names are those of the REST API.
"""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.gateway.domain import (
    ChatPrompt,
    GenerationRequest,
    Message,
    Sampling,
    TextOptions,
    TokenPrompt,
)

MAX_CHOICES = 128
# Every choice carries its own copy of these, so none may be as large as a body.
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 4096  # characters
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 4096
MAX_MESSAGES = 16_384  # of a conversation, and tool calls of a message
MAX_LABEL = 1024  # characters of a name or an id
MAX_TIMEOUT_SECONDS = 4_000_000  # what a deadline in 32 bits of milliseconds can hold

_MAX_UINT32 = 2**32 - 1
_MAX_INT32 = 2**31 - 1
_MAX_FACTOR = 1e30  # of a logit, which stays a 32-bit float
_MIN_FLOAT = 1e-30  # of what workers are told in 32 bits: it stays above 0 there, as one over it
_SEED_SPAN = 2**64


def check_request(request: GenerationRequest) -> None:
    """Checks every field that has a range.

    Raises:
        InvalidRequest: with `param` naming the first field at fault.
    """
    _check_integer("n", request.n, 1, MAX_CHOICES)
    _check_integer("priority", request.priority, -_MAX_INT32, _MAX_INT32)
    if request.timeout is not None:
        _check_above_zero("timeout", request.timeout, MAX_TIMEOUT_SECONDS)
    _check_prompt(request)
    _check_draw(request.sampling)
    _check_length(request.sampling)
    _check_text(request.text)


def unsigned_seed(seed: int) -> int:
    """A signed or unsigned 64-bit seed as the unsigned one with the same bits.

    Raises:
        InvalidRequest: if it needs more than 64 bits.
    """
    if not -(_SEED_SPAN // 2) <= seed < _SEED_SPAN:
        raise InvalidRequest("seed must be an integer of 64 bits", param="seed")
    return seed % _SEED_SPAN


def _check_prompt(request: GenerationRequest) -> None:
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt) and not prompt.messages:
        raise InvalidRequest("messages must have at least one message", param="messages")
    if isinstance(prompt, ChatPrompt) and (
        len(prompt.messages) > MAX_MESSAGES
        or any(len(message.tool_calls) > MAX_MESSAGES for message in prompt.messages)
    ):
        raise InvalidRequest(
            f"messages may have at most {MAX_MESSAGES} messages, and a message as many tool calls",
            param="messages",
        )
    if isinstance(prompt, ChatPrompt):
        for message in prompt.messages:
            _check_labels(message)
    if isinstance(prompt, TokenPrompt):
        if not prompt.token_ids:
            raise InvalidRequest("prompt must have at least one token", param="prompt")
        _check_token_ids("prompt", prompt.token_ids)


def _check_labels(message: Message) -> None:
    """Names and ids, which templates handle as if they were short."""
    labels = [("name", message.name), ("tool_call_id", message.tool_call_id)]
    for call in message.tool_calls:
        labels += [("tool_calls: id", call.id), ("tool_calls: function.name", call.name)]
    for name, label in labels:
        if label is not None and len(label) > MAX_LABEL:
            raise InvalidRequest(
                f"messages: {name} may have at most {MAX_LABEL} characters", param="messages"
            )


def _check_draw(sampling: Sampling) -> None:
    _check_number("temperature", sampling.temperature, 0, 2)
    _check_integer("top_k", sampling.top_k, -1, _MAX_INT32)
    _check_above_zero("top_p", sampling.top_p, 1, low=_MIN_FLOAT)
    _check_number("min_p", sampling.min_p, 0, 1)
    if sampling.seed is not None:
        unsigned_seed(sampling.seed)
    _check_number("presence_penalty", sampling.presence_penalty, -2, 2)
    _check_number("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _check_above_zero(
        "repetition_penalty", sampling.repetition_penalty, _MAX_FACTOR, low=_MIN_FLOAT
    )
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"logit_bias may name at most {MAX_LOGIT_BIASES} tokens", param="logit_bias"
        )
    _check_token_ids("logit_bias", tuple(sampling.logit_bias))
    for bias in sampling.logit_bias.values():
        _check_number("logit_bias", bias, -100, 100)


def _check_length(sampling: Sampling) -> None:
    if sampling.max_tokens is not None:
        _check_integer("max_tokens", sampling.max_tokens, 1, _MAX_INT32)
    _check_integer("min_tokens", sampling.min_tokens, 0, _MAX_INT32)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest("min_tokens must not be above max_tokens", param="min_tokens")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids may name at most {MAX_STOP_TOKEN_IDS} tokens", param="stop_token_ids"
        )
    _check_token_ids("stop_token_ids", sampling.stop_token_ids)
    if sampling.logprobs is not None:
        _check_integer("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    if sampling.prompt_logprobs is not None:
        _check_integer("prompt_logprobs", sampling.prompt_logprobs, 0, MAX_LOGPROBS)


def _check_text(text: TextOptions) -> None:
    if len(text.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop may have at most {MAX_STOP_STRINGS} strings", param="stop")
    if not all(text.stop):
        raise InvalidRequest("a stop string must not be empty", param="stop")
    if max(map(len, text.stop), default=0) > MAX_STOP_LENGTH:
        raise InvalidRequest(
            f"a stop string may have at most {MAX_STOP_LENGTH} characters", param="stop"
        )


def _check_token_ids(name: str, token_ids: tuple[int, ...]) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) <= _MAX_UINT32):
        raise InvalidRequest(f"{name}: a token id is outside the vocabulary", param=name)


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}", param=name)


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is outside every range
        raise InvalidRequest(f"{name} must be a number from {low} to {high}", param=name)


def _check_above_zero(name: str, value: float, high: float, *, low: float = 0) -> None:
    if not 0 < value <= high:  # NaN is outside every range
        raise InvalidRequest(f"{name} must be a number above 0 and at most {high}", param=name)
    if value < low:
        raise InvalidRequest(f"{name} must be at least {low}", param=name)
