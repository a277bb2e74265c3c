"""Schemas whose documents never end are found, and no others."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.worker.grammar.finite import check_finite


def node(**more: Any) -> dict[str, Any]:
    """An object that requires a child of the kind of the root."""
    return {"type": "object", "properties": {"child": more or {"$ref": "#"}}, "required": ["child"]}


@pytest.mark.parametrize(
    "schema",
    [
        node(),
        node(type="array", items={"$ref": "#"}, minItems=1),
        node(anyOf=[{"$ref": "#"}, {"$ref": "#"}]),
        node(allOf=[{"$ref": "#"}, {}]),
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_requires_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="requires itself"):
        check_finite(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {**node(), "required": []},
        node(type="array", items={"$ref": "#"}),
        node(anyOf=[{"$ref": "#"}, {"type": "null"}]),
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},  # a number fits it too
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
        {"$ref": "https://elsewhere"},  # the library's business
    ],
)
def test_others_pass(schema: Any) -> None:
    check_finite(schema)


@pytest.mark.parametrize("step", [1, -1])
def test_long_chains_take_no_time(step: int) -> None:
    names = [f"d{i}" for i in range(3000)][::step]
    links = {name: node(**{"$ref": f"#/$defs/{following}"}) for name, following in pairwise(names)}
    schema = {"$ref": f"#/$defs/{names[0]}", "$defs": {**links, names[-1]: {"type": "null"}}}
    started = time.process_time()
    check_finite(schema)
    assert time.process_time() - started < 2
