"""POST /v1/chat/completions: what a body asks for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from msgspec import structs

from services.common.errors import DeadlineExceeded, InvalidRequest
from services.gateway.domain import Dialect, Gateway, GenerationRequest
from services.gateway.offload import LARGE_BYTES, sized
from services.gateway.openai import fields
from services.gateway.openai.answer import Answer, Job
from services.gateway.openai.chat_answer import ChatAnswer, ChatOptions, ParsedChatAnswer
from services.gateway.openai.chat_prompt import chat_prompt
from services.gateway.openai.decode import (
    Caller,
    decode,
    generation_request,
    integer,
    refuse_in,
    sampling,
)
from services.gateway.openai.fanout import FanOut
from services.gateway.openai.output.parser import OutputPlan
from services.gateway.openai.schema import ChatBody
from services.gateway.openai.structured import grammar_of
from services.gateway.openai.tools.grammar import tool_grammar
from services.gateway.openai.tools.use import ToolUse, tool_use

MAX_TOP_LOGPROBS = 20


async def parse_chat(raw: bytes, caller: Caller, gateway: Gateway) -> Job:
    """Decodes and checks a body.

    Raises:
        InvalidRequest, Unsupported, and what `Gateway.dialect` raises.
    """

    def read() -> tuple[ChatBody, GenerationRequest, ToolUse]:
        body = decode(raw, ChatBody)
        return body, *chat_request(body, caller)

    body, request, tools = await sized(len(raw), LARGE_BYTES, read)
    dialect = await model_dialect(gateway, request)
    request, plan = shape_output(request, dialect, tools)
    options = ChatOptions(
        model=body.model or "",
        stream=bool(body.stream),
        logprobs=bool(body.logprobs),
        token_ids=bool(body.return_token_ids),
        usage=bool(body.stream_options and body.stream_options.include_usage),
        counts_on=bool(body.stream_options and body.stream_options.counts_on),
    )

    def answer(gateway: Gateway, whole: FanOut) -> Answer:
        if plan.plain:
            return ChatAnswer(options, gateway, whole)
        return ParsedChatAnswer(options, plan, gateway, whole)

    return Job((request,), options.stream, answer)


def chat_request(body: ChatBody, caller: Caller) -> tuple[GenerationRequest, ToolUse]:
    """What a body asks to generate, and with which tools.

    Raises:
        InvalidRequest, Unsupported.
    """
    refuse_in(body, fields.CHAT)
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    request = generation_request(
        body,
        caller,
        chat_prompt(body, reasoning_effort=body.reasoning_effort),
        sampling(
            body,
            max_tokens=_max_tokens(body),
            logprobs=_num_logprobs(body),
            grammar=grammar_of(body),
        ),
    )
    return request, tools


async def model_dialect(gateway: Gateway, request: GenerationRequest) -> Dialect:
    """The dialect of a request's model, waited for no longer than the request's own time.

    Raises:
        DeadlineExceeded, and what `Gateway.dialect` raises.
    """
    if request.timeout is None:
        return await gateway.dialect(request.model)
    try:
        async with asyncio.timeout(request.timeout):
            return await gateway.dialect(request.model)
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed") from None


def shape_output(
    request: GenerationRequest, dialect: Dialect, tools: ToolUse
) -> tuple[GenerationRequest, OutputPlan]:
    """The request held to what its tools ask for, and what to look for in its output.

    A call that is forced is found even where the model's own format is unknown.

    Raises:
        Unsupported: for a grammar that cannot be combined with tools.
    """
    grammar = tool_grammar(tools, dialect.tools, request.sampling.grammar)
    if tools.required and dialect.tools == "none":
        dialect = replace(dialect, tools="llama3_json")
    plan = OutputPlan(dialect, tools.names, constrained=grammar is not None)
    if grammar is not request.sampling.grammar:
        held = structs.replace(request.sampling, grammar=grammar)
        request = structs.replace(request, sampling=held)
    return request, plan


def _max_tokens(body: ChatBody) -> int | None:
    newer = integer("max_completion_tokens", body.max_completion_tokens)
    if newer is not None and newer < 1:
        raise InvalidRequest(
            "max_completion_tokens must be at least 1", param="max_completion_tokens"
        )
    older = integer("max_tokens", body.max_tokens)
    return older if newer is None else newer


def _num_logprobs(body: ChatBody) -> int | None:
    top = integer("top_logprobs", body.top_logprobs)
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be an integer from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    if body.logprobs:
        return top or 0
    if top is not None:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None
