"""From a body's fields to the grammar that its output must follow.

Three families of names say the same: OpenAI's `response_format`; vLLM's `guided_json`,
`guided_regex`, `guided_choice`, `guided_grammar` and `structured_outputs`; SGLang's
`regex`, `ebnf` and, in /generate, `json_schema`. One constraint may be given, by one of them.
Whether a grammar can be used is found by the worker, whose error names the field by
`Grammar.param`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from services.common.errors import InvalidRequest
from services.gateway.domain import Grammar
from services.gateway.openai.decode import object_json, refuse, unsupported
from services.gateway.openai.fields import REFUSED_IN_STRUCTURED_OUTPUTS
from services.gateway.openai.schema import (
    JsonSchema,
    OpenAIBody,
    ResponseFormat,
    SGLangSampling,
    StructuredOutputs,
)


def grammar_of(body: OpenAIBody) -> Grammar | None:
    """What a body's output must match; None if anything will do.

    Raises:
        InvalidRequest: for two constraints, or one without its value.
        Unsupported: for a form of constraint that is not built.
    """
    return _OF_BODY.grammar_of(body)


def sglang_grammar_of(options: SGLangSampling) -> Grammar | None:
    """The same of SGLang's `sampling_params`."""
    return _OF_SGLANG.grammar_of(options)


class _Constraints:
    """The fields of a struct that constrain the output, each with its reader, which takes the
    name that an error is to have and the field's value. `within` is what such a name begins
    with."""

    def __init__(
        self, readers: Mapping[str, Callable[[str, Any], Grammar | None]], within: str = ""
    ) -> None:
        self._readers = [(within + name, reader) for name, reader in readers.items()]
        self._values = attrgetter(*readers)
        self._none = (None,) * len(readers)

    def grammar_of(self, options: msgspec.Struct) -> Grammar | None:
        values = self._values(options)
        if values == self._none:  # as hardly any has one
            return None
        grammars = [
            grammar
            for (name, reader), value in zip(self._readers, values, strict=True)
            if value is not None and (grammar := reader(name, value)) is not None
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


def _response_format(name: str, format: ResponseFormat) -> Grammar | None:
    if format.type == "text":
        return None
    if format.type == "json_object":
        return _any_object(name, True)
    if format.type != "json_schema":
        raise unsupported(f"{name} of type {format.type!r}", param=name)
    if format.json_schema is None or format.json_schema.schema is None:
        raise InvalidRequest(f"{name}.json_schema.schema is required", param=name)
    return _json(name, format.json_schema.schema)


def _structured_outputs(name: str, options: StructuredOutputs) -> Grammar:
    refuse(options, REFUSED_IN_STRUCTURED_OUTPUTS, within=name)
    grammar = _OF_STRUCTURED_OUTPUTS.grammar_of(options)
    if grammar is None:
        raise InvalidRequest(f"{name} names no constraint", param=name)
    return grammar


def _any_object(name: str, wanted: bool) -> Grammar | None:
    return Grammar("json_schema", '{"type":"object"}', name) if wanted else None


def _json(name: str, schema: JsonSchema) -> Grammar:
    """A schema, or its text, as text."""
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


def _regex(name: str, text: str) -> Grammar:
    return Grammar("regex", text, name)


def _lark(name: str, text: str) -> Grammar:
    return Grammar("lark", text, name)


def _choices(name: str, choices: list[str]) -> Grammar:
    if not choices:
        raise InvalidRequest(f"{name} must not be empty", param=name)
    return Grammar("choices", tuple(choices), name)


# The one list of the fields that constrain; docs/structured-output.md is held to it.
_OF_BODY = _Constraints(
    {
        "response_format": _response_format,
        "guided_json": _json,
        "guided_regex": _regex,
        "guided_choice": _choices,
        "guided_grammar": _lark,
        "structured_outputs": _structured_outputs,
        "regex": _regex,
        "ebnf": _lark,
    }
)
_OF_STRUCTURED_OUTPUTS = _Constraints(
    {
        "json": _json,
        "regex": _regex,
        "choice": _choices,
        "grammar": _lark,
        "json_object": _any_object,
    },
    within="structured_outputs.",
)
_OF_SGLANG = _Constraints(
    {"json_schema": _json, "regex": _regex, "ebnf": _lark}, within="sampling_params."
)
