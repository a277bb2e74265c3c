"""Depth outside of text, whatever the pieces a body comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.json_depth import DepthGauge


def _measure(text: bytes, size: int) -> int:
    gauge = DepthGauge()
    for start in range(0, len(text), size):
        gauge.feed(text[start : start + size])
    return gauge.deepest


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1_000_000])
@pytest.mark.parametrize(
    ("text", "depth"),
    [
        (b"", 0),
        (b"1", 0),
        (b"[" * 8 + b"]" * 8, 8),
        (b"[]" * 1000, 1),
        (b'{"a":"' + b"[{" * 1000 + b'"}', 1),  # text is no nesting
        (b'{"a":"\\"' + b"[" * 1000 + b'\\\\"}', 1),
        (b'["' + b"a" * 10 + b'",[[["\\\\"]]],"]]"]', 4),
        (b"[" * 10_000, 10_000),
        (b"]" * 1000 + b"[[", 0),
        (b'"' + b'\\"[' * 1000, 0),  # a text without an end
    ],
)
def test_depth_outside_of_text(text: bytes, depth: int, size: int) -> None:
    assert _measure(text, size) == depth


_VALUES = st.recursive(
    st.text(alphabet='ab"\\[]{}\u00e9') | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('k"\\['), inner, max_size=3)
    ),
    max_leaves=20,
)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, list):
        return 0
    return 1 + max(map(_depth, value), default=0)


@given(_VALUES, st.integers(1, 20))
def test_it_is_that_of_the_value(value: Any, size: int) -> None:
    assert _measure(json.dumps(value, ensure_ascii=False).encode(), size) == _depth(value)
