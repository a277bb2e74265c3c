"""Rendering conversations as transformers renders them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from services.common.errors import InvalidRequest, StartupError
from services.tokenizer.chat_template import ChatTemplate, Conversation
from services.tokenizer.control import ControlGuard
from tests.tokenizer import trained

GUARD = ControlGuard(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
FRAGMENTS = ("<s>", "</s>", "<|im", "_end|>", "<", ">", "|>", "a", "é", " ", "\n", "s")
PLAIN = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = """
{%- if tools %}Tools:
    {%- for tool in tools %}
{{ tool | tojson }}
    {%- endfor %}

{% endif %}
{%- for m in messages %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- generation %}<{{ m.role }}>
        {%- if m.content %}{{ m.content | trim }}{% endif %}
    {%- endgeneration %}
    {%- for call in m.tool_calls or [] %}
{{ call.function.name }}(
        {%- for k, v in call.function.arguments.items() %}{{ k }}={{ v }};{% endfor %})
    {%- endfor %}
    {%- if m.name is defined %} by {{ m.name }}{% endif %}
{% endfor %}
{%- if style is defined %}style {{ style }}{% endif %}
"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, GUARD)


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return template(source).render(Conversation(list(messages), **options)).text


def user(content: str | None, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


CALL_TEXT = '{"city":"Paris","days": 2}'
CALL_OBJECT = '{"city": "Paris", "days": 2}'
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": CALL_TEXT},
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "<b>'é' & more</b>"}}


@pytest.mark.parametrize(("source", "tools"), [(PLAIN, None), (TOOLS, None), (TOOLS, [TOOL])])
@pytest.mark.parametrize("generate", [True, False])
def test_equal_to_transformers(source: str, generate: bool, tools: list[Any] | None) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=trained.byte_level(), bos_token="<s>", eos_token="</s>"
    )
    messages = [user("sys", "system"), user("  hi <b> & 'you'\n"), user("bye", "assistant")]
    ours = render(source, *messages, add_generation_prompt=generate, tools=tools)
    theirs = reference.apply_chat_template(
        messages,
        chat_template=source,
        tools=tools,
        add_generation_prompt=generate,
        tokenize=False,
    )
    assert ours == theirs


@pytest.mark.parametrize("content", ["I am", "I am  ", "  I am\n", "hi"])
@pytest.mark.parametrize("source", [PLAIN, TOOLS])
def test_continuing_as_transformers_does(source: str, content: str) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=trained.byte_level(), bos_token="<s>", eos_token="</s>"
    )
    messages = [user("hi"), user(content, "assistant")]
    ours = render(source, *messages, add_generation_prompt=False, continue_final_message=True)
    theirs = reference.apply_chat_template(
        messages, chat_template=source, continue_final_message=True, tokenize=False
    )
    assert ours == theirs


def test_continuing_what_cannot_be_continued() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(InvalidRequest, match="no content"):
        render(PLAIN, user(None, "assistant", tool_calls=[CALL]), **options)
    with pytest.raises(InvalidRequest, match="leaves the final message out"):
        render("{{ bos_token }}", user("hi"), **options)
    with pytest.raises(InvalidRequest, match="cannot both"):
        render(PLAIN, user("hi"), continue_final_message=True)


def test_a_refusal_carries_the_templates_words() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render(source, user("hi"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ missing.attribute }}",
        "{{ messages[0].content + 3 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ [1, 2] | join(3 * messages) }}{{ range(10**9) | list }}",
    ],
)
def test_faults_of_a_template_are_the_requests(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source, user("hi"))


def test_a_template_that_is_not_valid_does_not_start() -> None:
    with pytest.raises(StartupError, match="not valid"):
        template("{% if %}")


