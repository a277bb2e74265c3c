"""Tools of a request: what is checked, and the grammars that hold outputs to them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.common.errors import InvalidRequest, Unsupported
from services.gateway.domain import Grammar, ToolFormat
from services.gateway.openai.tools.grammar import MAX_CALLS, tool_grammar
from services.gateway.openai.tools.use import MAX_TOOLS, Tool, ToolUse, tool_use


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [function("f"), function("g", strict=True, parameters={"type": "object"})]


def test_choices() -> None:
    assert tool_use(None, None, None) == ToolUse()
    assert tool_use([], "auto", None) == ToolUse()
    assert tool_use(TOOLS, "none", None) == ToolUse()
    auto = tool_use(TOOLS, None, None)
    assert auto == tool_use(TOOLS, "auto", True)
    assert (set(auto.names), auto.required, auto.parallel) == ({"f", "g"}, False, True)
    assert [tool.strict for tool in auto.tools] == [False, True]
    assert not tool_use(TOOLS, "auto", False).parallel
    required = tool_use(TOOLS, "required", None)
    assert (set(required.names), required.required, required.parallel) == ({"f", "g"}, True, True)
    one = tool_use(TOOLS, named("g"), True)
    assert (set(one.names), one.required, one.parallel) == ({"g"}, True, False)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_among_some(mode: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named("f")]}}
    use = tool_use(TOOLS, choice, None)
    assert (set(use.names), use.required) == ({"f"}, mode == "required")


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([function("")], None, "tools[0].function.name"),
        ([function("x" * 257)], None, "tools[0].function.name"),
        ([function("f", parameters=[])], None, "tools[0].function.parameters"),
        ([function("f", strict="yes")], None, "tools[0].function.strict"),
        ([function("f"), function("f")], None, "tools"),
        ([function(f"f{i}") for i in range(MAX_TOOLS + 1)], None, "tools"),
        (None, "required", "tool_choice"),
        ([], named("f"), "tool_choice"),
        (TOOLS, "always", "tool_choice"),
        (TOOLS, 1, "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice.function.name"),
        (TOOLS, named("h"), "tool_choice"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tool_use(tools, choice, None)
    assert caught.value.param == param


def test_other_kinds_of_tools_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="'custom'") as caught:
        tool_use([function("f"), {"type": "custom"}], None, None)
    assert caught.value.param == "tools[1].type"


BYTES = LLTokenizer("byte")
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
F, G = Tool("f", A), Tool('g"é', {"type": "object", "properties": {}})
HERMES_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HERMES_G = '<tool_call>\n{"name": "g\\"é", "arguments": {}}\n</tool_call>'
LLAMA_F = '{"name": "f", "parameters": {"a": 1}}'


def accepts(grammar: Grammar | None, text: str) -> bool:
    """Whether a text may be the whole output."""
    assert grammar is not None
    assert grammar.kind == "lark"
    assert isinstance(grammar.value, str)
    matcher = LLMatcher(BYTES, grammar.value)
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(BYTES.tokenize_str(text))
    return bool(taken == len(text.encode()) and matcher.is_accepting())


def test_required_is_nothing_but_calls() -> None:
    grammar = tool_grammar(ToolUse((F, G), required=True), "hermes", None)
    assert accepts(grammar, HERMES_F)
    assert accepts(grammar, "\n".join([HERMES_F, HERMES_G] * (MAX_CALLS // 2)))
    assert not accepts(grammar, "\n".join([HERMES_F] * (MAX_CALLS + 1)))
    for text in ("", "Hello", f"Hello {HERMES_F}", f"{HERMES_F}.", HERMES_F[:-1]):
        assert not accepts(grammar, text)
    assert not accepts(grammar, HERMES_F.replace("1", '"1"'))
    assert not accepts(grammar, HERMES_F.replace("1", '1, "more": 2'))
    assert not accepts(grammar, HERMES_F.replace('"f"', '"h"'))


@pytest.mark.parametrize("format", ["llama3_json", "none"])
def test_required_in_the_other_formats(format: ToolFormat) -> None:
    grammar = tool_grammar(ToolUse((F, G), required=True), format, None)
    assert accepts(grammar, LLAMA_F)
    assert accepts(grammar, f"{LLAMA_F}; {LLAMA_F}")
    assert not accepts(grammar, "")


def test_one_call_where_they_may_not_be_parallel() -> None:
    grammar = tool_grammar(ToolUse((F,), required=True, parallel=False), "hermes", None)
    assert accepts(grammar, HERMES_F)
    assert not accepts(grammar, f"{HERMES_F}\n{HERMES_F}")


def test_auto_is_free_but_for_strict_tools() -> None:
    assert tool_grammar(ToolUse((F, G)), "hermes", None) is None
    strict = ToolUse((Tool("f", A, strict=True), G))
    assert tool_grammar(strict, "none", None) is None
    grammar = tool_grammar(strict, "hermes", None)
    for text in ("", "Hello <b>", HERMES_F, f"Hm. {HERMES_F}\n{HERMES_G} Done."):
        assert accepts(grammar, text)
    assert not accepts(grammar, HERMES_F.replace("1", "x"))
    grammar = tool_grammar(strict, "llama3_json", None)
    for text in ("", "Hello {", LLAMA_F):
        assert accepts(grammar, text)
    assert not accepts(grammar, LLAMA_F.replace("1", "x"))


def test_auto_makes_one_call_at_most_where_they_may_not_be_parallel() -> None:
    for format, text in (("hermes", HERMES_F), ("llama3_json", LLAMA_F)):
        grammar = tool_grammar(ToolUse((F,), parallel=False), format, None)  # type: ignore[arg-type]
        assert accepts(grammar, text)
        assert accepts(grammar, "Hello")
    grammar = tool_grammar(ToolUse((F,), parallel=False), "llama3_json", None)
    assert not accepts(grammar, f"{LLAMA_F}; {LLAMA_F}")


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (Grammar("json_schema", json.dumps(A)), '{"a": 5}'),
        (Grammar("regex", "a/b\\/[c-d]+"), "a/b/cd"),
        (Grammar("choices", ('"x"', "y")), '"x"'),
    ],
)
def test_auto_with_a_grammar_for_the_text(text: Grammar, good: str) -> None:
    grammar = tool_grammar(ToolUse((F,)), "hermes", text)
    assert accepts(grammar, good)
    assert accepts(grammar, HERMES_F)
    assert not accepts(grammar, "Hello")
    assert tool_grammar(ToolUse(), "hermes", text) is text
    required = tool_grammar(ToolUse((F,), required=True), "hermes", text)
    assert not accepts(required, good)


def test_a_grammar_that_cannot_be_joined_is_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        tool_grammar(ToolUse((F,)), "hermes", Grammar("lark", "start: /a/", param="guided_grammar"))
    assert caught.value.param == "guided_grammar"


def test_schemas_are_closed_where_they_do_not_say() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "string"}}}
    schema = {
        "properties": {"x": {"type": "array", "items": inner}, "y": {"anyOf": [inner, True]}},
        "$defs": {"z": {**inner, "additionalProperties": {"type": "integer"}}},
    }
    grammar = tool_grammar(ToolUse((Tool("f", schema),), required=True), "hermes", None)
    head = '<tool_call>\n{"name": "f", "arguments": '
    assert accepts(grammar, head + '{"x": [{"b": ""}], "y": {"b": ""}}}\n</tool_call>')
    assert not accepts(grammar, head + '{"x": [{"c": 1}]}}\n</tool_call>')
    assert not accepts(grammar, head + '{"z": 1}}\n</tool_call>')
