"""Whether a JSON schema has a finite document at all.

A schema that requires itself ({"a": {"$ref": "#"}} with "a" required) compiles, and a
model that follows it nests for ever. That is found here, so that it is an error and not
an output cut off by max_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.common.errors import InvalidRequest


def check_finite(schema: Any) -> None:
    """Raises InvalidRequest if every document that fits the schema would be infinite."""
    finite: set[str] = set()  # references whose target has a finite document
    references = list(dict.fromkeys(_references(schema)))
    num_before = -1
    while len(finite) > num_before:
        num_before = len(finite)
        references.reverse()  # so that chains are found in one pass, whichever way they run
        for reference in references:
            if _is_finite(_resolve(schema, reference), finite):
                finite.add(reference)
    if not _is_finite(schema, finite):
        raise InvalidRequest(
            "The grammar cannot be used: the schema requires itself, so no document ends.",
            param="grammar",
        )


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Whether a schema has a finite document, given the references known to have one.

    What other keywords forbid is the library's business: only nesting counts here.
    """
    if not isinstance(schema, dict):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and reference not in finite:
        return False
    if not all(_is_finite(part, finite) for part in _list(schema.get("allOf"))):
        return False
    for name in ("anyOf", "oneOf"):
        parts = _list(schema.get(name))
        if parts and not any(_is_finite(part, finite) for part in parts):
            return False
    return all(_is_finite(part, finite) for part in _required_parts(schema))


def _required_parts(schema: dict[str, Any]) -> Iterator[Any]:
    """Schemas of values that every object or array of this schema has."""
    types = schema.get("type")
    if types in ("object", ["object"]):
        properties = schema.get("properties")
        required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        if isinstance(properties, dict):
            yield from (properties[name] for name in required if name in properties)
    if types in ("array", ["array"]):
        count = schema.get("minItems", 0)
        before = _list(schema.get("prefixItems"))
        if isinstance(count, int):
            yield from before[:count]
            if count > len(before):
                yield schema.get("items", True)


def _references(schema: Any) -> Iterator[str]:
    """Every local reference anywhere in a schema."""
    stack = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            reference = item.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                yield reference
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def _resolve(schema: Any, reference: str) -> Any:
    """What a JSON pointer in a fragment leads to; True, which is no demand, if nothing."""
    target = schema
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or key not in target:
            return True
        target = target[key]
    return target


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
