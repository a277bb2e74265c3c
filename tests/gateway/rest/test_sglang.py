"""POST /generate as clients of SGLang call it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.common.errors import ContextLengthExceeded, PeerLost
from services.gateway.domain import Chunk, Grammar, TextPrompt, TokenLogprobs, TokenPrompt
from tests.gateway.rest.fake import FakeGateway, words
from tests.gateway.rest.helpers import error_of, events

PATH = "/generate"


async def test_a_text_in_and_an_object_out(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    options = {
        "max_new_tokens": 4,
        "min_new_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "sampling_seed": 7,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 1},
        "stop": "END",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "regex": "a+",
        "n": 1,
        "spaces_between_special_tokens": True,
    }
    body = {"text": "hi", "sampling_params": options, "rid": "mine", "priority": 3}
    answer = (await client.post(PATH, json=body)).json()
    assert answer == {
        "text": "Hello world0",
        "output_ids": [100, 101],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "stop", "matched": None},
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "cached_tokens": 1,
        },
    }
    (request,) = gateway.requests
    assert request.prompt == TextPrompt("hi")
    assert request.priority == 3
    assert request.text.stop == ("END",)
    assert (request.text.include_stop_str_in_output, request.text.skip_special_tokens) == (
        True,
        False,
    )
    given = request.sampling
    assert (given.max_tokens, given.min_tokens, given.temperature) == (4, 2, 0)
    assert (given.top_p, given.top_k, given.min_p, given.seed) == (0.5, -1, 0.1, 7)
    assert (given.frequency_penalty, given.presence_penalty) == (0.1, 0.2)
    assert (given.repetition_penalty, given.logit_bias) == (1.5, {5: 1.0})
    assert (given.stop_token_ids, given.ignore_eos, given.logprobs) == ((3,), True, None)
    assert given.grammar == Grammar("regex", "a+", "sampling_params.regex")


@pytest.mark.parametrize(
    ("params", "max_tokens"),
    [
        ({}, 128),
        ({"sampling_params": {}}, 128),
        ({"sampling_params": {"max_new_tokens": None}}, None),
    ],
)
async def test_the_defaults_are_sglangs(
    client: httpx.AsyncClient, gateway: FakeGateway, params: dict[str, Any], max_tokens: int | None
) -> None:
    response = await client.post(PATH, json={"input_ids": [5, 6], "prompt": None, **params})
    assert response.headers["content-type"] == "application/json"
    assert response.json()["meta_info"]["id"] == response.headers["x-request-id"]
    (request,) = gateway.requests
    assert request.prompt == TokenPrompt((5, 6))
    assert (request.sampling.max_tokens, request.sampling.temperature) == (max_tokens, 1.0)


async def test_each_event_has_the_text_so_far(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.script = lambda request: words("one", " two\u2028", "", " three", finish="length")
    stream = events(await client.post(PATH, json={"text": "hi", "stream": True}))
    assert [event["text"] for event in stream] == ["one", "one two\u2028", "one two\u2028 three"]
    assert [event.get("output_ids") for event in stream] == [None, None, [100, 101, 102, 103]]
    reasons = [event["meta_info"]["finish_reason"] for event in stream]
    assert reasons == [None, None, {"type": "length", "length": 4}]
    assert [event["meta_info"]["completion_tokens"] for event in stream] == [1, 2, 4]


async def test_what_matched_is_told(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: [
        Chunk(0, "a", [1], finish_reason="stop", stop_reason="END"),
    ]
    answer = (await client.post(PATH, json={"text": "hi"})).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}


async def test_logprobs(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    scores = [TokenLogprobs(id, -id / 8, ((id, -id / 8), (9, -4.0))) for id in (1, 2)]
    gateway.script = lambda request: [
        Chunk(0, "a", [1], scores[:1]),
        Chunk(0, "b", [2], scores[1:], finish_reason="stop"),
    ]
    body = {"text": "hi", "return_logprob": True, "logprob_start_len": -1}
    for top in (0, 2):
        response = await client.post(PATH, json={**body, "top_logprobs_num": top})
        meta = response.json()["meta_info"]
        assert meta["output_token_logprobs"] == [[-0.125, 1, None], [-0.25, 2, None]]
        if top:
            assert meta["output_top_logprobs"] == [
                [[-0.125, 1, None], [-4.0, 9, None]],
                [[-0.25, 2, None], [-4.0, 9, None]],
            ]
        else:
            assert "output_top_logprobs" not in meta
        assert gateway.requests[-1].sampling.logprobs == top


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"sampling_params": {}, "prompt": "hi"}, "text"),
        ({"text": "hi", "input_ids": [1]}, "input_ids"),
        ({"text": "hi", "prompt": "ho"}, "prompt"),
        ({"text": "hi", "stream": True, "return_logprob": True}, "return_logprob"),
        ({"text": "hi", "rid": "x" * 257}, "rid"),
        ({"text": ["a", "b"]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"text": "hi", "image_data": "x.png"}, "image_data"),
        ({"text": "hi", "lora_path": "x"}, "lora_path"),
        ({"text": "hi", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "hi", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "hi", "timeout": -1}, "timeout"),
    ],
)
async def test_a_field_that_is_wrong_is_named(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    error = error_of(await client.post(PATH, json=body), 400)
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"stop_regex": "a"}, "stop_regex"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 1, "min_new_tokens": 2}, "min_new_tokens"),
        ({"max_new_tokens": "1"}, "max_new_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"sampling_seed": 2**70}, "sampling_seed"),
        ({"json_schema": "{"}, "json_schema"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ],
)
async def test_a_sampling_parameter_that_is_wrong_is_named(
    client: httpx.AsyncClient, options: dict[str, Any], param: str
) -> None:
    error = error_of(await client.post(PATH, json={"text": "a", "sampling_params": options}), 400)
    assert error["param"] == f"sampling_params.{param}"
    assert f"sampling_params.{param}" in error["message"]
    assert "_tokens" not in error["message"].replace("_new_tokens", "")


async def test_what_the_fleet_refuses_has_the_name_of_the_body(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.refusal = ContextLengthExceeded.of(10_000, 8192, param="prompt")
    assert error_of(await client.post(PATH, json={"text": "a"}), 400)["param"] == "text"


async def test_a_failure_ends_the_stream(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: [Chunk(0, "a", [1]), PeerLost("lost")]
    first, last = events(await client.post(PATH, json={"text": "hi", "stream": True}))
    assert first["text"] == "a"
    assert last["error"]["message"] == "lost"
