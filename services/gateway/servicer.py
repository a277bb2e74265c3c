"""shoal.v1.Inference over the same core, and the same value checks, as REST.

Errors leave as the exceptions they are; the server's interceptor turns them into
statuses. A cancelled or expired call cancels its handler, which gives the request up; a
client that takes nothing for `unread_timeout` is given up too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

import grpc.aio

from protos import inference_pb2, inference_pb2_grpc
from services.common.errors import Cancelled, InvalidRequest
from services.common.session import in_time, send_headers
from services.common.tracing import NoTracing, TraceContext, Tracing, parse_trace
from services.gateway import from_proto, spans
from services.gateway.domain import ChatPrompt, Gateway, Generation, Prompt, TextPrompt
from services.gateway.grpc_keys import texts
from services.gateway.grpc_session import InferenceSession
from services.gateway.ids import new_id
from services.gateway.keys import KeyRing
from services.gateway.validate import MAX_TIMEOUT_SECONDS, check_request

Context = grpc.aio.ServicerContext[Any, Any]
A = TypeVar("A", inference_pb2.GenerateResponse, inference_pb2.ChatResponse)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The public gRPC API."""

    def __init__(
        self,
        gateway: Gateway,
        keys: KeyRing | None = None,
        *,
        unread_timeout: float = 60.0,
        tracing: Tracing | None = None,
    ) -> None:
        self._gateway = gateway
        self._tracing = tracing or NoTracing()
        self._keys = KeyRing() if keys is None else keys
        self._unread_timeout = unread_timeout
        self._sessions: set[InferenceSession] = set()
        self._ending = False

    async def Generate(  # type: ignore[override]  # the stub knows generators only
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        with self._call("Generate", context) as trace:
            prompt = from_proto.text_or_ids(request)
            generation = await self._start(prompt, request.options, context, trace)
            await self._send(generation, inference_pb2.GenerateResponse, context)

    async def Chat(  # type: ignore[override]
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> None:
        with self._call("Chat", context) as trace:
            prompt = from_proto.chat_prompt(request.chat)
            generation = await self._start(prompt, request.options, context, trace)
            await self._send(generation, inference_pb2.ChatResponse, context)

    async def Session(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[inference_pb2.SessionRequest],
        context: Context,
    ) -> None:
        """Serves many generations until the client's side and all of them have ended."""

        @asynccontextmanager
        async def begin(start: inference_pb2.SessionStart) -> AsyncIterator[Generation]:
            with self._call("Session", context, start.traceparent) as trace:
                prompt, options = from_proto.session_prompt(start)
                timeout = start.deadline_ms / 1000 if start.HasField("deadline_ms") else None
                generation = await self._start(prompt, options, context, trace, timeout=timeout)
                try:
                    yield generation
                finally:
                    await generation.aclose()

        await send_headers(context)
        session = InferenceSession(begin)
        self._sessions.add(session)
        if self._ending:
            session.end_when_idle()
        try:
            write = in_time(context.write, self._unread_timeout, Cancelled)
            await session.run(request_iterator, write)
        finally:
            self._sessions.discard(session)

    def end_sessions(self) -> None:
        """Ends each session as soon as it has no generation left, and later ones too."""
        self._ending = True
        for session in self._sessions:
            session.end_when_idle()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        with self._call("Tokenize", context):
            answer = await self._gateway.tokenize(request.model, _tokenize_input(request))
        return inference_pb2.TokenizeResponse(
            token_ids=answer.token_ids, max_model_len=answer.max_model_len
        )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        with self._call("Detokenize", context):
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

    def _call(
        self, method: str, context: Context, traceparent: str = ""
    ) -> AbstractContextManager[TraceContext]:
        """A call's span, part of what the call's metadata, or a `traceparent` of its own, says."""
        metadata = texts(context.invocation_metadata())
        trace = parse_trace(
            traceparent or metadata.get("traceparent", ""), metadata.get("tracestate", "")
        )
        return spans.rpc_call(self._tracing, method, trace)

    async def _start(
        self,
        prompt: Prompt,
        options: inference_pb2.GenerationOptions,
        context: Context,
        trace: TraceContext,
        *,
        timeout: float | None = None,
    ) -> Generation:
        """Checks a request and starts it; the call's deadline applies too."""
        metadata = texts(context.invocation_metadata())
        request = from_proto.generation_request(
            prompt,
            options,
            request_id=new_id(),
            timeout=_sooner(_remaining(context), timeout),
            trace=trace,
            tenant=self._keys.identify(metadata),
        )
        check_request(request)
        return await self._gateway.start(request)

    async def _send(self, generation: Generation, answer: type[A], context: Context) -> None:
        """Pieces as they come, and the usage alone at the end."""
        write = in_time(context.write, self._unread_timeout, Cancelled)
        told_prompt = False
        try:
            await send_headers(context)
            async for chunk in generation:
                if not told_prompt:  # its scores are known by the first chunk
                    told_prompt = True
                    for logprobs in from_proto.prompt_logprobs(generation.prompt_logprobs):
                        await write(answer(prompt_logprobs=logprobs))
                await write(answer(pieces=[from_proto.piece(chunk)]))
            await write(answer(usage=from_proto.usage(generation.usage)))
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


def _remaining(context: Context) -> float | None:
    """Seconds until the call's deadline."""
    remaining: float | None = context.time_remaining()
    return remaining


def _sooner(*timeouts: float | None) -> float | None:
    """The shortest of some timeouts, if it is near enough to matter, and never 0."""
    near = [
        seconds for seconds in timeouts if seconds is not None and seconds < MAX_TIMEOUT_SECONDS
    ]
    return max(min(near), 0.001) if near else None
