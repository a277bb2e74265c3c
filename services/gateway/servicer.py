"""shoal.v1.Inference over the same core, and the same value checks, as REST.

Errors leave as the exceptions they are; the server's interceptor turns them into
statuses. A cancelled or expired call cancels its handler, which gives the request up.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc.aio

from protos import inference_pb2, inference_pb2_grpc
from services.common.errors import InvalidRequest
from services.gateway import from_proto
from services.gateway.domain import (
    ChatPrompt,
    Gateway,
    Prompt,
    TextPrompt,
)
from services.gateway.validate import MAX_TIMEOUT_SECONDS, check_request

Context = grpc.aio.ServicerContext[Any, Any]
_Answer = tuple[Sequence[inference_pb2.GenerationPiece], inference_pb2.Usage | None]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The public gRPC API."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        answers = self._stream(from_proto.text_or_ids(request), request.options, context)
        async with aclosing(answers):
            async for pieces, usage in answers:
                yield inference_pb2.GenerateResponse(pieces=pieces, usage=usage)

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[inference_pb2.ChatResponse]:
        answers = self._stream(from_proto.chat_prompt(request.chat), request.options, context)
        async with aclosing(answers):
            async for pieces, usage in answers:
                yield inference_pb2.ChatResponse(pieces=pieces, usage=usage)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        answer = await self._gateway.tokenize(request.model, _tokenize_input(request))
        return inference_pb2.TokenizeResponse(
            token_ids=answer.token_ids, max_model_len=answer.max_model_len
        )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        text = await self._gateway.detokenize(request.model, request.token_ids)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.ModelCard(
                    id=card.id, max_model_len=card.max_model_len, created=card.created
                )
                for card in self._gateway.models()
            ]
        )

    async def _stream(
        self, prompt: Prompt, options: inference_pb2.GenerationOptions, context: Context
    ) -> AsyncGenerator[_Answer, None]:
        """Pieces as they come, and the usage alone at the end."""
        request = from_proto.generation_request(
            prompt,
            options,
            request_id=uuid.uuid4().hex,
            timeout=_timeout(context),
            traceparent=_traceparent(context),
        )
        check_request(request)
        generation = await self._gateway.start(request)
        try:
            async for chunk in generation:
                yield [from_proto.piece(chunk)], None
            yield [], from_proto.usage(generation.usage)
        finally:
            await generation.aclose()


def _tokenize_input(request: inference_pb2.TokenizeRequest) -> ChatPrompt | TextPrompt:
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("set text or chat", param="input")
    if kind == "text":
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return TextPrompt(request.text, special)
    return from_proto.chat_prompt(request.chat)


def _timeout(context: Context) -> float | None:
    """The call's deadline; one too far away to matter is none."""
    remaining = context.time_remaining()
    if remaining is None or remaining > MAX_TIMEOUT_SECONDS:
        return None
    return max(remaining, 0.001)


def _traceparent(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""
