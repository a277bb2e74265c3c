"""/v1/chat/completions: fields in, objects and events out."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from services.gateway.domain import ChatPrompt, Chunk, Message, TokenLogprobs, ToolCall
from tests.gateway.rest.fake import MODEL, FakeGateway, words
from tests.gateway.rest.helpers import (
    CHAT,
    HI,
    chat_body,
    chat_text,
    choices_of,
    error_of,
    events,
)


async def test_plain_answer(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: words("a", "b", "c", finish="length")
    response = await client.post(CHAT, json=chat_body(max_tokens=3))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert abs(answer["created"] - time.time()) < 60
    assert answer["model"] == MODEL
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert gateway.generations[0].closed.is_set()


async def test_stream(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: words("Hel", "", "lo", "")
    response = await client.post(CHAT, json=chat_body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    stream = events(response)
    assert {event["object"] for event in stream} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in stream}) == 1
    choices = [event["choices"][0] for event in stream]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert gateway.generations[0].closed.is_set()


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
)
async def test_usage_exactly_when_asked(
    client: httpx.AsyncClient, options: dict[str, Any] | None, asked: bool
) -> None:
    plain = (await client.post(CHAT, json=chat_body())).json()
    stream = events(await client.post(CHAT, json=chat_body(stream=True, stream_options=options)))
    with_usage = [event for event in stream if event.get("usage")]
    assert with_usage == [event for event in stream if event["choices"] == []]
    assert len(with_usage) == asked
    if asked:
        assert stream[-1]["usage"] == plain["usage"]
        assert all(event["usage"] is None for event in stream[:-1])


async def test_each_event_has_the_counts_so_far_when_asked(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = events(await client.post(CHAT, json=chat_body(stream=True, stream_options=options)))
    counts = [event["usage"]["completion_tokens"] for event in stream]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 2
    assert {event["usage"]["prompt_tokens"] for event in stream} == {2}
    assert stream[-1]["choices"] == []


async def test_continuous_counts_alone_are_no_counts(client: httpx.AsyncClient) -> None:
    """As vLLM: they are more of `include_usage`, and nothing without it."""
    options = {"continuous_usage_stats": True}
    stream = events(await client.post(CHAT, json=chat_body(stream=True, stream_options=options)))
    assert not any("usage" in event for event in stream)


async def test_eos_at_once(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: words("")
    answer = (await client.post(CHAT, json=chat_body())).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 1
    stream = events(await client.post(CHAT, json=chat_body(stream=True)))
    assert chat_text(stream) == ""
    assert [choice["finish_reason"] for choice in choices_of(stream)] == [None, "stop"]


async def test_choices_keep_apart(client: httpx.AsyncClient) -> None:
    body = chat_body(n=3, seed=7)
    plain = (await client.post(CHAT, json=body)).json()
    options = {"include_usage": True}
    stream = events(
        await client.post(CHAT, json={**body, "stream": True, "stream_options": options})
    )
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2]
    for index in range(3):
        choices = choices_of(stream, index)
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in choice["delta"] for choice in choices) == 1
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "stop"
        assert chat_text(stream, index) == f"Hello world{index}"
        assert plain["choices"][index]["message"]["content"] == f"Hello world{index}"
    assert stream[-1]["usage"] == plain["usage"]
    assert plain["usage"]["completion_tokens"] == 6
    assert plain["usage"]["prompt_tokens"] == 2


async def test_awkward_text_arrives_unchanged(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    parts = [
        'quote " back \\ slash',
        "\n\r\n\t\x00\x1f",
        "é漢字😀",
        "\u2028\u2029\x85\x0b",
        "  end ",
    ]
    gateway.script = lambda request: words(*parts)
    plain = (await client.post(CHAT, json=chat_body())).json()
    response = await client.post(CHAT, json=chat_body(stream=True))
    assert plain["choices"][0]["message"]["content"] == "".join(parts)
    assert chat_text(events(response)) == "".join(parts)
    # Clients that split lines by Unicode's rules must see one line an event.
    assert all(line == "" or line.startswith("data: ") for line in response.text.splitlines())


async def test_stop_reason(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: [Chunk(0, "a", [1], None, "stop", "END")]
    plain = (await client.post(CHAT, json=chat_body())).json()
    stream = events(await client.post(CHAT, json=chat_body(stream=True)))
    assert plain["choices"][0]["stop_reason"] == "END"
    assert choices_of(stream)[-1]["stop_reason"] == "END"


async def test_logprobs(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    scores = [
        TokenLogprobs(0xE2, -0.5, ((0xE2, -0.5), (ord("é") + 1000, -float("inf")))),
        TokenLogprobs(ord("b"), -1.0, ((ord("a"), -0.25), (ord("b"), -1.0))),
    ]
    gateway.script = lambda request: [
        Chunk(0, "", [0xE2], scores[:1]),
        Chunk(0, "b", [98], scores[1:], "stop"),
    ]
    body = chat_body(logprobs=True, top_logprobs=2)
    plain = (await client.post(CHAT, json=body)).json()
    stream = events(await client.post(CHAT, json={**body, "stream": True}))
    content = plain["choices"][0]["logprobs"]["content"]
    assert gateway.requests[0].sampling.logprobs == 2
    assert [entry["token"] for entry in content] == ["bytes:\\xe2", "b"]
    assert [entry["bytes"] for entry in content] == [[0xE2], [98]]
    assert [entry["logprob"] for entry in content] == [-0.5, -1.0]
    assert [top["token"] for top in content[1]["top_logprobs"]] == ["a", "b"]
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    streamed = [
        entry
        for choice in choices_of(stream)
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content
    assert chat_text(stream) == "b"


async def test_logprobs_alone_reports_the_chosen(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.script = lambda request: [Chunk(0, "b", [98], [TokenLogprobs(98, -1.0)], "stop")]
    answer = (await client.post(CHAT, json=chat_body(logprobs=True))).json()
    assert gateway.requests[0].sampling.logprobs == 0
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_token_ids_on_request(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    body = chat_body(return_token_ids=True)
    plain = (await client.post(CHAT, json=body)).json()
    stream = events(await client.post(CHAT, json={**body, "stream": True}))
    assert plain["prompt_token_ids"] == [ord("h"), ord("i")]
    assert plain["choices"][0]["token_ids"] == [100, 101]
    assert stream[0]["prompt_token_ids"] == [ord("h"), ord("i")]
    ids = [i for choice in choices_of(stream) for i in choice.get("token_ids", [])]
    assert ids == [100, 101]


async def prompt_of(
    client: httpx.AsyncClient, gateway: FakeGateway, messages: list[Any], **fields: Any
) -> ChatPrompt:
    response = await client.post(CHAT, json=chat_body(messages=messages, **fields))
    assert response.status_code == 200, response.text
    prompt = gateway.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


async def test_content_forms(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    text = {"type": "text", "text": "one"}
    for content, joined in [("one", "one"), ([text], "one"), ([text, text], "one\none"), ("", "")]:
        prompt = await prompt_of(client, gateway, [{"role": "user", "content": content}])
        assert prompt.messages == (Message("user", joined),)


async def test_tool_turns(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    prompt = await prompt_of(
        client,
        gateway,
        [
            {"role": "developer", "content": "d", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "c1"},
        ],
    )
    assert prompt.messages == (
        Message("developer", "d", name="n"),
        Message("assistant", None, tool_calls=(ToolCall("c1", "f", '{"a":1}'),)),
        Message("tool", "4", tool_call_id="c1"),
    )


async def test_template_options(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    prompt = await prompt_of(client, gateway, HI)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (True, False)
    assert (prompt.tools_json, prompt.template_kwargs_json) == ("", "")
    prompt = await prompt_of(client, gateway, HI, continue_final_message=True)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
    prompt = await prompt_of(
        client,
        gateway,
        HI,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="none",
    )
    kwargs = json.loads(prompt.template_kwargs_json)
    assert kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert json.loads(prompt.tools_json)[0]["function"]["name"] == "f"


async def test_max_tokens(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 3.0}, 3),
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 50}, 5),
        ({"max_completion_tokens": 50, "max_tokens": 5}, 50),
    ]
    for fields, expected in cases:
        assert (await client.post(CHAT, json=chat_body(**fields))).status_code == 200
        assert gateway.requests[-1].sampling.max_tokens == expected


async def test_every_sampling_field_arrives(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    response = await client.post(
        CHAT,
        json=chat_body(
            temperature=0,
            top_p=0.5,
            top_k=7,
            min_p=0.1,
            seed=-1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={"5": 100, "6": -1.5},
            min_tokens=2,
            stop_token_ids=[9],
            ignore_eos=True,
            stop="END",
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            priority=3,
            cache_salt="s",
            timeout=2.5,
            n=2,
            user="u",
            metadata={"k": "v"},
            store=False,
            something_new={"a": [1]},
        ),
        headers={"x-request-id": "mine", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"},
    )
    assert response.status_code == 200, response.text
    request = gateway.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0,
        0.5,
        7,
        0.1,
    )
    assert sampling.seed == 2**64 - 1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == {5: 100, 6: -1.5}
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (2, (9,), True)
    assert request.text.stop == ("END",)
    assert request.text.include_stop_str_in_output
    assert not request.text.skip_special_tokens
    assert (request.priority, request.cache_salt, request.timeout, request.n) == (3, "s", 2.5, 2)
    assert request.request_id == "mine"
    assert request.traceparent.startswith("00-aaaa")


async def test_defaults(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    fields = dict.fromkeys(["temperature", "top_p", "n", "seed", "stop", "stream", "tools"])
    await client.post(CHAT, json=chat_body(**fields))
    request = gateway.requests[-1]
    assert request.sampling.temperature == 1
    assert request.sampling.seed is None
    assert request.text.stop == ()
    assert request.text.skip_special_tokens
    assert request.n == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"timeout": 0}, "timeout"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "banana", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}
                ]
            },
            "messages[0].tool_calls",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
async def test_bad_value_names_its_field(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = await client.post(CHAT, json={**chat_body(stream=stream), **fields})
        error = error_of(response, 400)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "invalid_value"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_unbuilt_field_is_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    error = error_of(await client.post(CHAT, json=chat_body(**fields)), 400)
    assert error["param"] == param
    assert error["code"] == "unsupported_parameter"


async def test_harmless_values_of_unbuilt_fields_pass(client: httpx.AsyncClient) -> None:
    body = chat_body(
        response_format={"type": "text"},
        tool_choice="none",
        tools=[],
        modalities=["text"],
        best_of=1,
        guided_json=None,
        functions=[],
        logit_bias={},
    )
    assert (await client.post(CHAT, json=body)).status_code == 200
