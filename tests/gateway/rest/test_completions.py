"""/v1/completions: prompts of every form, echo, log-probabilities."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.common.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from services.gateway.domain import Chunk, GenerationRequest, TextPrompt, TokenLogprobs, TokenPrompt
from services.gateway.openai import completions
from services.gateway.openai.decode import Caller
from tests.gateway.rest.fake import FakeGateway, Step, words
from tests.gateway.rest.helpers import (
    COMPLETIONS,
    choices_of,
    completion_body,
    completion_text,
    error_of,
    events,
)


def by_prompt(request: GenerationRequest) -> list[Step]:
    """Text that tells prompt and choice."""
    prompt = request.prompt
    name = prompt.text if isinstance(prompt, TextPrompt) else "ids"
    return [
        step for index in range(request.n) for step in words(f"<{name}", f"{index}>", index=index)
    ]


async def test_plain_answer(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    answer = (await client.post(COMPLETIONS, json=completion_body())).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "Hello world0",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["total_tokens"] == 4
    assert gateway.requests[0].sampling.max_tokens == 16
    assert gateway.requests[0].prompt == TextPrompt("hi")


async def test_stream(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True}
    response = await client.post(
        COMPLETIONS, json=completion_body(stream=True, stream_options=options)
    )
    stream = events(response)
    assert {event["object"] for event in stream} == {"text_completion"}
    assert completion_text(stream) == "Hello world0"
    assert [choice["finish_reason"] for choice in choices_of(stream)] == [None, "stop"]
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"]["completion_tokens"] == 2
    assert all(event["usage"] is None for event in stream[:-1])


async def test_each_event_has_the_counts_so_far_when_asked(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = completion_body(stream=True, stream_options=options)
    stream = events(await client.post(COMPLETIONS, json=body))
    counts = [event["usage"]["completion_tokens"] for event in stream]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 2
    assert completion_text(stream) == "Hello world0"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1], [2, 3]], [TokenPrompt((1,)), TokenPrompt((2, 3))]),
    ],
)
async def test_prompt_forms(
    client: httpx.AsyncClient, gateway: FakeGateway, prompt: Any, expected: list[Any]
) -> None:
    answer = (await client.post(COMPLETIONS, json=completion_body(prompt=prompt))).json()
    assert [request.prompt for request in gateway.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))


async def test_prompts_times_n(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = by_prompt
    body = completion_body(prompt=["aa", "b"], n=2)
    plain = (await client.post(COMPLETIONS, json=body)).json()
    options = {"include_usage": True}
    stream = events(
        await client.post(COMPLETIONS, json={**body, "stream": True, "stream_options": options})
    )
    texts = ["<aa0>", "<aa1>", "<b0>", "<b1>"]
    assert [choice["text"] for choice in plain["choices"]] == texts
    assert [completion_text(stream, index) for index in range(4)] == texts
    for index in range(4):
        finishes = [choice["finish_reason"] for choice in choices_of(stream, index)]
        assert [reason for reason in finishes if reason] == ["stop"]
    assert stream[-1]["usage"] == plain["usage"]
    assert plain["usage"]["prompt_tokens"] == 3
    assert plain["usage"]["completion_tokens"] == 8
    assert all(generation.closed.is_set() for generation in gateway.generations)


@pytest.mark.parametrize("prompt", ["x", [1]])
async def test_too_many_prompts_are_counted_before_anything_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch, gateway: FakeGateway, prompt: Any
) -> None:
    def forbidden(*arguments: object) -> None:
        raise AssertionError("a request was made of a prompt")

    monkeypatch.setattr(completions, "generation_request", forbidden)
    monkeypatch.setattr(completions, "TextPrompt", forbidden)
    monkeypatch.setattr(completions, "TokenPrompt", forbidden)
    body = json.dumps(completion_body(prompt=[prompt] * 9)).encode()
    with pytest.raises(InvalidRequest, match="prompts times n must be at most 8"):
        await completions.parse_completion(body, Caller("id"), gateway, max_choices=8)


async def test_prompts_times_n_are_counted_before_they_are_checked(
    monkeypatch: pytest.MonkeyPatch, gateway: FakeGateway
) -> None:
    monkeypatch.setattr(completions, "generation_request", None)
    body = json.dumps(completion_body(prompt=["x", "y"], n=5)).encode()
    with pytest.raises(InvalidRequest, match="prompts times n must be at most 8"):
        await completions.parse_completion(body, Caller("id"), gateway, max_choices=8)


@pytest.mark.parametrize("prompt", ["hi", [ord("h"), ord("i")]])
async def test_echo(client: httpx.AsyncClient, prompt: Any) -> None:
    body = completion_body(prompt=prompt, echo=True)
    plain = (await client.post(COMPLETIONS, json=body)).json()
    stream = events(await client.post(COMPLETIONS, json={**body, "stream": True}))
    assert plain["choices"][0]["text"] == "hiHello world0"
    assert completion_text(stream) == "hiHello world0"


async def test_prompt_logprobs(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    h, i = ord("h"), ord("i")
    top = ((h, -1.0), (0xE9, -1.5), (i, -2.0))
    gateway.prompt_scores = [TokenLogprobs(h, 0.0), TokenLogprobs(i, -2.0, top)]
    body = completion_body(prompt_logprobs=1, echo=True, logprobs=2)
    choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert gateway.requests[0].sampling.prompt_logprobs == 2
    assert choice["prompt_logprobs"] == [
        None,
        {
            "105": {"logprob": -2.0, "rank": 3, "decoded_token": "i"},
            "104": {"logprob": -1.0, "rank": 1, "decoded_token": "h"},
        },
    ]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3  # two, and the chosen
    for fields in ({"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}):
        response = await client.post(COMPLETIONS, json=completion_body(**fields))
        assert error_of(response, 400)["param"] == "prompt_logprobs"


async def test_truncation(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    for given, kept in ((5, 5), (-1, 0), (None, None)):
        body = completion_body(truncate_prompt_tokens=given)
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        assert gateway.requests[-1].max_prompt_tokens == kept
    for given in (0, -2, 2**40):
        body = completion_body(truncate_prompt_tokens=given)
        error = error_of(await client.post(COMPLETIONS, json=body), 400)
        assert error["param"] == "truncate_prompt_tokens"


async def test_echo_of_the_prompt_alone(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: words("x", finish="length")
    body = completion_body(echo=True, max_tokens=0)
    plain = (await client.post(COMPLETIONS, json=body)).json()
    stream = events(await client.post(COMPLETIONS, json={**body, "stream": True}))
    assert gateway.requests[0].sampling.max_tokens == 1
    assert plain["choices"][0]["text"] == completion_text(stream) == "hi"
    assert plain["choices"][0]["finish_reason"] == "length"
    assert choices_of(stream)[-1]["finish_reason"] == "length"
    assert plain["usage"]["completion_tokens"] == 0


async def test_logprobs_with_echo(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    h, i, e1, e2 = ord("h"), ord("i"), 0xC3, 0xA9  # the last two are the bytes of é
    gateway.prompt_scores = [TokenLogprobs(h, 0.0), TokenLogprobs(i, -2.0, ((h, -1.0),))]
    gateway.script = lambda request: [
        Chunk(0, "", [e1], [TokenLogprobs(e1, -0.5, ((e1, -0.5),))]),
        Chunk(0, "é", [e2], [TokenLogprobs(e2, -0.25, ((e2, -0.25),))], "length"),
    ]
    body = completion_body(echo=True, logprobs=1)
    plain = (await client.post(COMPLETIONS, json=body)).json()
    assert gateway.requests[0].sampling.logprobs == 1
    assert gateway.requests[0].sampling.prompt_logprobs == 1
    expected = {
        "tokens": ["h", "i", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [None, -2.0, -0.5, -0.25],
        "top_logprobs": [
            None,
            {"h": -1.0, "i": -2.0},
            {"bytes:\\xc3": -0.5},
            {"bytes:\\xa9": -0.25},
        ],
        "text_offset": [0, 1, 2, 2],
    }
    assert plain["choices"][0]["logprobs"] == expected
    assert plain["choices"][0]["text"] == "hié"
    stream = events(await client.post(COMPLETIONS, json={**body, "stream": True}))
    pieces = [choice["logprobs"] for choice in choices_of(stream) if choice["logprobs"]]
    joined = {name: [item for piece in pieces for item in piece[name]] for name in expected}
    assert joined == expected
    assert completion_text(stream) == "hié"


async def test_token_ids_on_request(client: httpx.AsyncClient) -> None:
    body = completion_body(return_token_ids=True)
    (plain,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    stream = events(await client.post(COMPLETIONS, json={**body, "stream": True}))
    assert (plain["prompt_token_ids"], plain["token_ids"]) == ([104, 105], [100, 101])
    assert choices_of(stream)[0]["prompt_token_ids"] == [104, 105]
    assert [i for choice in choices_of(stream) for i in choice["token_ids"]] == [100, 101]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 128}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
    ],
)
async def test_bad_value_names_its_field(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(COMPLETIONS, json={**completion_body(), **fields})
    assert error_of(response, 400)["param"] == param


async def test_missing_prompt(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(COMPLETIONS, json={"model": "m"}), 400)
    assert (error["param"], error["message"]) == ("prompt", "prompt is required")


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_names_the_prompt(
    client: httpx.AsyncClient, gateway: FakeGateway, stream: bool
) -> None:
    gateway.refusal = ContextLengthExceeded.of(9000, 8192, param="prompt")
    response = await client.post(COMPLETIONS, json=completion_body(stream=stream))
    error = error_of(response, 400)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "9000" in error["message"]
    assert "8192" in error["message"]


async def test_one_refused_prompt_gives_up_the_others(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    start = gateway.start
    started = asyncio.Event()

    async def start_all_but_b(request: GenerationRequest) -> Any:
        if request.prompt == TextPrompt("b"):
            await started.wait()
            raise Overloaded("full", retry_after=2)
        generation = await start(request)
        started.set()
        return generation

    gateway.start = start_all_but_b  # type: ignore[method-assign]
    response = await client.post(COMPLETIONS, json=completion_body(prompt=["a", "b"]))
    error_of(response, 429)
    assert response.headers["retry-after"] == "2"
    assert gateway.generations[0].closed.is_set()


async def test_fault_of_one_prompt_ends_the_stream(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    def script(request: GenerationRequest) -> list[Step]:
        if request.prompt == TextPrompt("b"):
            return [Overloaded("gone")]
        return [asyncio.Event()]

    gateway.script = script
    body = completion_body(prompt=["a", "b"], stream=True)
    (event,) = events(await client.post(COMPLETIONS, json=body))
    assert event["error"]["message"] == "gone"
    assert all(generation.closed.is_set() for generation in gateway.generations)
