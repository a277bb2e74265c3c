"""The grammar that holds an output to tool calls.

    required, named   nothing but calls, each of a tool and with arguments of its schema
    auto              text, and calls that are so; only where a tool is `strict`, calls may
                      not be parallel, or a grammar of the request's own holds the text

Calls are written as the model's own format has them, so that the same parser reads calls
that were forced and calls that were not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from services.common.errors import Unsupported
from services.common.json_grammar import inline_json
from services.gateway.domain import Grammar, ToolFormat
from services.gateway.openai.tools.use import Tool, ToolUse

_ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)
MAX_CALLS = 8  # of a forced output; a small model would go on for ever

# Schemas of objects are closed where they do not say: a model that may add properties
# of its own may add them for ever.
_SCHEMAS = ("items", "additionalProperties", "not")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "$defs", "definitions")


def tool_grammar(use: ToolUse, format: ToolFormat, text: Grammar | None) -> Grammar | None:
    """The grammar for an output, `text` being that of the request for its text.

    None if it may be anything. Raises Unsupported where the two cannot be joined.
    """
    if use.required:
        return _lark(["start: calls"], use, format)
    if not use.tools or format == "none":
        return text
    if text is not None:
        return _lark([f"start: calls | text\ntext: {_term(text)}"], use, format)
    if use.parallel and not any(tool.strict for tool in use.tools):
        return None
    if format == "llama3_json":
        return _lark(["start: calls | text\ntext: /([^{](?s:.*))?/"], use, format)
    more = "*" if use.parallel else "?"
    rules = [
        f"start: (head call){more} text",
        'head[suffix="<tool_call>"]: /(?s:.*)/',
        "text: /(?s:.*)/",
    ]
    return _lark(rules, use, format, opened=True)


def _term(grammar: Grammar) -> str:
    """A grammar as a term of another."""
    value = grammar.value
    if grammar.kind == "choices":
        return " | ".join(json.dumps(choice) for choice in value)
    assert isinstance(value, str), "only choices are several"
    if grammar.kind == "json_schema":
        return inline_json(json.loads(value))
    if grammar.kind == "regex":
        return "/" + _ESCAPED_OR_SLASH.sub(lambda m: "\\/" if m[0] == "/" else m[0], value) + "/"
    raise Unsupported("a grammar cannot be combined with tools", param=grammar.param)


def _lark(rules: list[str], use: ToolUse, format: ToolFormat, *, opened: bool = False) -> Grammar:
    separator = '"\\n"' if format == "hermes" else '"; "'
    more = f" ({separator} call){{0,{MAX_CALLS - 1}}}" if use.parallel else ""
    calls = [f"calls: call{more}", *_calls(use.tools, format, opened=opened)]
    # Only strings can hold a "::=", which would pass for a grammar of another kind.
    text = "\n".join([*rules, *calls]).replace("::=", "\\u003a:=")
    return Grammar("lark", text + "\n", param="tools")


def _calls(tools: tuple[Tool, ...], format: ToolFormat, *, opened: bool) -> list[str]:
    """A rule for each tool's call, and one for any of them.

    With `opened` the mark before a call is another rule's.
    """
    names = [f"call_{index}" for index in range(len(tools))]
    rules = [f"call: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        quoted = json.dumps(tool.name, ensure_ascii=False)
        if format == "hermes":
            before = f'{"" if opened else "<tool_call>"}\n{{"name": {quoted}, "arguments": '
            after = "}\n</tool_call>"
        else:
            before, after = f'{{"name": {quoted}, "parameters": ', "}"
        body = inline_json(_arguments_schema(tool))
        rules.append(f"{name}: {json.dumps(before)} {body} {json.dumps(after)}")
    return rules


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    """A tool's schema; arguments are always an object."""
    return {"type": "object", **_closed(tool.parameters)}


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects have the properties that they name, where it does not say."""
    result = dict(schema)
    for key in _SCHEMAS:
        if isinstance(result.get(key), dict):
            result[key] = _closed(result[key])
    for key in _SCHEMA_LISTS:
        if isinstance(result.get(key), list):
            result[key] = [
                _closed(item) if isinstance(item, dict) else item for item in result[key]
            ]
    for key in _SCHEMA_MAPS:
        if isinstance(result.get(key), dict):
            result[key] = {
                name: _closed(item) if isinstance(item, dict) else item
                for name, item in result[key].items()
            }
    if isinstance(result.get("properties"), dict) and "allOf" not in result:
        result.setdefault("additionalProperties", False)
    return result
