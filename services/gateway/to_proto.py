"""Domain types to the messages that the gateway sends to its peers."""

from __future__ import annotations

from collections.abc import Sequence

from protos import common_pb2, tokenizer_pb2, worker_pb2
from services.common.tracing import NO_TRACE, TraceContext
from services.gateway.domain import (
    ChatPrompt,
    GenerationRequest,
    Grammar,
    Message,
    Sampling,
    TextPrompt,
)
from services.gateway.validate import unsigned_seed

_SEED_SPAN = 1 << 64


def encode_request(
    prompt: ChatPrompt | TextPrompt,
    *,
    return_token_strs: bool = False,
    trace: TraceContext = NO_TRACE,
    max_model_len: int | None = None,
) -> tokenizer_pb2.EncodeRequest:
    """A prompt for a tokenizer, which may refuse it where it cannot fit into `max_model_len`."""
    request = _encode_request(prompt)
    request.return_token_strs = return_token_strs
    request.traceparent, request.tracestate = trace.traceparent, trace.tracestate
    if max_model_len is not None:
        request.max_model_len = max_model_len
    return request


def _encode_request(prompt: ChatPrompt | TextPrompt) -> tokenizer_pb2.EncodeRequest:
    if isinstance(prompt, TextPrompt):
        return tokenizer_pb2.EncodeRequest(
            text=prompt.text, add_special_tokens=prompt.add_special_tokens
        )
    return tokenizer_pb2.EncodeRequest(chat=_chat(prompt))


def submit(
    request: GenerationRequest,
    prompt_ids: Sequence[int],
    *,
    index: int,
    seed: int,
    max_tokens: int,
    resume_ids: Sequence[int],
    deadline_ms: int | None,
) -> worker_pb2.Submit:
    """Choice `index` of a request, for a worker; the session fills the handle in."""
    sampling = _sampling(request.sampling)
    sampling.seed = (unsigned_seed(seed) + index) % _SEED_SPAN
    sampling.max_tokens = max_tokens
    return worker_pb2.Submit(
        request_id=request.request_id,
        prompt_ids=prompt_ids,
        resume_ids=resume_ids,
        sampling=sampling,
        deadline_ms=deadline_ms,
        priority=request.priority,
        traceparent=request.traceparent,
        tracestate=request.tracestate,
        cache_salt=request.cache_salt,
    )


def _sampling(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=None if sampling.grammar is None else _grammar(sampling.grammar),
    )


def _grammar(grammar: Grammar) -> common_pb2.Grammar:
    message = common_pb2.Grammar()
    if grammar.kind == "choices":
        message.choices.texts.extend(grammar.value)
    else:
        setattr(message, grammar.kind, grammar.value)
    return message


def _chat(prompt: ChatPrompt) -> common_pb2.ChatPrompt:
    return common_pb2.ChatPrompt(
        messages=[_message(message) for message in prompt.messages],
        tools_json=prompt.tools_json,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        template_kwargs_json=prompt.template_kwargs_json,
    )


def _message(message: Message) -> common_pb2.ChatMessage:
    return common_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=[
            common_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )
