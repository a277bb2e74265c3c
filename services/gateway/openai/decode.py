"""From a body of bytes to a `GenerationRequest`: what all REST endpoints share.

Types are checked here, by msgspec; ranges are the business of
`services.gateway.validate`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from services.common.errors import InvalidRequest, Unsupported
from services.common.tracing import NO_TRACE, TraceContext
from services.gateway.domain import GenerationRequest, Grammar, Prompt, Sampling, TextOptions
from services.gateway.openai.fields import FieldTable
from services.gateway.openai.schema import Integer, OpenAIBody, SamplingBody
from services.gateway.validate import check_request, unsigned_seed

T = TypeVar("T")

MAX_TRUNCATION = 2**31 - 1
MAX_DEPTH = 64  # of the objects that are passed on to the template

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_TYPE_NAMES = {
    "int | float": "integer",
    "float": "number",
    "int": "integer",
    "str": "string",
    "bool": "boolean",
}
_TYPE_NAME = re.compile(r"\b(?:int \| float|float|int|str|bool)\b")


def decode(body: bytes, type: type[T]) -> T:
    """Reads a JSON body into a struct.

    Raises:
        InvalidRequest: for anything but JSON of the right shape, naming the field.
    """
    try:
        body.decode()  # msgspec skips over unknown fields without looking at their UTF-8
        return msgspec.json.decode(body, type=type)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except msgspec.ValidationError as error:
        raise _mistyped(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _mistyped(text: str) -> InvalidRequest:
    """Words msgspec's "Expected `int`, got `str` - at `$.n`" for the client."""
    at = _PATH.search(text)
    path = at.group(1) if at else ""
    missing = _MISSING.search(text)
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return InvalidRequest(f"{path} is required", param=path)
    said = _PATH.sub("", text).replace("`", "")
    said = _TYPE_NAME.sub(lambda match: _TYPE_NAMES[match.group()], said)
    said = said.replace(" | null", "").replace(" | ", " or ")
    return InvalidRequest(f"{path or 'the body'}: {said[0].lower()}{said[1:]}", param=path or None)


def integer(name: str, value: Integer | None) -> int | None:
    """An integer that may have been written as 3.0.

    Raises:
        InvalidRequest: for 2.5.
    """
    if isinstance(value, float):
        if not value.is_integer():
            raise InvalidRequest(f"{name}: expected integer, got number", param=name)
        return int(value)
    return value


def refuse(body: msgspec.Struct, table: Mapping[str, tuple[Any, ...]], *, within: str = "") -> None:
    """Refuses fields that would change the result and are not built; `within` a field.

    Raises:
        Unsupported: naming the first of them.
    """
    for name, harmless in table.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            raise unsupported(f"{within}.{name}" if within else name)


def refuse_in(body: OpenAIBody, table: FieldTable) -> None:
    """`refuse` for a body; hardly any has one of the fields."""
    if table.refused_values(body) != (None,) * len(table.refused):
        refuse(body, table.refused)


def unsupported(name: str, *, param: str | None = None) -> Unsupported:
    """The error for a field, or for a value of the field `param`."""
    return Unsupported(f"{name} is not supported by this server", param=param or name)


def object_json(name: str, value: Mapping[str, Any] | list[dict[str, Any]] | None) -> str:
    """A free-form value as JSON text, for the template; absent and empty are "".

    Raises:
        InvalidRequest: if it is nested so deeply that a reader could choke on it.
    """
    if not value:
        return ""
    layer: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return msgspec.json.encode(value).decode()
    raise InvalidRequest(f"{name} is nested too deeply", param=name)


class Caller(Struct, frozen=True):
    """What a request's headers say."""

    request_id: str
    timeout: float | None = None
    trace: TraceContext = NO_TRACE
    tenant: str = ""


def sampling(
    body: SamplingBody,
    *,
    max_tokens: int | None,
    temperature: float = 1.0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> Sampling:
    """The sampling options of a body; `temperature` is the default."""
    seed = integer("seed", body.seed)
    return Sampling(
        temperature=_or(body.temperature, temperature),
        top_k=_or(integer("top_k", body.top_k), 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        seed=None if seed is None else unsigned_seed(seed),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=body.logit_bias or {},
        max_tokens=max_tokens,
        min_tokens=_or(integer("min_tokens", body.min_tokens), 0),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def generation_request(
    body: SamplingBody, caller: Caller, prompt: Prompt, options: Sampling
) -> GenerationRequest:
    """The checked request for one prompt.

    Raises:
        InvalidRequest: for a value out of its range.
    """
    stop = body.stop if body.stop is not None else []
    request = GenerationRequest(
        request_id=caller.request_id,
        model=body.model or "",
        prompt=prompt,
        sampling=options,
        text=TextOptions(
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=_or(body.skip_special_tokens, True),
        ),
        n=_or(integer("n", body.n), 1),
        timeout=_or(body.timeout, caller.timeout),
        max_prompt_tokens=_max_prompt_tokens(body) if isinstance(body, OpenAIBody) else None,
        priority=_or(integer("priority", body.priority), 0),
        cache_salt=body.cache_salt or "",
        traceparent=caller.trace.traceparent,
        tracestate=caller.trace.tracestate,
        tenant=caller.tenant,
    )
    check_request(request)
    return request


def _max_prompt_tokens(body: OpenAIBody) -> int | None:
    """vLLM's `truncate_prompt_tokens`, where -1 is as much as fits."""
    count = integer("truncate_prompt_tokens", body.truncate_prompt_tokens)
    if count is not None and not (count == -1 or 1 <= count <= MAX_TRUNCATION):
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or an integer from 1 to {MAX_TRUNCATION}",
            param="truncate_prompt_tokens",
        )
    return 0 if count == -1 else count


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
