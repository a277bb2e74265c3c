"""Messages of the public gRPC API to domain types, and answers back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from protos import common_pb2, inference_pb2
from services.common.errors import InvalidRequest
from services.common.tracing import NO_TRACE, TraceContext
from services.gateway.domain import (
    ChatPrompt,
    Chunk,
    FinishReason,
    GenerationRequest,
    Grammar,
    Message,
    Prompt,
    Sampling,
    TextOptions,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
    ToolCall,
    Usage,
)
from services.gateway.validate import (
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

_PROMPT_LOGPROBS = 4096  # in one message: with twenty alternatives each, below 1 MiB

_REASONS: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "abort": common_pb2.FINISH_REASON_ABORT,
}


def generation_request(
    prompt: Prompt,
    options: inference_pb2.GenerationOptions,
    *,
    request_id: str,
    timeout: float | None,
    trace: TraceContext = NO_TRACE,
    tenant: str = "",
) -> GenerationRequest:
    """A request of Generate or Chat; `request_id` serves where the client named none."""
    return GenerationRequest(
        request_id=options.request_id or request_id,
        model=options.model,
        prompt=prompt,
        sampling=sampling(options.sampling),
        text=text_options(options.text),
        n=options.n if options.HasField("n") else 1,
        timeout=timeout,
        priority=options.priority,
        cache_salt=options.cache_salt,
        traceparent=trace.traceparent,
        tracestate=trace.tracestate,
        tenant=tenant,
    )


def text_or_ids(request: inference_pb2.GenerateRequest) -> Prompt:
    """The prompt of Generate. Raises InvalidRequest if there is none."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("set text or token_ids", param="prompt")
    if kind == "text":
        return TextPrompt(request.text)
    return TokenPrompt(tuple(request.token_ids.ids))


def session_prompt(
    start: inference_pb2.SessionStart,
) -> tuple[Prompt, inference_pb2.GenerationOptions]:
    """What a session's start asks for. Raises InvalidRequest if that is nothing."""
    kind = start.WhichOneof("request")
    if kind is None:
        raise InvalidRequest("set generate or chat", param="request")
    if kind == "generate":
        return text_or_ids(start.generate), start.generate.options
    return chat_prompt(start.chat.chat), start.chat.options


# A list that has a limit is converted no further than one past it, which is enough for
# `services.gateway.validate` to refuse it: an empty entry is two bytes on the wire.


def chat_prompt(chat: common_pb2.ChatPrompt) -> ChatPrompt:
    """A conversation."""
    return ChatPrompt(
        messages=tuple(_message(message) for message in islice(chat.messages, MAX_MESSAGES + 1)),
        tools_json=chat.tools_json,
        add_generation_prompt=(
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        ),
        continue_final_message=chat.continue_final_message,
        template_kwargs_json=chat.template_kwargs_json,
    )


def sampling(proto: common_pb2.SamplingParams) -> Sampling:
    """Sampling options; an absent field takes the domain's default."""
    given = {
        name: getattr(proto, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "max_tokens",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
        )
        if proto.HasField(name)
    }
    return Sampling(
        **given,
        logit_bias=dict(islice(proto.logit_bias.items(), MAX_LOGIT_BIASES + 1)),
        stop_token_ids=tuple(proto.stop_token_ids[: MAX_STOP_TOKEN_IDS + 1]),
        ignore_eos=proto.ignore_eos,
        grammar=grammar(proto.grammar) if proto.HasField("grammar") else None,
    )


def grammar(proto: common_pb2.Grammar) -> Grammar:
    """A constraint on the output. Raises InvalidRequest if it has no kind."""
    kind = proto.WhichOneof("constraint")
    if kind is None:
        raise InvalidRequest("set one kind of constraint", param="grammar")
    if kind == "choices":
        return Grammar(kind, tuple(proto.choices.texts), "grammar")
    return Grammar(kind, getattr(proto, kind), "grammar")


def text_options(proto: common_pb2.TextOptions) -> TextOptions:
    """Stop strings and rendering."""
    skip = proto.skip_special_tokens if proto.HasField("skip_special_tokens") else True
    stop = tuple(proto.stop[: MAX_STOP_STRINGS + 1])
    return TextOptions(stop, proto.include_stop_str_in_output, skip)


def _message(message: common_pb2.ChatMessage) -> Message:
    return Message(
        role=message.role,
        content=message.content if message.HasField("content") else None,
        name=message.name if message.HasField("name") else None,
        tool_calls=tuple(
            ToolCall(call.id, call.name, call.arguments)
            for call in islice(message.tool_calls, MAX_MESSAGES + 1)
        ),
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        reasoning_content=(
            message.reasoning_content if message.HasField("reasoning_content") else None
        ),
    )


def piece(chunk: Chunk) -> inference_pb2.GenerationPiece:
    """A chunk as the public API has it."""
    found = inference_pb2.GenerationPiece(
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=_logprobs(chunk.logprobs or ()),
        finish_reason=_REASONS[chunk.finish_reason],
    )
    if isinstance(chunk.stop_reason, str):
        found.stop = chunk.stop_reason
    elif chunk.stop_reason is not None:
        found.stop_token_id = chunk.stop_reason
    return found


def prompt_logprobs(
    logprobs: Sequence[TokenLogprobs] | None,
) -> Iterator[list[common_pb2.TokenLogprobs]]:
    """A prompt's log-probabilities, in lists of the size of a message."""
    found = logprobs or ()
    for first in range(0, len(found), _PROMPT_LOGPROBS):
        yield _logprobs(found[first : first + _PROMPT_LOGPROBS])


def usage(counts: Usage) -> inference_pb2.Usage:
    """Token counts as the public API has them."""
    return inference_pb2.Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        cached_tokens=counts.cached_tokens,
    )


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> list[common_pb2.TokenLogprobs]:
    return [
        common_pb2.TokenLogprobs(
            token_id=token.token_id,
            logprob=token.logprob,
            top_token_ids=[token_id for token_id, _ in token.top],
            top_logprobs=[logprob for _, logprob in token.top],
        )
        for token in logprobs
    ]
