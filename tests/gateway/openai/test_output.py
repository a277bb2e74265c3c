"""A model's text taken apart: whole and in any pieces, the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.domain import Dialect, ReasoningState
from services.gateway.openai.output.json_end import JsonEnd
from services.gateway.openai.output.parser import OutputPlan
from services.gateway.openai.output.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
)
from services.gateway.openai.output.tool_calls import (
    HERMES,
    LLAMA3_JSON,
    MAX_FALSE_CALLS,
    Syntax,
    ToolCallParser,
)

F = '{"name": "f", "arguments": {"a": "}\\"<x>", "b": [1, {}]}}'
F_ARGUMENTS = '{"a": "}\\"<x>", "b": [1, {}]}'
G = '{"name":"g","parameters":{}}'


def joined(pieces: Sequence[Piece]) -> list[Any]:
    """Pieces with neighbours of a kind joined, and ids left out."""
    result: list[Any] = []
    for piece in pieces:
        match piece:
            case CallStart(index, _, name):
                result.append(["call", index, name, ""])
            case CallArguments(_, text):
                assert result[-1][0] == "call", "arguments follow their call's start"
                result[-1][3] += text
            case Content(text) | Reasoning(text):
                kind = "text" if isinstance(piece, Content) else "think"
                if result and result[-1][0] == kind:
                    result[-1][1] += text
                else:
                    result.append([kind, text])
    return result


def parsed(syntax: Syntax, pieces: Sequence[str]) -> list[Any]:
    ids = itertools.count()
    parser = ToolCallParser(syntax, {"f", "g"}, lambda: f"call_{next(ids)}")
    out = [piece for text in pieces for piece in parser.feed(text)]
    return joined([*out, *parser.finish()])


def call(index: int, name: str, arguments: str) -> list[Any]:
    return ["call", index, name, arguments]


HERMES_CASES = {
    "plain": ("Hello <there>", [["text", "Hello <there>"]]),
    "blanks-stay": (" a \n", [["text", " a \n"]]),
    "one": (f"<tool_call>\n{F}\n</tool_call>", [call(0, "f", F_ARGUMENTS)]),
    "blank-before": (f"\n\n<tool_call>{F}</tool_call>\n", [call(0, "f", F_ARGUMENTS)]),
    "two": (
        f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>",
        [call(0, "f", F_ARGUMENTS), call(1, "g", "{}")],
    ),
    "text-around": (
        f"Let me see.\n<tool_call>{F}</tool_call> Done. ",
        [["text", "Let me see."], call(0, "f", F_ARGUMENTS), ["text", " Done. "]],
    ),
    "unclosed": (f"<tool_call>{F}", [call(0, "f", F_ARGUMENTS)]),
    "outer-bracket-missing": (f"<tool_call>{F[:-1]}</tool_call>", [call(0, "f", F_ARGUMENTS)]),
    "inner-bracket-missing": (
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x',
        [call(0, "f", '{"a": 1'), ["text", "x"]],
    ),
    "more-keys": (
        f'<tool_call>{F[:-1]}, "id": {{"x": 1}}}}</tool_call>.',
        [call(0, "f", F_ARGUMENTS), ["text", "."]],
    ),
    "arguments-first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        [call(0, "f", '{"a": 1}')],
    ),
    "arguments-as-text": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [call(0, "f", '{"a": 1}')],
    ),
    "no-arguments": ('<tool_call>{"name": "g"}</tool_call>', [call(0, "g", "{}")]),
    "null-arguments": (
        '<tool_call>{"name": "g", "arguments": null}</tool_call>',
        [call(0, "g", "{}")],
    ),
    "cut-in-arguments": ('<tool_call>{"name": "f", "arguments": {"a', [call(0, "f", '{"a')]),
    # Only look like calls.
    "cut-in-mark": ("a <tool_ca", [["text", "a <tool_ca"]]),
    "cut-in-head": ('<tool_call>{"name": "f', [["text", '<tool_call>{"name": "f']]),
    "unknown-name": (
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        [["text", '<tool_call>{"name": "h", "arguments": {}}</tool_call>']],
    ),
    "no-json": (
        "Write <tool_call> like this",
        [["text", "Write <tool_call> like this"]],
    ),
    "no-object": ("<tool_call>[1]</tool_call>", [["text", "<tool_call>[1]</tool_call>"]]),
    "arguments-no-object": (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [["text", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>']],
    ),
    "mark-twice": (
        f"<tool_call> \n<tool_call>{F}</tool_call>",
        [["text", "<tool_call>"], call(0, "f", F_ARGUMENTS)],
    ),
    "false-then-true": (
        f'<tool_call>{{"a": 1}}</tool_call><tool_call>{G}</tool_call>',
        [["text", '<tool_call>{"a": 1}</tool_call>'], call(0, "g", "{}")],
    ),
    "bare-is-text": (F, [["text", F]]),
}
LLAMA_CASES = {
    "plain": ("Hello {there}", [["text", "Hello {there}"]]),
    "bare": (f"\n{G}", [call(0, "g", "{}")]),
    "tagged": (f"<|python_tag|>{F}", [call(0, "f", F_ARGUMENTS)]),
    "typed": (
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        [call(0, "f", '{"a": 1}')],
    ),
    "function-key": (
        '{"type": "function", "function": "f", "parameters": {"a": 1}}',
        [call(0, "f", '{"a": 1}')],
    ),
    "two": (f"{G}; {F}", [call(0, "g", "{}"), call(1, "f", F_ARGUMENTS)]),
    "two-lines": (f"{G}\n{F}\n", [call(0, "g", "{}"), call(1, "f", F_ARGUMENTS)]),
    "text-before-tag": (
        f"Wait. <|python_tag|>{G}",
        [["text", "Wait."], call(0, "g", "{}")],
    ),
    "text-after": (f"{G} done", [call(0, "g", "{}"), ["text", " done"]]),
    "separator-last": (f"{G};", [call(0, "g", "{}")]),
    "not-at-start": (f"See: {G}", [["text", f"See: {G}"]]),
    "other-json": ('{"name": "Ann", "age": 3}', [["text", '{"name": "Ann", "age": 3}']]),
    "broken-json": ('{"name" "f"', [["text", '{"name" "f"']]),
    "code": ("<|python_tag|>print(1)", [["text", "<|python_tag|>print(1)"]]),
    "blanks": (" \n", [["text", " \n"]]),
}


@pytest.mark.parametrize("name", HERMES_CASES)
def test_hermes(name: str) -> None:
    text, expected = HERMES_CASES[name]
    assert parsed(HERMES, [text]) == expected
    assert parsed(HERMES, list(text)) == expected


@pytest.mark.parametrize("name", LLAMA_CASES)
def test_llama3_json(name: str) -> None:
    text, expected = LLAMA_CASES[name]
    assert parsed(LLAMA3_JSON, [text]) == expected
    assert parsed(LLAMA3_JSON, list(text)) == expected


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>"),
        *(F, G, F[:20], F[20:], "{", "}", '"', "\\", ";", " ", "\n", "a", "<", "é"),
        *('{"name": "f", "arguments": ', '{"a": 1}', '"arguments": {}', ', "name": "g"}'),
    ]
)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    """A text of likely fragments, cut anywhere."""
    text = "".join(draw(st.lists(FRAGMENTS, max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


@given(cut_texts(), st.sampled_from([HERMES, LLAMA3_JSON]))
def test_cuts_make_no_difference(pieces: list[str], syntax: Syntax) -> None:
    assert parsed(syntax, pieces) == parsed(syntax, ["".join(pieces)])


@given(cut_texts(), st.sampled_from(["unknown", "open", "closed"]), st.booleans())
def test_cuts_make_no_difference_to_reasoning(
    pieces: list[str], state: ReasoningState, implied: bool
) -> None:
    def whole(texts: list[str]) -> list[Any]:
        dialect = Dialect("hermes", "deepseek_r1" if implied else "qwen3")
        parser = OutputPlan(dialect, frozenset({"f", "g"})).parser(state)
        out = [piece for text in texts for piece in parser.feed(text, ())]
        return joined([*out, *parser.finish()])

    assert whole(pieces) == whole(["".join(pieces)])


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
@pytest.mark.parametrize("false", ["<tool_call>{}", '<tool_call>{\\"'])
def test_an_output_full_of_false_marks_is_content_from_there_on(false: str, size: int) -> None:
    call_text = f"<tool_call>{F}</tool_call>"
    for number in (MAX_FALSE_CALLS - 1, MAX_FALSE_CALLS):
        text = number * false + call_text
        out = parsed(HERMES, [text[at : at + size] for at in range(0, len(text), size)])
        if number < MAX_FALSE_CALLS:
            assert out == [["text", number * false], call(0, "f", F_ARGUMENTS)]
        else:
            assert out == [["text", text]]


def test_arguments_go_out_as_they_come() -> None:
    parser = ToolCallParser(HERMES, {"f"}, lambda: "id")
    assert list(parser.feed('<tool_call>{"name": "f", "arguments"')) == []
    assert list(parser.feed(': {"a')) == [CallStart(0, "id", "f"), CallArguments(0, '{"a')]
    assert parser.in_call
    assert list(parser.feed('": 1')) == [CallArguments(0, '": 1')]
    assert list(parser.feed("}}")) == [CallArguments(0, "}")]
    assert not parser.in_call


def test_text_is_held_back_only_while_it_may_be_a_mark() -> None:
    parser = ToolCallParser(HERMES, {"f"}, lambda: "id")
    assert list(parser.feed("a <")) == [Content("a")]
    assert list(parser.feed("b")) == [Content(" <b")]


REASONING_CASES: dict[str, tuple[str, str, ReasoningState, list[Any]]] = {
    "qwen": ("qwen3", "<think>\nhm\n\nso\n</think>\n\nYes", "unknown", ["hm\n\nso", "Yes"]),
    "qwen-none": ("qwen3", "Yes <think>x</think>", "unknown", ["", "Yes <think>x</think>"]),
    "qwen-empty": ("qwen3", "<think>\n\n</think>\n\nYes", "unknown", ["", "Yes"]),
    "qwen-off": ("qwen3", "Yes", "closed", ["", "Yes"]),
    "qwen-open": ("qwen3", "hm\n</think>\nYes", "open", ["hm", "Yes"]),
    "qwen-open-again": ("qwen3", "<think>hm</think>Yes", "open", ["hm", "Yes"]),
    "qwen-cut": ("qwen3", "<think>\nhm \n", "unknown", ["hm", ""]),
    "qwen-cut-in-mark": ("qwen3", "<think>hm</thi", "unknown", ["hm</thi", ""]),
    "qwen-cut-in-opening": ("qwen3", "<thi", "unknown", ["", "<thi"]),
    "r1": ("deepseek_r1", "hm</think>Yes", "unknown", ["hm", "Yes"]),
    "r1-written": ("deepseek_r1", "<think>hm</think>Yes", "unknown", ["hm", "Yes"]),
    "r1-cut": ("deepseek_r1", "hm", "unknown", ["hm", ""]),
    "r1-off": ("deepseek_r1", "Yes", "closed", ["", "Yes"]),
}


@pytest.mark.parametrize("name", REASONING_CASES)
def test_reasoning(name: str) -> None:
    format, text, state, (think, said) = REASONING_CASES[name]
    for pieces in ([text], list(text)):
        plan = OutputPlan(Dialect("none", format))  # type: ignore[arg-type]  # a test's string
        parser = plan.parser(state)
        out = [piece for piece_text in pieces for piece in parser.feed(piece_text, ())]
        out += parser.finish()
        assert "".join(piece.text for piece in out if isinstance(piece, Reasoning)) == think
        assert "".join(piece.text for piece in out if isinstance(piece, Content)) == said


def test_reasoning_then_a_call() -> None:
    plan = OutputPlan(Dialect("hermes", "qwen3"), frozenset({"f"}))
    parser = plan.parser("unknown")
    text = f"<think>\nA <tool_call> it is.\n</think>\n\n<tool_call>\n{F}\n</tool_call>"
    pieces = [*parser.feed(text, ()), *parser.finish()]
    assert joined(pieces) == [["think", "A <tool_call> it is."], call(0, "f", F_ARGUMENTS)]
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"


def test_reasoning_tokens_are_counted_by_the_token_that_ends_it() -> None:
    plan = OutputPlan(Dialect("none", "qwen3", reasoning_end_id=9))
    whole, split, none, open = (plan.parser("unknown") for _ in range(4))
    whole.feed("<think>a b</think> c", [1, 2, 3, 9, 5])
    for text, ids in [("<think>", [1]), ("a", [2]), ("", []), (" b</th", [3]), ("ink>", [9])]:
        split.feed(text, ids)
    split.feed(" c", [5])
    none.feed("a", [1, 9])
    open.feed("<think>a b", [1, 2, 3])
    assert [p.reasoning_tokens for p in (whole, split, none, open)] == [4, 4, 0, 3]


def test_reasoning_tokens_by_share_where_the_mark_is_no_token() -> None:
    parser = OutputPlan(Dialect("none", "qwen3")).parser("unknown")
    parser.feed("<think>abc</think>123456789012345678", list(range(10)))
    assert parser.reasoning_tokens == 5


def test_a_grammar_leaves_no_room_for_reasoning() -> None:
    plan = OutputPlan(Dialect("none", "deepseek_r1"), constrained=True)
    assert list(plan.parser("open").feed("{}", ())) == [Content("{}")]


def test_when_text_needs_no_parser() -> None:
    names = frozenset({"f"})
    assert OutputPlan(Dialect("hermes")).plain
    assert OutputPlan(Dialect("none"), names).plain
    assert not OutputPlan(Dialect("hermes"), names).plain
    assert not OutputPlan(Dialect("none", "qwen3")).plain


@given(st.recursive(st.none() | st.text() | st.integers(), lambda x: st.lists(x), max_leaves=5))
def test_json_end(value: Any) -> None:
    text = json.dumps({"a": value, "b": {}}, ensure_ascii=False)
    assert JsonEnd().feed(text + "} rest") == len(text)
    scan = JsonEnd()
    assert [scan.feed(char) for char in text] == [1] * len(text)
    assert scan.ended
    assert not scan.broken
