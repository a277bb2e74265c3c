"""The official OpenAI package against the REST front end."""

from __future__ import annotations

import openai
import pytest

from services.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Overloaded,
    PeerLost,
    ShoalError,
    Unavailable,
)
from services.gateway.domain import Chunk, GenerationRequest, TokenLogprobs
from tests.gateway.rest.fake import MODEL, FakeGateway, FakeGeneration


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], n=2
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello world0", "Hello world1"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_chat_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == "Hello world0"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_chat_stream_helper(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world0"


async def test_chat_logprobs(sdk: openai.AsyncOpenAI, gateway: FakeGateway) -> None:
    scores = [TokenLogprobs(98, -1.0, ((98, -1.0),))]
    gateway.script = lambda request: [Chunk(0, "b", [98], scores, "stop")]
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].token == "b"
    assert logprobs.content[0].top_logprobs[0].logprob == -1.0


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model=MODEL, prompt=["a", "b"], echo=True)
    assert [choice.text for choice in answer.choices] == ["aHello world0", "bHello world0"]
    stream = await sdk.completions.create(model=MODEL, prompt="a", stream=True)
    texts = [choice.text async for chunk in stream for choice in chunk.choices]
    assert "".join(texts) == "Hello world0"


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL


@pytest.mark.parametrize(
    ("refusal", "exception"),
    [
        (ContextLengthExceeded.of(9, 8, param="messages"), openai.BadRequestError),
        (Overloaded("full", retry_after=1), openai.RateLimitError),
        (Unavailable("no worker is ready"), openai.InternalServerError),
        (DeadlineExceeded("too late"), openai.InternalServerError),
    ],
)
async def test_errors_are_the_sdks_own(
    sdk: openai.AsyncOpenAI,
    gateway: FakeGateway,
    refusal: ShoalError,
    exception: type[openai.APIStatusError],
) -> None:
    gateway.refusal = refusal
    for stream in (False, True):
        with pytest.raises(exception) as caught:
            await sdk.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=stream
            )
        assert refusal.message in caught.value.message
        assert caught.value.code == refusal.status.code
        assert caught.value.request_id


async def test_bad_field_and_model(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.completions.create(model=MODEL, prompt="a", temperature=5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await sdk.completions.create(model="nope", prompt="a")


async def test_error_in_the_stream(sdk: openai.AsyncOpenAI, gateway: FakeGateway) -> None:
    gateway.script = lambda request: [Chunk(0, "a", [1]), PeerLost("the worker was lost")]
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="the worker was lost"):
        async for _ in stream:
            pass


async def test_retries_an_overload(sdk: openai.AsyncOpenAI, gateway: FakeGateway) -> None:
    gateway.refusal = Overloaded("full", retry_after=0.1)

    start = gateway.start

    async def start_then_recover(request: GenerationRequest) -> FakeGeneration:
        try:
            return await start(request)
        finally:
            gateway.refusal = None

    gateway.start = start_then_recover  # type: ignore[method-assign]
    answer = await sdk.with_options(max_retries=1).completions.create(model=MODEL, prompt="a")
    assert answer.choices[0].text == "Hello world0"
    assert len(gateway.requests) == 2
