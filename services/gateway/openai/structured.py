"""From a body's fields to the grammar that its output must follow.

Three families of names say the same: OpenAI's `response_format`; vLLM's `guided_json`,
`guided_regex`, `guided_choice`, `guided_grammar` and `structured_outputs`; SGLang's
`regex` and `ebnf`. One constraint may be given, by one of them. Whether a grammar can be
used is found by the worker, whose error names the field by `Grammar.param`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Literal

import msgspec

from services.common.errors import InvalidRequest
from services.gateway.domain import Grammar
from services.gateway.openai.decode import object_json, refuse, unsupported
from services.gateway.openai.fields import REFUSED_IN_STRUCTURED_OUTPUTS
from services.gateway.openai.schema import (
    JsonSchema,
    OpenAIBody,
    ResponseFormat,
    StructuredOutputs,
)

_CONSTRAINTS = attrgetter(
    *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "regex", "ebnf"),
)
_ANY_OBJECT = '{"type":"object"}'


def grammar_of(body: OpenAIBody) -> Grammar | None:
    """What a body's output must match; None if anything will do.

    Raises:
        InvalidRequest: for two constraints, or one without its value.
        Unsupported: for a form of constraint that is not built.
    """
    if _CONSTRAINTS(body) == (None,) * 8:  # as hardly any has one
        return None
    grammars = [
        grammar
        for grammar in (
            _response_format(body.response_format),
            _json("guided_json", body.guided_json),
            _text("regex", "guided_regex", body.guided_regex),
            _choices("guided_choice", body.guided_choice),
            _text("lark", "guided_grammar", body.guided_grammar),
            _structured_outputs(body.structured_outputs),
            _text("regex", "regex", body.regex),
            _text("lark", "ebnf", body.ebnf),
        )
        if grammar is not None
    ]
    return _only(grammars)


def _only(grammars: list[Grammar]) -> Grammar | None:
    if len(grammars) > 1:
        first, second = grammars[:2]
        raise InvalidRequest(
            f"{first.param} and {second.param} both constrain the output; give one",
            param=second.param,
        )
    return grammars[0] if grammars else None


def _response_format(format: ResponseFormat | None) -> Grammar | None:
    name = "response_format"
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return Grammar("json_schema", _ANY_OBJECT, name)
    if format.type != "json_schema":
        raise unsupported(f"{name} of type {format.type!r}", param=name)
    if format.json_schema is None or format.json_schema.schema is None:
        raise InvalidRequest(f"{name}.json_schema.schema is required", param=name)
    return _json(name, format.json_schema.schema)


def _structured_outputs(options: StructuredOutputs | None) -> Grammar | None:
    name = "structured_outputs"
    if options is None:
        return None
    refuse(options, REFUSED_IN_STRUCTURED_OUTPUTS, within=name)
    grammars = [
        grammar
        for grammar in (
            _json(f"{name}.json", options.json),
            _text("regex", f"{name}.regex", options.regex),
            _choices(f"{name}.choice", options.choice),
            _text("lark", f"{name}.grammar", options.grammar),
            Grammar("json_schema", _ANY_OBJECT, f"{name}.json_object")
            if options.json_object
            else None,
        )
        if grammar is not None
    ]
    if not grammars:
        raise InvalidRequest(f"{name} names no constraint", param=name)
    return _only(grammars)


def _json(name: str, schema: JsonSchema | None) -> Grammar | None:
    """A schema, or its text, as text."""
    if schema is None:
        return None
    value: Any = schema
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            raise InvalidRequest(f"{name} is text that is not JSON", param=name)
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON schema: an object", param=name)
    return Grammar("json_schema", object_json(name, value) or "{}", name)


def _text(kind: Literal["regex", "lark"], name: str, text: str | None) -> Grammar | None:
    return None if text is None else Grammar(kind, text, name)


def _choices(name: str, choices: list[str] | None) -> Grammar | None:
    if choices is None:
        return None
    if not choices:
        raise InvalidRequest(f"{name} must not be empty", param=name)
    return Grammar("choices", tuple(choices), name)
