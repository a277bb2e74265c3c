"""The first real chat: what the README shows, run for real."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.integration.served import ServedFleet

QUESTION = "What is the capital of France?"


@pytest.fixture
def client(fleet: ServedFleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="unused", max_retries=0)


def test_answer_is_paris(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 37
    assert answer.usage.completion_tokens == 8  # the seven tokens of the text and <|im_end|>
    assert answer.usage.total_tokens == 45


def test_streamed_answer_is_the_same(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == "The capital of France is Paris."
    assert sum(1 for piece in pieces if piece) > 1, "it was not streamed"
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in finishes if reason] == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (37, 8)


def test_second_time_comes_from_the_cache(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    for _ in range(2):
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert 0 < cached < 37
    assert answer.choices[0].message.content == "The capital of France is Paris."


def test_models_publishes_the_context(fleet: ServedFleet) -> None:
    (card,) = httpx.get(f"{fleet.url}/v1/models").json()["data"]
    assert card["id"] == "SmolLM2-135M-Instruct"
    assert card["max_model_len"] == 8192


def test_generate_is_framed_as_server_sent_events(fleet: ServedFleet) -> None:
    response = httpx.post(
        f"{fleet.url}/generate",
        json={"prompt": "1\n2\n3\n", "max_tokens": 8, "temperature": 0, "ignore_eos": True},
        timeout=60,
    )
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    for event in events[:-1]:
        assert all(line.startswith("data:") for line in event.split("\n"))


def test_seeded_draw_is_repeatable(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(
            model="", prompt="Once upon a time", max_tokens=16, temperature=1.0, seed=42
        )
        .choices[0]
        .text
        for _ in range(3)
    }
    assert len(texts) == 1