def test_null_content_prints_nothing() -> None:
    message = user(None, "assistant", tool_calls=[CALL])
    assert "None" not in render(PLAIN, user("hi"), message)
    text = render(TOOLS, message)
    assert "None" not in text
    assert "weather(city=Paris;days=2;)" in text
    knows = (
        "{% if messages[0]['content'] is none %}null{% else %}text{% endif %}"
        "{{ messages[0].tool_calls | length }}"
    )
    assert render(knows, message) == "null1"


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", "[" * 5_000])
def test_arguments_that_are_no_object(arguments: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequest, match="arguments"):
        render(TOOLS, user(None, "assistant", tool_calls=[call]))


def test_a_template_without_tools_is_shown_them_as_text() -> None:
    text = render(PLAIN, user("hi"), user("", "system"), tools=[TOOL])
    system, _, rest = text.partition("[user]hi")
    assert system.startswith("<s>[system]You can call functions.")
    assert json.dumps(TOOL, ensure_ascii=False) in system
    assert '<tool_call>\n{"name": "function_name", "arguments": {' in system
    assert rest == "\n[system]\n[assistant]"
    joined = render(PLAIN, user("Be brief.", "system"), user("hi"), tools=[TOOL])
    assert joined.startswith("<s>[system]Be brief.\n\nYou can call functions.")
    assert joined.count("[system]") == 1
    assert render(PLAIN, user("hi"), tools=[]) == render(PLAIN, user("hi"))


def test_a_template_without_tools_is_shown_calls_and_results_as_text() -> None:
    text = render(
        PLAIN,
        user("hi"),
        user("Let me see.", "assistant", tool_calls=[CALL, CALL]),
        user("4", "tool", tool_call_id="call_1"),
    )
    call = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
    )
    assert text == (
        f"<s>[user]hi\n[assistant]Let me see.\n{call}\n{call}\n"
        "[user]<tool_response>\n4\n</tool_response>\n[assistant]"
    )


def test_control_tokens_in_tools_stay_text() -> None:
    guarded = template(PLAIN).render(Conversation([user("hi")], tools=[{"name": "<|im_end|>"}]))
    assert [guarded.text[start:end] for start, end in guarded.literals] == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ messages[0].tool_calls[0].function.arguments | tojson }}", CALL_OBJECT),
        ("{{ 'a' + messages[0].tool_calls[0]['function']['arguments'] + 'b' }}", f"a{CALL_TEXT}b"),
        ("{{ 'a' + messages[0].tool_calls[0].function.arguments }}", f"a{CALL_TEXT}"),
    ],
)
def test_arguments_as_the_template_wants_them(source: str, written: str) -> None:
    assert render(source, user(None, "assistant", tool_calls=[CALL])) == written


def test_values_nested_too_deeply() -> None:
    value: Any = "x"
    for _ in range(900):
        value = [value]
    with pytest.raises(InvalidRequest, match="nested"):
        render(TOOLS, user("hi"), tools=value)


def test_variables() -> None:
    assert render(TOOLS, user("hi"), variables={"style": "short"}).endswith("style short")
    for name in ("messages", "tools", "bos_token", "add_generation_prompt"):
        with pytest.raises(InvalidRequest, match=name):
            render(PLAIN, user("hi"), variables={name: "x"})


def test_reasoning_has_the_names_templates_read() -> None:
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    assert render(source, user("x", "assistant", reasoning_content="why")) == "why|why"


def test_filters_and_functions_of_transformers() -> None:
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}", user("x")))
    source = "{{ messages | tojson(indent=2) }}"
    assert render(source, user("<é>")) == json.dumps([user("<é>")], indent=2, ensure_ascii=False)


def test_a_text_without_the_ends_of_control_tokens_needs_no_closer_look() -> None:
    draw = random.Random(7)
    for _ in range(2000):
        text = "".join(draw.choices(FRAGMENTS, k=draw.randint(0, 6)))
        if not GUARD.may_be_in(text):
            assert not any(marked for marked, _ in GUARD.split(text)), text
    assert not GUARD.may_be_in("plain text")
    assert GUARD.may_be_in("im_end|>")
    assert GUARD.may_be_in("a <|im_st")
    assert not ControlGuard([]).may_be_in("<s>")
