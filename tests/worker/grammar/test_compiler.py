"""Which ids each kind of grammar allows, and what is refused with which words."""

from __future__ import annotations

import json

import numpy as np
import pytest

from services.common.errors import InvalidRequest, Unsupported
from services.common.json_grammar import inline_json
from services.worker.core import Grammar, unpack_mask
from services.worker.grammar.compiler import LibraryMatcher, library_source
from services.worker.grammar.vocabulary import load_vocabulary
from tests.worker.grammar.grammars import EOS, byte_vocabulary, compile_grammar

SMOLLM2_EOS = 2


def allowed(matcher: LibraryMatcher, vocab_size: int = 259) -> list[int]:
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.fill(mask)
    ids: list[int] = np.flatnonzero(unpack_mask(mask, vocab_size)).tolist()
    return ids


def compiled(kind: str, value: str | tuple[str, ...]) -> LibraryMatcher:
    return compile_grammar(Grammar(kind, value), byte_vocabulary())  # type: ignore[arg-type]


def test_the_end_is_allowed_where_the_grammar_accepts_and_forced_where_nothing_may_follow() -> None:
    matcher = compiled("regex", "ab?")
    assert allowed(matcher) == [ord("a")]
    matcher.advance(ord("a"))
    assert allowed(matcher) == [ord("b"), EOS]
    matcher.advance(ord("b"))
    assert allowed(matcher) == [EOS]


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        (
            "choices",
            ('a"b', "c\\d", "\n", "é😀", "\0"),
            ['a"b', "c\\d", "\n", "é😀", "\0"],
            ["a", "d"],
        ),
        ("choices", ("", "x"), ["", "x"], ["y"]),
        ("regex", r"\d{2}-[a-z]+", ["12-ab"], ["1-ab", "12-"]),
        ("regex", r"a\\", ["a\\"], ["a"]),
        ("regex", "", [""], ["a"]),
        ("regex", "(?R)a", ["a"], ["R"]),  # a flag of Rust's, of how lines end
        ("lark", 'start: "<t>" WORD "</t>"\nWORD: /[a-z]+/', ["<t>ab</t>"], ["<t></t>", "ab"]),
        ("lark", f'start: "x" {inline_json({"type": "integer"})}', ["x12"], ["12"]),
        ("lark", 'root ::= "a" [0-9]+ b?\nb ::= "b" | "c"', ["a12b", "a1"], ["a", "a1d"]),
        ("json_schema", "true", ["[1, null]", '"x"'], ["[1"]),
        ("json_schema", '{"type": "object"}', ['{"a": {"b": []}}', "{}"], ["[]", "1"]),
        ("json_schema", '{"const": "é"}', ['"é"'], ['"e"']),
    ],
)
def test_each_kind_takes_its_texts_and_no_other(
    kind: str, value: str | tuple[str, ...], good: list[str], bad: list[str]
) -> None:
    for text in good:
        matcher = compiled(kind, value)
        assert matcher.accepts(list(text.encode()))
        assert EOS in allowed(matcher)
    for text in bad:
        matcher = compiled(kind, value)
        assert not matcher.accepts(list(text.encode())) or EOS not in allowed(matcher)


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        ('{\n  "a": 1,\n  "b": [\n    1,\n    2\n  ]\n}', True),
        ('{"a":  1', False),
        ("{\n\n", False),
        ("{\t", False),
        (" {", False),
        ("{\n" + 17 * " ", False),
    ],
)
def test_whitespace_is_that_of_common_writers_and_bounded(text: str, follows: bool) -> None:
    for matcher in (
        compiled("json_schema", '{"type": "object"}'),
        compiled("lark", f"start: {inline_json({'type': 'object'})}"),
    ):
        assert matcher.accepts(list(text.encode())) is follows


