"""POST /generate: a prompt in, plain text events out (the format of Mini-SGLang).

As there, the default is greedy, and an answer is streamed unless `stream` is false. A body
with SGLang's fields is the business of `services.gateway.openai.sglang`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.common.errors import InvalidRequest, ShoalError
from services.gateway.domain import Chunk, Gateway, Prompt, TextPrompt, TokenPrompt, Usage
from services.gateway.openai.answer import Choice, Job, failure_events, usage_fields
from services.gateway.openai.decode import Caller, decode, generation_request, integer, sampling
from services.gateway.openai.schema import GenerateBody
from services.gateway.openai.sglang import parse_sglang
from services.gateway.sse import DONE, text_event

DEFAULT_MAX_TOKENS = 16


class _Kind(msgspec.Struct):
    """Enough of a body to tell SGLang's shape by."""

    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    sampling_params: msgspec.Raw = msgspec.Raw()

    def is_sglang(self) -> bool:
        """Raises InvalidRequest if it is of both shapes."""
        its_prompt = _given(self.text) or _given(self.input_ids)
        if its_prompt and _given(self.prompt):
            raise InvalidRequest("prompt is given beside text or input_ids", param="prompt")
        return its_prompt or _given(self.sampling_params)


def _given(value: msgspec.Raw) -> bool:
    seen = memoryview(value)
    return len(seen) > 0 and (len(seen) != 4 or bytes(seen) != b"null")


async def parse_generate(raw: bytes, caller: Caller, gateway: Gateway) -> Job:
    """Decodes and checks a body.

    Raises:
        InvalidRequest, Unsupported.
    """
    if decode(raw, _Kind).is_sglang():
        return parse_sglang(raw, caller)
    body = decode(raw, GenerateBody)
    prompt: Prompt = (
        TextPrompt(body.prompt) if isinstance(body.prompt, str) else TokenPrompt(tuple(body.prompt))
    )
    max_tokens = integer("max_tokens", body.max_tokens)
    options = sampling(
        body,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        temperature=0.0,
    )
    request = generation_request(body, caller, prompt, options)
    if request.n != 1:
        raise InvalidRequest("n must be 1: events of plain text name no choice", param="n")
    stream = body.stream is None or body.stream
    return Job((request,), stream, lambda _, __: TextAnswer())


class TextAnswer:
    """Writes bare text, or one object with the text, its ids and the counts."""

    def first_events(self) -> bytes:
        return b""

    async def events(self, chunk: Chunk) -> bytes:
        return text_event(chunk.text) if chunk.text else b""

    def text_event(self, index: int, text: str) -> bytes | None:
        return text_event(text)

    def last_events(self, usage: Usage) -> bytes:
        return DONE

    def failure(self, error: ShoalError) -> bytes:
        return failure_events(error)

    async def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        choice = choices[0]
        return msgspec.json.encode(
            {
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "usage": usage_fields(usage),
            }
        )
