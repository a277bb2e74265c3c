"""POST /generate in SGLang's shape: `text` or `input_ids` with `sampling_params`.

Each event of a stream has all of the text so far, as there; the ids come with the last. Logprobs
are not streamed: to repeat them in each event would cost the gateway their number's square.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.common.errors import InvalidRequest, ShoalError
from services.gateway.domain import (
    Chunk,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
    Usage,
)
from services.gateway.openai import fields
from services.gateway.openai.answer import Choice, Job, cached_tokens, failure_events
from services.gateway.openai.decode import (
    Caller,
    decode,
    generation_request,
    integer,
    refuse,
    sampling,
)
from services.gateway.openai.fanout import FanOut
from services.gateway.openai.schema import SamplingBody, SGLangBody, SGLangSampling
from services.gateway.openai.structured import sglang_grammar_of
from services.gateway.sse import DONE, json_event, json_object

_MAX_RID = 256  # characters, as of x-request-id

# Names of errors, where ours are not SGLang's.
_TOP_LEVEL = frozenset({"model", "timeout", "priority", "cache_salt"})
_RENAMED = {
    "logprobs": "top_logprobs_num",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
}


def parse_sglang(raw: bytes, caller: Caller) -> Job:
    """Decodes and checks a body.

    Raises:
        InvalidRequest, Unsupported.
    """
    body = decode(raw, SGLangBody)
    options = body.sampling_params or SGLangSampling()
    refuse(body, fields.SGLANG.refused)
    refuse(options, fields.SGLANG_SAMPLING.refused, within="sampling_params")
    if body.stream and body.return_logprob:
        raise InvalidRequest(
            "return_logprob is not supported in a stream of /generate; ask for it without stream,"
            " or for logprobs at /v1/completions",
            param="return_logprob",
        )
    if body.rid is not None and len(body.rid) > _MAX_RID:
        raise InvalidRequest(f"rid is longer than {_MAX_RID} characters", param="rid")
    names = _names(body)
    try:
        request = _request(body, options, caller)
    except InvalidRequest as error:
        raise _renamed(error, names) from None
    rid = body.rid or caller.request_id
    return Job(
        (request,),
        bool(body.stream),
        lambda _, whole: SGLangAnswer(rid, request, whole),
        names,
    )


def _names(body: SGLangBody) -> Mapping[str, str]:
    """Our names of fields, and what they are called in this body."""
    ours = frozenset(SamplingBody.__struct_fields__) - _TOP_LEVEL
    prompt = "text" if body.text is not None else "input_ids"
    within = {name: f"sampling_params.{name}" for name in ours}
    return {**within, **_RENAMED, "prompt": prompt}


def _renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    name = names.get(error.param or "")
    if name is None:
        return error
    words = re.compile(rf"\b(?:{error.param}|max_tokens)\b")
    message = words.sub(lambda match: names[match.group()], error.message)
    return InvalidRequest(message, param=name)


def _request(body: SGLangBody, options: SGLangSampling, caller: Caller) -> GenerationRequest:
    top = integer("top_logprobs_num", body.top_logprobs_num) or 0
    ours = SamplingBody(
        model=body.model,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.sampling_seed,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=options.logit_bias,
        min_tokens=options.min_new_tokens,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        include_stop_str_in_output=options.no_stop_trim,
        skip_special_tokens=options.skip_special_tokens,
        ignore_eos=options.ignore_eos,
        timeout=body.timeout,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    draw = sampling(
        ours,
        max_tokens=integer("max_tokens", options.max_new_tokens),
        logprobs=top if body.return_logprob else None,
        grammar=sglang_grammar_of(options),
    )
    return generation_request(ours, caller, _prompt(body), draw)


def _prompt(body: SGLangBody) -> Prompt:
    if body.text is not None and body.input_ids is not None:
        raise InvalidRequest("text and input_ids are both given; give one", param="input_ids")
    if body.text is not None:
        return TextPrompt(body.text)
    if body.input_ids is not None:
        return TokenPrompt(tuple(body.input_ids))
    raise InvalidRequest(
        "text or input_ids is required beside sampling_params; a prompt goes with its options"
        " at the top level",
        param="text",
    )


class SGLangAnswer:
    """Writes objects with the text, its ids and `meta_info`."""

    def __init__(self, rid: str, request: GenerationRequest, whole: FanOut) -> None:
        self._rid = rid
        self._logprobs = request.sampling.logprobs
        self._whole = whole
        self._so_far = Choice(0)  # of a stream

    def first_events(self) -> bytes:
        return b""

    async def events(self, chunk: Chunk) -> bytes:
        self._so_far.add(chunk)
        if not (chunk.text or chunk.finish_reason):
            return b""
        answer = self._fields(self._so_far, self._whole.usage)
        if not chunk.finish_reason:
            del answer["output_ids"]
        return json_event(json_object(answer))

    def text_event(self, index: int, text: str) -> bytes | None:
        return None  # an event tells of more than its own text

    def last_events(self, usage: Usage) -> bytes:
        return DONE

    def failure(self, error: ShoalError) -> bytes:
        return failure_events(error)

    async def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return msgspec.json.encode(self._fields(choices[0], usage))

    def _fields(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": _finish_reason(choice, usage),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": cached_tokens(usage),
        }
        if self._logprobs is not None:
            meta["output_token_logprobs"] = [
                _score(entry.token_id, entry.logprob) for entry in choice.logprobs
            ]
        if self._logprobs:
            meta["output_top_logprobs"] = [_top(entry) for entry in choice.logprobs]
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}


def _finish_reason(choice: Choice, usage: Usage) -> dict[str, Any] | None:
    if choice.finish_reason is None:
        return None
    if choice.finish_reason == "length":
        return {"type": "length", "length": usage.completion_tokens}
    return {"type": choice.finish_reason, "matched": choice.stop_reason}


def _top(entry: TokenLogprobs) -> list[tuple[float, int, None]]:
    return [_score(token_id, logprob) for token_id, logprob in entry.top]


def _score(token_id: int, logprob: float) -> tuple[float, int, None]:
    """A token's logprob, its id, and in the place of its text nothing."""
    return logprob, token_id, None
