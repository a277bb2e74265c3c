"""Every way to ask for a structured output leads to its grammar, and two at once to none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import InvalidRequest, Unsupported
from services.gateway.domain import Grammar
from services.gateway.openai.decode import decode
from services.gateway.openai.fields import COMPLETIONS
from services.gateway.openai.schema import CompletionBody
from services.gateway.openai.structured import grammar_of

DOCUMENT = Path(__file__).parents[3] / "docs" / "structured-output.md"
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"const": 10**30}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def grammar(**fields: Any) -> Grammar | None:
    return grammar_of(decode(json.dumps({"prompt": "", **fields}).encode(), CompletionBody))


def named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "kind", "value", "param"),
    [
        ({"response_format": named(SCHEMA)}, "json_schema", TEXT, "response_format"),
        ({"response_format": named({})}, "json_schema", "{}", "response_format"),
        ({"response_format": named(True)}, "json_schema", "{}", "response_format"),
        (
            {"response_format": {"type": "json_object"}},
            "json_schema",
            '{"type":"object"}',
            "response_format",
        ),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", TEXT, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choices", ("a", "b"), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"', "guided_grammar"),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"ebnf": 'root ::= "a"'}, "lark", 'root ::= "a"', "ebnf"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
            "json_schema",
            TEXT,
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "choices", ("a",), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "x"}}, "lark", "x", "structured_outputs.grammar"),
        (
            {"structured_outputs": {"json_object": True}},
            "json_schema",
            '{"type":"object"}',
            "structured_outputs.json_object",
        ),
    ],
)
def test_each_field_leads_to_its_grammar(
    fields: dict[str, Any], kind: str, value: object, param: str
) -> None:
    found = grammar(**fields)
    assert found is not None
    assert (found.kind, found.value, found.param) == (kind, value, param)
    others: dict[str, Any] = {"response_format": {"type": "text"}, "guided_json": None}
    assert grammar(**{**others, **fields}) == found


EXAMPLES: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "guided_json": {},
    "guided_choice": ["a"],
    "structured_outputs": {"regex": "a"},
}


def test_each_field_that_the_document_names_constrains_and_no_other() -> None:
    text = DOCUMENT.read_text().partition("| field | constraint |\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in text.splitlines()]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    named |= {name for row in rows for name in re.findall(r"`([a-z_]+)\.[a-z_]+`", row)}
    likely = re.compile("response_format|guided_|structured_outputs|regex$|ebnf$|json_schema")
    known = {name for name in CompletionBody.__struct_fields__ if likely.match(name)}
    assert named == known - COMPLETIONS.refused.keys()
    for name in named:
        assert grammar(**{name: EXAMPLES.get(name, "a")}) is not None, name


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None, "ebnf": None}]
)
def test_nothing_asked_for_is_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": named(False)}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": False}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(**fields)
    assert caught.value.param == param


def test_a_schema_nested_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"items": deep}
    for value in (deep, json.dumps(deep)):
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            grammar(guided_json=value)
    with pytest.raises(InvalidRequest):
        grammar(guided_json="[" * 10_000)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_forms_that_are_not_built_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as caught:
        grammar(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {}},
        {"response_format": "json"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        {"guided_choice": "a"},
        {"guided_choice": [1]},
        {"guided_regex": ["a"]},
        {"guided_json": []},
        {"structured_outputs": []},
        {"structured_outputs": {"choice": [None]}},
    ],
)
def test_wrong_types_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        grammar(**fields)
