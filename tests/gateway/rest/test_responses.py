"""/v1/responses: items in, items and typed events out, as the official client reads them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from services.common.errors import ContextLengthExceeded, Overloaded, PeerLost
from services.gateway.domain import (
    ChatPrompt,
    Chunk,
    Dialect,
    Message,
    TokenLogprobs,
    ToolCall,
)
from tests.gateway.rest.fake import MODEL, FakeGateway, words
from tests.gateway.rest.helpers import error_of
from tests.gateway.rest.test_tool_calls import CALLS, in_pieces

RESPONSES = "/v1/responses"
TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"type": "function", "name": "clock"},
]
THINKS = Dialect("hermes", "qwen3", reasoning_end_id=102)
EVERYTHING = "<think>Hm.</think>" + CALLS


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **fields}


def typed_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole stream, each named by its type, and numbered."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block and block[0] != ":"]
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def without_ids(value: Any) -> Any:
    """A value less what differs between two answers."""
    if isinstance(value, dict):
        varying = ("id", "item_id", "call_id", "created_at", "completed_at")
        return {key: without_ids(item) for key, item in value.items() if key not in varying}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


async def test_plain_answer(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    response = await client.post(RESPONSES, json=body(metadata={"k": "v"}, instructions="Brief."))
    answer = response.json()
    assert response.status_code == 200, response.text
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert without_ids(item) == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": "Hello world0", "annotations": [], "logprobs": []}
        ],
    }
    assert answer["usage"] == {
        "input_tokens": 8,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }
    assert (answer["metadata"], answer["instructions"]) == ({"k": "v"}, "Brief.")
    assert answer["store"] is False
    prompt = gateway.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (Message("system", "Brief."), Message("user", "hi"))


async def test_events_of_a_text(client: httpx.AsyncClient) -> None:
    stream = typed_events(await client.post(RESPONSES, json=body(stream=True)))
    assert [event["type"].removeprefix("response.") for event in stream] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert stream[0]["response"]["status"] == "in_progress"
    assert stream[0]["response"]["output"] == []
    assert stream[2]["item"]["status"] == "in_progress"
    assert stream[2]["item"]["content"] == []
    assert stream[3]["part"]["text"] == ""
    assert "".join(event["delta"] for event in stream[4:6]) == stream[6]["text"] == "Hello world0"
    plain = (await client.post(RESPONSES, json=body())).json()
    assert without_ids(stream[-1]["response"]) == without_ids(plain)
    items = {event.get("item_id") for event in stream[3:8]}
    assert items == {stream[-1]["response"]["output"][0]["id"]}


@pytest.mark.parametrize("size", [1, 9, 1000])
async def test_reasoning_text_and_calls(
    client: httpx.AsyncClient, gateway: FakeGateway, size: int
) -> None:
    gateway.model_dialect = THINKS
    gateway.script = in_pieces(EVERYTHING, size)
    plain = (await client.post(RESPONSES, json=body(tools=TOOLS))).json()
    stream = typed_events(await client.post(RESPONSES, json=body(tools=TOOLS, stream=True)))
    output = plain["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert output[1]["content"][0]["text"] == "I look."
    assert (output[2]["name"], output[3]["name"]) == ("weather", "clock")
    assert json.loads(output[2]["arguments"]) == {"city": 'Köln "{'}
    assert len({item["id"] for item in output} | {item["call_id"] for item in output[2:]}) == 6
    assert without_ids(stream[-1]["response"]["output"]) == without_ids(output)
    for index, item in enumerate(stream[-1]["response"]["output"]):
        about = [event for event in stream if event.get("output_index") == index]
        assert about[0]["type"] == "response.output_item.added"
        assert about[-1] == {**about[-1], "type": "response.output_item.done", "item": item}
        deltas = "".join(event.get("delta", "") for event in about)
        done = next(event for event in about if event["type"].endswith(("text.done", "s.done")))
        assert deltas == done.get("text", done.get("arguments"))
        assert {event["item_id"] for event in about if "item_id" in event} == {item["id"]}


async def test_cut_at_the_limit_is_incomplete(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.script = lambda request: words("Hel", finish="length")
    plain = (await client.post(RESPONSES, json=body(max_output_tokens=1))).json()
    assert gateway.requests[0].sampling.max_tokens == 1
    assert plain["status"] == "incomplete"
    assert plain["incomplete_details"] == {"reason": "max_output_tokens"}
    assert plain["output"][0]["status"] == "incomplete"
    stream = typed_events(await client.post(RESPONSES, json=body(max_output_tokens=1, stream=True)))
    assert stream[-1]["type"] == "response.incomplete"
    assert without_ids(stream[-1]["response"]) == without_ids(plain)


async def test_empty_output_is_an_empty_message(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.script = lambda request: words("")
    plain = (await client.post(RESPONSES, json=body())).json()
    assert plain["output"][0]["content"][0]["text"] == ""
    stream = typed_events(await client.post(RESPONSES, json=body(stream=True)))
    assert without_ids(stream[-1]["response"]) == without_ids(plain)


async def test_failure_in_the_stream(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: [Chunk(0, "a", [1]), PeerLost("the worker was lost")]
    *_, error, failed = typed_events(await client.post(RESPONSES, json=body(stream=True)))
    assert (error["type"], error["message"]) == ("error", "the worker was lost")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {
        "code": "server_error",
        "message": "the worker was lost",
    }


async def test_logprobs(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: [
        Chunk(0, "a", [97], [TokenLogprobs(97, -1.0, ((97, -1.0),))]),
        Chunk(0, "b", [98], [TokenLogprobs(98, -2.0)], "stop"),
    ]
    fields = body(include=["message.output_text.logprobs"], top_logprobs=1)
    plain = (await client.post(RESPONSES, json=fields)).json()
    assert gateway.requests[0].sampling.logprobs == 1
    part = plain["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b"]
    stream = typed_events(await client.post(RESPONSES, json={**fields, "stream": True}))
    deltas = [event for event in stream if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert without_ids(stream[-1]["response"]["output"]) == without_ids(plain["output"])


async def test_items_become_messages(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    ]  # fmt: skip
    response = await client.post(RESPONSES, json=body(input=items))
    assert response.status_code == 200, response.text
    prompt = gateway.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (
        Message("developer", "d"),
        Message("user", "u"),
        Message(
            "assistant",
            "a",
            tool_calls=(ToolCall("c1", "f", "{}"), ToolCall("c2", "g", '{"x":1}')),
            reasoning_content="r",
        ),
        Message("tool", "1", tool_call_id="c1"),
        Message("tool", "2", tool_call_id="c2"),
        Message("assistant", None, tool_calls=(ToolCall("c3", "f", "{}"),), reasoning_content="s"),
    )


async def test_fields_arrive(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    response = await client.post(
        RESPONSES,
        json=body(
            temperature=0.5,
            top_p=0.5,
            seed=3,
            top_k=4,
            tools=TOOLS,
            tool_choice={"type": "function", "name": "clock"},
            reasoning={"effort": "low", "summary": "auto"},
            store=True,
            truncation="disabled",
            include=["reasoning.encrypted_content"],
            user="u",
        ),
    )
    assert response.status_code == 200, response.text
    request = gateway.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.5)
    assert (sampling.seed, sampling.top_k, sampling.max_tokens) == (3, 4, None)
    assert sampling.grammar is not None
    assert "weather" not in sampling.grammar.value
    assert isinstance(request.prompt, ChatPrompt)
    assert json.loads(request.prompt.template_kwargs_json) == {"reasoning_effort": "low"}
    shown = json.loads(request.prompt.tools_json)
    assert shown[1] == {"type": "function", "function": {"name": "clock"}}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [TOOLS[0]]}
    await client.post(RESPONSES, json=body(tools=TOOLS, tool_choice=choice))
    grammar = gateway.requests[1].sampling.grammar
    assert grammar is not None
    assert "clock" not in grammar.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        # Understood, and refused.
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
    ],
)
async def test_bad_fields_are_named(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = await client.post(RESPONSES, json=body(stream=stream, **fields))
        assert error_of(response, 400)["param"] == param


async def test_refusals_name_the_fields_of_this_endpoint(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.refusal = ContextLengthExceeded.of(9, 8, param="messages")
    assert error_of(await client.post(RESPONSES, json=body()), 400)["param"] == "input"


async def test_nothing_is_stored(client: httpx.AsyncClient) -> None:
    answer = (await client.post(RESPONSES, json=body(store=True))).json()
    path = f"{RESPONSES}/{answer['id']}"
    for response in (
        await client.get(path),
        await client.delete(path),
        await client.post(f"{path}/cancel"),
        await client.get(f"{path}/input_items"),
    ):
        error = error_of(response, 404)
        assert "keeps no responses" in error["message"]
        assert error["code"] == "not_found"


class Person(BaseModel):
    """What is to be parsed."""

    name: str


async def test_sdk_create_and_stream(sdk: openai.AsyncOpenAI, gateway: FakeGateway) -> None:
    gateway.model_dialect = THINKS
    gateway.script = in_pieces(EVERYTHING, 5)
    tools: Any = TOOLS
    answer = await sdk.responses.create(model=MODEL, input="hi", tools=tools)
    assert answer.output_text == "I look."
    assert [item.type for item in answer.output][2:] == ["function_call", "function_call"]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens >= 0
    async with sdk.responses.stream(model=MODEL, input="hi", tools=tools) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "I look."
    assert [item.type for item in final.output] == [item.type for item in answer.output]
    assert "response.reasoning_text.delta" in kinds
    assert "response.function_call_arguments.delta" in kinds
    raw = await sdk.responses.create(model=MODEL, input="hi", stream=True)
    assert [event.type async for event in raw][-1] == "response.completed"


async def test_sdk_parse(sdk: openai.AsyncOpenAI, gateway: FakeGateway) -> None:
    gateway.script = lambda request: words('{"na', 'me": "Ann"}')
    parsed = await sdk.responses.parse(model=MODEL, input="hi", text_format=Person)
    assert parsed.output_parsed == Person(name="Ann")
    gateway.script = in_pieces(
        '<tool_call>{"name": "Person", "arguments": {"name": "Bo"}}</tool_call>', 4
    )
    tool: Any = {"type": "function", **openai.pydantic_function_tool(Person)["function"]}
    called = await sdk.responses.parse(model=MODEL, input="hi", tools=[tool])
    (item,) = called.output
    assert item.type == "function_call"
    assert item.parsed_arguments == {"name": "Bo"}


async def test_sdk_errors(sdk: openai.AsyncOpenAI, gateway: FakeGateway) -> None:
    gateway.refusal = Overloaded("full", retry_after=1)
    with pytest.raises(openai.RateLimitError):
        await sdk.responses.create(model=MODEL, input="hi")
    gateway.refusal = None
    with pytest.raises(openai.NotFoundError, match="keeps no responses"):
        await sdk.responses.retrieve("resp_1")
    gateway.script = lambda request: [Chunk(0, "a", [1]), PeerLost("the worker was lost")]
    stream = await sdk.responses.create(model=MODEL, input="hi", stream=True)
    kinds = [event.type async for event in stream]
    assert kinds[-2:] == ["error", "response.failed"]
