"""Messages of the public gRPC API to domain types, and answers back."""

from __future__ import annotations

from collections.abc import Sequence

from protos import common_pb2, inference_pb2
from services.common.errors import InvalidRequest
from services.gateway.domain import (
    ChatPrompt,
    Chunk,
    FinishReason,
    GenerationRequest,
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
    traceparent: str,
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
        traceparent=traceparent,
    )


def text_or_ids(request: inference_pb2.GenerateRequest) -> Prompt:
    """The prompt of Generate. Raises InvalidRequest if there is none."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("set text or token_ids", param="prompt")
    if kind == "text":
        return TextPrompt(request.text)
    return TokenPrompt(tuple(request.token_ids.ids))


def chat_prompt(chat: common_pb2.ChatPrompt) -> ChatPrompt:
    """A conversation."""
    return ChatPrompt(
        messages=tuple(_message(message) for message in chat.messages),
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
        logit_bias=dict(proto.logit_bias),
        stop_token_ids=tuple(proto.stop_token_ids),
        ignore_eos=proto.ignore_eos,
    )


def text_options(proto: common_pb2.TextOptions) -> TextOptions:
    """Stop strings and rendering."""
    skip = proto.skip_special_tokens if proto.HasField("skip_special_tokens") else True
    return TextOptions(tuple(proto.stop), proto.include_stop_str_in_output, skip)


def _message(message: common_pb2.ChatMessage) -> Message:
    return Message(
        role=message.role,
        content=message.content if message.HasField("content") else None,
        name=message.name if message.HasField("name") else None,
        tool_calls=tuple(ToolCall(c.id, c.name, c.arguments) for c in message.tool_calls),
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        reasoning_content=(
            message.reasoning_content if message.HasField("reasoning_content") else None
        ),
    )


def piece(chunk: Chunk) -> inference_pb2.GenerationPiece:
    """A chunk as the public API has it."""
    return inference_pb2.GenerationPiece(
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=_logprobs(chunk.logprobs or ()),
        finish_reason=_REASONS[chunk.finish_reason],
    )


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
