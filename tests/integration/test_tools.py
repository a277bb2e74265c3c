"""Tools, schemas and responses by the official client, against the real fleet and model.

A model of 135M parameters calls no tool by itself: what holds here is the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.integration.served import ServedFleet

MODEL = "SmolLM2-135M-Instruct"
ASK: Any = [{"role": "user", "content": "Weather in Rome?"}]


class Weather(BaseModel):
    """Looks up the weather."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=7)


WEATHER: Any = openai.pydantic_function_tool(Weather)
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
TOOLS: Any = [WEATHER, CLOCK]
NAMED: Any = {"type": "function", "function": {"name": "Weather"}}


@pytest.fixture
def client(fleet: ServedFleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=300) as client:
        yield client


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_valid_and_streamed_the_same(client: openai.OpenAI, choice: Any) -> None:
    options: Any = {
        "model": MODEL,
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 100,
    }
    answer = client.chat.completions.create(**options).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.type == "function"
    assert call.function.name in ("Weather", "clock")
    if choice is NAMED:
        Weather.model_validate_json(call.function.arguments)
    name, arguments = "", ""
    ids = []
    for chunk in client.chat.completions.create(**options, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
            ids += [delta.id] if delta.id else []
        last = chunk.choices[0].finish_reason
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert len(ids) == 1
    assert ids != [call.id]
    assert last == "tool_calls"


def test_the_call_and_its_result_go_back_to_the_model(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=ASK,
        tools=[WEATHER],  # the SDK parses strict tools only
        tool_choice=NAMED,
        temperature=0,
        max_tokens=100,
    )
    assert parsed.choices[0].message.tool_calls is not None
    (call,) = parsed.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    history: Any = [
        *ASK,
        parsed.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=history, tools=[WEATHER], tool_choice="none", max_tokens=3
    )
    assert answer.usage is not None
    assert parsed.usage is not None
    assert answer.usage.prompt_tokens > parsed.usage.prompt_tokens


def test_responses(client: openai.OpenAI) -> None:
    flat: Any = {"type": "function", **WEATHER["function"]}
    options: Any = {
        "model": MODEL,
        "input": "Weather in Rome?",
        "tools": [flat],
        "tool_choice": {"type": "function", "name": "Weather"},
        "temperature": 0,
        "max_output_tokens": 100,
    }
    answer = client.responses.create(**options)
    assert answer.status == "completed"
    (item,) = answer.output
    assert item.type == "function_call"
    Weather.model_validate_json(item.arguments)
    with client.responses.stream(**options) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response().output[0]
    assert streamed.type == "function_call"
    assert streamed.arguments == item.arguments
    parsed = client.responses.parse(
        model=MODEL, input="Weather in Rome?", text_format=Weather, max_output_tokens=100
    )
    assert isinstance(parsed.output_parsed, Weather)


def test_a_schema_that_cannot_be_kept_is_refused(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "unevaluatedProperties": False}},
    }
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[tool], tool_choice="required", max_tokens=5
        )
    assert caught.value.param == "tools"


def test_the_tokenizer_shows_tools(fleet: ServedFleet) -> None:
    def text(**fields: Any) -> str:
        body = {"messages": ASK, **fields}
        tokens = httpx.post(f"{fleet.url}/tokenize", json=body, timeout=60).json()["tokens"]
        answer = httpx.post(f"{fleet.url}/detokenize", json={"tokens": tokens}, timeout=60)
        prompt: str = answer.json()["prompt"]
        return prompt

    shown = text(tools=TOOLS)
    assert json.dumps(CLOCK) in shown
    assert "<tool_call>" in shown
    assert "<tool_call>" not in text()


def test_openapi_is_served(fleet: ServedFleet) -> None:
    document = httpx.get(f"{fleet.url}/openapi.json", timeout=60).json()
    assert "/v1/responses" in document["paths"]
    assert "/v1/responses" in httpx.get(f"{fleet.url}/docs", timeout=60).text
