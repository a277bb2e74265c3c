"""Every range of the contract, at its edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from services.common.errors import InvalidRequest
from services.gateway.domain import (
    ChatPrompt,
    GenerationRequest,
    Message,
    Prompt,
    Sampling,
    TextOptions,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)
from services.gateway.validate import check_request, unsigned_seed

GOOD = GenerationRequest("id", "", TextPrompt("hi"))


def sampled(**fields: Any) -> GenerationRequest:
    return replace(GOOD, sampling=Sampling(**fields))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0.0, 2.0], [-0.1, 2.1, math.nan, math.inf]),
        ("top_p", [1e-30, 0.001, 1.0], [0.0, 1.1, -1.0, math.nan, 1e-300]),
        ("top_k", [-1, 0, 1, 10**6], [-2, 2**31]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("repetition_penalty", [0.1, 5.0, 1e30], [0.0, -1.0, math.inf, math.nan, 1e308, 1e-300]),
        ("seed", [0, 2**64 - 1, -(2**63)], [2**64, -(2**63) - 1, 10**40]),
        ("max_tokens", [1, 2**31 - 1, None], [0, -1, 10**40]),
        ("min_tokens", [0, 7], [-1, 10**40]),
        ("logprobs", [0, 20, None], [-1, 21]),
        ("prompt_logprobs", [0, 20, None], [-1, 21]),
        ("stop_token_ids", [(), (0, 5), (7,) * 256], [(-1,), (2**32,), (7,) * 257]),
        (
            "logit_bias",
            [{}, {5: 100.0, 6: -100.0}],
            [{-1: 1.0}, {5: 100.5}, {5: math.nan}, {2**32: 1.0}, dict.fromkeys(range(5000), 1.0)],
        ),
    ],
)
def test_sampling_range(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check_request(sampled(**{name: value}))
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            check_request(sampled(**{name: value}))
        assert caught.value.param == name
        assert name in caught.value.message


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", [1, 128], [0, 129, -1]),
        ("timeout", [None, 1e-300, 0.001, 3600.0, 4e6], [0.0, -1.0, math.nan, math.inf, 1e12]),
        ("priority", [-5, 0, 5], [2**31, -(2**31)]),
    ],
)
def test_request_range(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check_request(replace(GOOD, **{name: value}))
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            check_request(replace(GOOD, **{name: value}))
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(GOOD, timeout=1e12), "timeout must be a number above 0 and at most 4000000"),
        (sampled(top_p=2.0), "top_p must be a number above 0 and at most 1"),
        (sampled(top_p=1e-31), "top_p must be at least 1e-30"),
        (sampled(repetition_penalty=1e-31), "repetition_penalty must be at least 1e-30"),
    ],
)
def test_bounds_are_told_plainly(wrong: GenerationRequest, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(wrong)
    assert caught.value.message == message


def test_min_tokens_is_at_most_max_tokens() -> None:
    check_request(sampled(min_tokens=5, max_tokens=5))
    with pytest.raises(InvalidRequest) as caught:
        check_request(sampled(min_tokens=6, max_tokens=5))
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("stop", [("",), ("a", ""), ("x",) * 17, ("x" * 4097,)])
def test_bad_stop(stop: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(replace(GOOD, text=TextOptions(stop=stop)))
    assert caught.value.param == "stop"


@pytest.mark.parametrize("field", ["name", "tool_call_id", "id", "function.name"])
def test_labels_of_messages_are_short(field: str) -> None:
    def prompt(label: str) -> ChatPrompt:
        if field in ("name", "tool_call_id"):
            return ChatPrompt((replace(Message("user", "hi"), **{field: label}),))
        call = ToolCall(label, "f", "{}") if field == "id" else ToolCall("1", label, "{}")
        return ChatPrompt((Message("assistant", None, tool_calls=(call,)),))

    check_request(replace(GOOD, prompt=prompt("x" * 1024)))
    with pytest.raises(InvalidRequest) as caught:
        check_request(replace(GOOD, prompt=prompt("x" * 1025)))
    assert caught.value.param == "messages"
    assert field in caught.value.message


def test_good_stop() -> None:
    check_request(replace(GOOD, text=TextOptions(stop=("x" * 4096,) * 16)))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (ChatPrompt(()), "messages"),
        (TokenPrompt(()), "prompt"),
        (TokenPrompt((1, -1)), "prompt"),
        (TokenPrompt((2**32,)), "prompt"),
    ],
)
def test_bad_prompt(prompt: Prompt, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(replace(GOOD, prompt=prompt))
    assert caught.value.param == param


def test_seeds_keep_their_bits() -> None:
    assert unsigned_seed(42) == 42
    assert unsigned_seed(-1) == 2**64 - 1
    assert unsigned_seed(2**64 - 1) == 2**64 - 1