def test_a_schema_cannot_change_the_servers_options() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": r"\t+", "lenient": True}}
    assert not compiled("json_schema", json.dumps(schema)).accepts(list(b"{\t"))
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        compiled("json_schema", json.dumps({**schema, "type": "array", "uniqueItems": True}))


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "[a-z", "unclosed character class in the regular expression"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"[^\s\S]", "nothing can match it"),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("regex", "a\\", "ends inside an escape sequence"),
        ("regex", "\\\\\\", "ends inside an escape sequence"),
        ("json_schema", '{"not": {}}', 'the schema\'s keyword "not" is not supported.'),
        (
            "json_schema",
            '{"type": "array", "uniqueItems": true, "contains": {}, "not": {}}',
            'the schema\'s keywords "contains", "not" and "uniqueItems" are not supported.',
        ),
        (
            "json_schema",
            '{"oneOf": [{"type": "string"}, {"type": "string"}]}',
            "oneOf constraints are not supported.",
        ),
        ("json_schema", '{"minimum": 3, "maximum": 1, "type": "integer"}', "nsatisfiable"),
        ("json_schema", '{"type": "object", "required": ["a"], "properties": {"a": false}}', "'a'"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "does not exist"),
        ("json_schema", '{"$ref": "#"}', "requires itself"),
        ("json_schema", "[" * 100_000, "nested too deeply"),
        ("lark", "root ::= (a", "at line 1"),
        ("lark", 'a ::= "b"', "No 'root' rule"),
        ("lark", "root ::= " + "(" * 50_000, "nested too deeply"),
        ("json_schema", "{", "no JSON schema"),
        ("json_schema", "[]", "no JSON schema"),
        ("json_schema", "false", "no JSON schema"),
        ("lark", "start: nothing", "unknown name"),
        ("lark", "", "Empty grammar"),
        ("lark", "start: start", "nothing can match it"),
        ("lark", 'start: <nothing> "a"', "unknown special token"),
    ],
)
def test_a_bad_grammar_is_refused_in_one_sentence(kind: str, value: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiled(kind, value)
    message = caught.value.message
    assert message.startswith("The grammar cannot be used: ")
    assert words in message
    assert "\n" not in message
    assert caught.value.param == "grammar"


def test_empty_and_huge_grammars_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="nothing to choose from"):
        library_source(Grammar("choices", ()))
    with pytest.raises(InvalidRequest, match="200000 bytes"):
        library_source(Grammar("regex", "a" * 200_000))
    with pytest.raises(InvalidRequest, match="at most"):
        library_source(Grammar("choices", ("é" * 40_000, "b" * 60_000)))


def test_tokens_of_the_embedded_model_never_stand_for_their_bytes_in_text() -> None:
    """A JSON string cannot be ended by a control token, nor text that looks like one be one."""
    vocabulary = load_vocabulary("")
    string = compile_grammar(Grammar("json_schema", '{"type": "string"}'), vocabulary)
    assert string.accepts(vocabulary.tokenize_str('"a'))
    inside = allowed(string, vocabulary.vocab_size)
    assert len(inside) > 40_000
    assert not any(vocabulary.is_special_token(token) for token in inside)
    quoted = compile_grammar(Grammar("choices", ("<|im_end|>",)), vocabulary)
    ids = []
    while (following := allowed(quoted, vocabulary.vocab_size)) != [SMOLLM2_EOS]:
        ids.append(following[-1])
        quoted.advance(ids[-1])
    assert vocabulary.decode_bytes(ids) == b"<|im_end|>"
    assert not any(vocabulary.is_special_token(token) for token in ids)


def test_a_model_without_a_tokenizer_cannot_follow_grammars() -> None:
    with pytest.raises(Unsupported, match="no usable tokenizer"):
        load_vocabulary("/nowhere")


def test_copies_go_their_own_ways() -> None:
    first = compiled("regex", "ab|cd")
    second = first.copy()
    first.advance(ord("a"))
    second.advance(ord("c"))
    assert (allowed(first), allowed(second)) == ([ord("b")], [ord("d")])
    second.advance(ord("z"))
    with pytest.raises(InvalidRequest):
        allowed(second)
    assert first.exhausted
