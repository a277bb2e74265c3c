"""The OpenAPI 3.1 document, made from the structs that bodies are decoded into.

A field that is refused appears with the values that are not; ranges, which the structs do
not know, come from `services.gateway.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services import __version__
from services.common.errors import STATUSES, ErrorCode
from services.gateway import validate
from services.gateway.docs.answers import ErrorEnvelope
from services.gateway.docs.operations import OPERATIONS, TEXT, Operation
from services.gateway.openai import fields

_REF = "#/components/schemas/{name}"
_REFUSED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    **{
        table.body.__name__: table.refused
        for table in (
            *(fields.CHAT, fields.TOKENIZE_CHAT, fields.COMPLETIONS, fields.RESPONSES),
            *(fields.SGLANG, fields.SGLANG_SAMPLING),
        )
    },
    "StructuredOutputs": fields.REFUSED_IN_STRUCTURED_OUTPUTS,
    "Message": {"audio": (), "function_call": ()},
}
_RANGES: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "n": {"minimum": 1, "maximum": validate.MAX_CHOICES},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "top_logprobs": {"minimum": 0, "maximum": validate.MAX_LOGPROBS},
    "timeout": {"exclusiveMinimum": 0, "maximum": validate.MAX_TIMEOUT_SECONDS},
    "stop": {"maxItems": validate.MAX_STOP_STRINGS},
    "stop_token_ids": {"maxItems": validate.MAX_STOP_TOKEN_IDS},
    "messages": {"minItems": 1},
}
_FAILURES: Mapping[str, tuple[ErrorCode, ...]] = {
    "generation": (
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.NOT_FOUND,
        ErrorCode.TOO_LARGE,
        ErrorCode.OVERLOADED,
        ErrorCode.INTERNAL,
        ErrorCode.UNAVAILABLE,
        ErrorCode.DEADLINE_EXCEEDED,
    ),
    "model": (
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.NOT_FOUND,
        ErrorCode.TOO_LARGE,
        ErrorCode.INTERNAL,
        ErrorCode.UNAVAILABLE,
    ),
    "operator": (ErrorCode.NOT_FOUND, ErrorCode.INTERNAL, ErrorCode.UNAVAILABLE),
    "probe": (ErrorCode.UNAVAILABLE,),
}


def openapi_document() -> dict[str, Any]:
    """The whole document."""
    structs = [
        struct
        for operation in OPERATIONS
        for struct in (*operation.body, *operation.answers, operation.event)
        if struct is not None and issubclass(struct, msgspec.Struct)
    ]
    _, schemas = msgspec.json.schema_components(
        [*dict.fromkeys(structs), ErrorEnvelope], ref_template=_REF
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shoal",
            "version": __version__,
            "description": "Large language models over the OpenAI API, and the tokenizer's"
            " endpoints in vLLM's shapes. Fields that a body does not list are ignored.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {name: _schema(name, schema) for name, schema in schemas.items()},
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, where the server asks for one.",
                }
            },
        },
        "security": [{"key": []}, {}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    result: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "tags": [operation.kind],
        "responses": _responses(operation),
    }
    if operation.description:
        result["description"] = operation.description
    if operation.kind == "probe":
        result["security"] = []
    if "{id}" in operation.path:
        result["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.body:
        result["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _any_of(operation.body)}},
        }
    return result


def _operation_id(operation: Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").replace(".", "/").split("/")
    return "_".join([operation.method, *filter(None, words)])


def _responses(operation: Operation) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    stored = operation.path == "/v1/responses/{id}"  # of which there is never one
    if not stored:
        responses["200"] = {"description": "Success", "content": _content(operation)}
    for code in _FAILURES[operation.kind]:
        status = STATUSES[code]
        responses[str(status.http)] = {
            "description": code.name.capitalize().replace("_", " "),
            "content": {"application/json": {"schema": _ref(ErrorEnvelope)}},
        }
    if operation.kind == "probe":
        responses["503"] = {"description": "Not ready", "content": {TEXT: {"schema": _TEXT}}}
    else:
        responses["401"] = {
            "description": "The API key is missing or wrong",
            "content": {"application/json": {"schema": _ref(ErrorEnvelope)}},
        }
    if operation.path == "/metrics":  # says so as text
        responses["404"] = {"description": "Elsewhere", "content": {TEXT: {"schema": _TEXT}}}
    if "429" in responses:
        responses["429"]["headers"] = {
            "Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer"}}
        }
    return dict(sorted(responses.items()))


_TEXT = {"type": "string"}


def _content(operation: Operation) -> dict[str, Any]:
    """The media types of a success."""
    content: dict[str, Any] = {}
    if operation.path == "/fleet/events":  # is never anything but a stream
        return {"text/event-stream": {}}
    if operation.answer is None:
        content["text/html" if operation.path == "/docs" else TEXT] = {"schema": _TEXT}
    elif operation.answer is dict:
        content["application/json"] = {"schema": {"type": "object"}}
    else:
        content["application/json"] = {"schema": _any_of(operation.answers)}
    if operation.event is not None:
        content["text/event-stream"] = {}  # 3.1 has no words for a stream's events
    return content


def _any_of(structs: Sequence[type]) -> dict[str, Any]:
    refs = [_ref(struct) for struct in structs]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _ref(struct: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}


def _schema(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A struct's schema with what msgspec cannot know."""
    result = dict(schema)
    result.pop("title", None)
    refused = _REFUSED.get(name, {})
    if "properties" in result:
        result["properties"] = {
            field: _refused(refused[field]) if field in refused else _field(field, property)
            for field, property in result["properties"].items()
        }
    return result


def _refused(harmless: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "description": "Not supported: any other value is refused.",
        "enum": [None, *harmless],
    }


def _field(name: str, property: Mapping[str, Any]) -> dict[str, Any]:
    """A field's schema: integers said to be so, its range, and no default of null."""
    result = dict(property)
    if result.get("default", ...) is None:
        del result["default"]
    kinds = result.get("anyOf", [])
    if {"type": "integer"} in kinds and {"type": "number"} in kinds:
        kinds = [kind for kind in kinds if kind != {"type": "number"}]
    ranges = _RANGES.get(name, {})
    if kinds:
        result["anyOf"] = [
            {**kind, **ranges} if kind.get("type") in ("integer", "number", "array") else kind
            for kind in kinds
        ]
        return result
    return {**result, **ranges}
