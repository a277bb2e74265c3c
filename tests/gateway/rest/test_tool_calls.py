"""Tool calls and reasoning over REST: streamed, plain, several choices, and by the SDK."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from services.common.errors import DeadlineExceeded
from services.gateway.domain import (
    ChatPrompt,
    Chunk,
    Dialect,
    FinishReason,
    GenerationRequest,
    Grammar,
    TokenLogprobs,
)
from services.gateway.openai.chat import model_dialect
from tests.gateway.rest.fake import MODEL, FakeGateway, Step, words
from tests.gateway.rest.helpers import (
    CHAT,
    HI,
    chat_body,
    chat_text,
    choices_of,
    error_of,
    events,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln \\"{"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def in_pieces(
    text: str, size: int, index: int = 0, finish: FinishReason = "stop"
) -> Callable[[GenerationRequest], Sequence[Step]]:
    """A script: a text a few characters a chunk."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return lambda request: words(*pieces, "", index=index, finish=finish)


def calls_of(stream: list[Any], index: int = 0) -> list[dict[str, Any]]:
    """The tool calls that a stream's deltas add up to; id and name may come once only."""
    calls: list[dict[str, Any]] = []
    for choice in choices_of(stream, index):
        for delta in choice["delta"].get("tool_calls", []):
            if delta["index"] == len(calls):
                assert delta["type"] == "function"
                assert re.fullmatch(r"call_[0-9a-f]{24}", delta["id"])
                function = dict(delta["function"])
                assert isinstance(function["arguments"], str)
                calls.append({"id": delta["id"], "type": "function", "function": function})
                continue
            assert delta["index"] == len(calls) - 1
            assert set(delta) == {"index", "function"}
            assert set(delta["function"]) == {"arguments"}
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def functions(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call["function"] for call in calls]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_streamed_calls_equal_plain_ones(
    client: httpx.AsyncClient, gateway: FakeGateway, size: int
) -> None:
    gateway.script = in_pieces(CALLS, size)
    body = chat_body(tools=TOOLS)
    plain = (await client.post(CHAT, json=body)).json()["choices"][0]
    stream = events(await client.post(CHAT, json={**body, "stream": True}))
    message = plain["message"]
    assert message["content"] == chat_text(stream) == "I look."
    assert [function["name"] for function in functions(message["tool_calls"])] == [
        "weather",
        "clock",
    ]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": 'Köln "{'}
    assert functions(calls_of(stream)) == functions(message["tool_calls"])
    ids = [call["id"] for call in [*message["tool_calls"], *calls_of(stream)]]
    assert len(set(ids)) == 4
    assert plain["finish_reason"] == "tool_calls"
    choices = choices_of(stream)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "tool_calls"
    if size == 1:
        arguments = [
            call["function"]["arguments"]
            for choice in choices
            for call in choice["delta"].get("tool_calls", [])
        ]
        assert len(arguments) > 10  # in pieces


async def test_no_content_is_null_beside_calls(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.script = in_pieces("\n" + CALLS.removeprefix("I look."), 3)
    answer = (await client.post(CHAT, json=chat_body(tools=TOOLS))).json()
    assert answer["choices"][0]["message"]["content"] is None
    stream = events(await client.post(CHAT, json=chat_body(tools=TOOLS, stream=True)))
    assert chat_text(stream) == ""


async def test_what_only_looks_like_a_call_is_content(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    text = 'Write <tool_call>{"name": "other", "arguments": {}}</tool_call> or <tool_ca'
    gateway.script = in_pieces(text, 4)
    answer = (await client.post(CHAT, json=chat_body(tools=TOOLS))).json()
    stream = events(await client.post(CHAT, json=chat_body(tools=TOOLS, stream=True)))
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == chat_text(stream) == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == choices_of(stream)[-1]["finish_reason"] == "stop"


async def test_a_call_cut_by_the_limit_says_length(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.script = in_pieces(CALLS[:60], 5, finish="length")
    body = chat_body(tools=TOOLS)
    plain = (await client.post(CHAT, json=body)).json()["choices"][0]
    stream = events(await client.post(CHAT, json={**body, "stream": True}))
    assert plain["finish_reason"] == choices_of(stream)[-1]["finish_reason"] == "length"
    assert functions(plain["message"]["tool_calls"]) == functions(calls_of(stream))


async def test_each_choice_has_a_parser_of_its_own(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    texts = [CALLS, "No call.", CALLS.partition("\n")[2]]

    def script(request: GenerationRequest) -> list[Step]:
        each = [in_pieces(text, 5, index)(request) for index, text in enumerate(texts)]
        longest = max(map(len, each))
        return [steps[turn] for turn in range(longest) for steps in each if turn < len(steps)]

    gateway.script = script
    body = chat_body(tools=TOOLS, n=3)
    plain = (await client.post(CHAT, json=body)).json()["choices"]
    stream = events(await client.post(CHAT, json={**body, "stream": True}))
    ids = set()
    for index, choice in enumerate(plain):
        message = choice["message"]
        assert (message["content"] or "") == chat_text(stream, index)
        calls = message.get("tool_calls", [])
        assert functions(calls) == functions(calls_of(stream, index))
        assert choices_of(stream, index)[-1]["finish_reason"] == choice["finish_reason"]
        ids |= {call["id"] for call in [*calls, *calls_of(stream, index)]}
    assert [choice["finish_reason"] for choice in plain] == ["tool_calls", "stop", "tool_calls"]
    assert len(ids) == 8


async def test_logprobs_and_token_ids_go_with_the_pieces(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    pieces = ["Hi", "<tool_", 'call>{"name": "clock", "arg', 'uments": {', "}}", ""]
    gateway.script = lambda request: [
        Chunk(0, text, [65 + i], [TokenLogprobs(65 + i, -1.0)], "stop" if i == 5 else None)
        for i, text in enumerate(pieces)
    ]
    body = chat_body(tools=TOOLS, logprobs=True, return_token_ids=True)
    plain = (await client.post(CHAT, json=body)).json()["choices"][0]
    stream = events(await client.post(CHAT, json={**body, "stream": True}))
    scores = [
        entry
        for choice in choices_of(stream)
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert scores == plain["logprobs"]["content"]
    ids = [i for choice in choices_of(stream) for i in choice.get("token_ids", [])]
    assert ids == plain["token_ids"] == [65, 66, 67, 68, 69, 70]
    assert functions(calls_of(stream)) == [{"name": "clock", "arguments": "{}"}]


async def test_choices_of_tools_become_grammars(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    async def grammar(**fields: Any) -> Grammar | None:
        response = await client.post(CHAT, json=chat_body(tools=TOOLS, **fields))
        assert response.status_code == 200, response.text
        return gateway.requests[-1].sampling.grammar

    assert await grammar() is None
    assert await grammar(tool_choice="auto") is None
    assert await grammar(tool_choice="none") is None
    required = await grammar(tool_choice="required")
    assert required is not None
    assert required.param == "tools"
    assert "clock" in required.value
    named = await grammar(tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named is not None
    assert "clock" not in named.value
    assert await grammar(parallel_tool_calls=False) is not None
    prompt = gateway.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert json.loads(prompt.tools_json) == TOOLS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": WEATHER}])
async def test_a_forced_call_is_found_whatever_the_models_format(
    client: httpx.AsyncClient, gateway: FakeGateway, choice: Any
) -> None:
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": "weather"}}
    gateway.model_dialect = Dialect("none")
    gateway.script = in_pieces('{"name": "weather", "parameters": {"city": "Ulm"}}', 3)
    body = chat_body(tools=TOOLS, tool_choice=choice)
    plain = (await client.post(CHAT, json=body)).json()["choices"][0]
    stream = events(await client.post(CHAT, json={**body, "stream": True}))
    expected = [{"name": "weather", "arguments": '{"city": "Ulm"}'}]
    assert functions(plain["message"]["tool_calls"]) == functions(calls_of(stream)) == expected
    assert plain["finish_reason"] == choices_of(stream)[-1]["finish_reason"] == "tool_calls"


async def test_tool_choice_none_looks_for_no_calls(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.script = in_pieces(CALLS, 9)
    body = chat_body(tools=TOOLS, tool_choice="none")
    answer = (await client.post(CHAT, json=body)).json()["choices"][0]
    assert answer["message"]["content"] == CALLS
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": {}}, "tools"),
    ],
)
async def test_bad_tools_name_their_field(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = await client.post(CHAT, json=chat_body(stream=stream, **fields))
        assert error_of(response, 400)["param"] == param


THOUGHT = "<think>\nHm.\nSo be it.\n</think>\n\nYes."


@pytest.mark.parametrize("size", [1, 6, 1000])
async def test_reasoning_is_split_off(
    client: httpx.AsyncClient, gateway: FakeGateway, size: int
) -> None:
    gateway.model_dialect = Dialect("hermes", "qwen3")
    gateway.script = in_pieces(THOUGHT, size)
    body = chat_body(stream_options={"include_usage": True})
    plain = (await client.post(CHAT, json=body)).json()
    stream = events(await client.post(CHAT, json={**body, "stream": True}))
    message = plain["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.\nSo be it.", "Yes.")
    deltas = [choice["delta"] for choice in choices_of(stream)]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert (thought, chat_text(stream)) == ("Hm.\nSo be it.", "Yes.")
    assert stream[-1]["usage"] == plain["usage"]
    details = plain["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] <= plain["usage"]["completion_tokens"]


async def test_reasoning_that_the_prompt_opened_or_closed(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.model_dialect = Dialect("hermes", "qwen3", reasoning_end_id=102)
    gateway.script = lambda request: words("Hm", ".", "</think>", "\nYes", ".")
    gateway.reasoning = "open"
    answer = (await client.post(CHAT, json=chat_body())).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    gateway.reasoning = "closed"
    answer = (await client.post(CHAT, json=chat_body())).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "Hm.</think>\nYes.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_awkward_text_in_arguments_arrives_on_one_line(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    value = "\u2028 \x85 😀 \\n"
    arguments = json.dumps({"city": value}, ensure_ascii=False)
    text = f'\u2029<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    gateway.script = in_pieces(text, 4)
    response = await client.post(CHAT, json=chat_body(tools=TOOLS, stream=True))
    assert all(line == "" or line.startswith("data: ") for line in response.text.splitlines())
    (call,) = calls_of(events(response))
    assert json.loads(call["function"]["arguments"]) == {"city": value}


async def test_the_dialect_is_waited_for_no_longer_than_the_request_may_take(
    gateway: FakeGateway,
) -> None:
    async def never(model: str) -> Dialect:
        await asyncio.Event().wait()
        raise AssertionError

    gateway.dialect = never  # type: ignore[method-assign]
    request = GenerationRequest("id", "", ChatPrompt(()), timeout=0.01)
    with pytest.raises(DeadlineExceeded):
        await model_dialect(gateway, request)


class Weather(BaseModel):
    """What the tool takes."""

    city: str


async def test_sdk(sdk: openai.AsyncOpenAI, gateway: FakeGateway) -> None:
    gateway.model_dialect = Dialect("hermes", "qwen3")
    text = CALLS.replace("I look.", "<think>Hm.</think>").replace("clock", "Weather")
    text = text.replace("weather", "Weather").replace("{}", '{"city":""}')
    gateway.script = in_pieces(text, 5)
    tool = openai.pydantic_function_tool(Weather)
    messages: Any = HI
    parsed = await sdk.chat.completions.parse(model=MODEL, messages=messages, tools=[tool])
    calls = parsed.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [
        Weather(city='Köln "{'),
        Weather(city=""),
    ]
    assert parsed.choices[0].finish_reason == "tool_calls"
    grammar = gateway.requests[0].sampling.grammar  # the SDK's tools are strict
    assert grammar is not None
    async with sdk.chat.completions.stream(model=MODEL, messages=messages, tools=[tool]) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    streamed = final.choices[0].message.tool_calls
    assert streamed is not None
    assert [call.function.arguments for call in streamed] == [
        call.function.arguments for call in calls
    ]
