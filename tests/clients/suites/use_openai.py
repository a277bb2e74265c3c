"""The official OpenAI package: everything that a program is likely to do with it."""

from __future__ import annotations

import json

import openai
from pydantic import BaseModel, Field
from steps import SCHEMA, arguments, passed, version

URL, MODEL = arguments()
HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}


class City(BaseModel):
    city: str = Field(max_length=20)
    people: int = Field(ge=0, le=99)


def chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, n=2, logprobs=True, top_logprobs=2, seed=1
    )
    assert len(answer.choices) == 2
    assert answer.usage.completion_tokens == sum(
        len(choice.logprobs.content) for choice in answer.choices
    )
    passed("chat, n, logprobs")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for c in chunks for choice in c.choices)
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == 8
    passed("streaming")


def completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One, two,", "A, b,"], max_tokens=4, echo=True, logprobs=1
    )
    assert answer.choices[0].text.startswith("One, two,")
    assert answer.choices[1].text.startswith("A, b,")
    passed("completions")


def tools(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "count"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=[TOOL],
            tool_choice=choice,
            max_tokens=200,
            parallel_tool_calls=False,
            temperature=0,
        )
        call, *_ = answer.choices[0].message.tool_calls
        assert call.function.name == "count"
        assert set(json.loads(call.function.arguments)) == {"city", "people"}
    assert answer.choices[0].finish_reason in ("tool_calls", "stop")
    with client.chat.completions.stream(
        model=MODEL,
        messages=HELLO,
        tools=[TOOL],
        tool_choice="required",
        max_tokens=200,
        parallel_tool_calls=False,
        temperature=0,
    ) as stream:
        final = stream.get_final_completion()
    call, *_ = final.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "people"}
    passed("tools")


def structured(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=City, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    passed("structured output with parse")


def responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=8)
    assert answer.output_text
    events = list(
        client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=8, stream=True)
    )
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    passed("responses")


def cancels(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    passed("cancel")


def errors(client: openai.OpenAI) -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
    except openai.BadRequestError as error:
        assert error.param == "temperature"
    else:
        raise AssertionError("no error")
    try:
        client.chat.completions.create(model="nope", messages=HELLO)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("no error")
    passed("errors")


version("openai")
with openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=600) as client:
    assert MODEL in [model.id for model in client.models.list()]
    passed("models")
    for step in (chats, completions, tools, structured, responses, cancels, errors):
        step(client)
