"""Large bodies are worked on off the event loop, and small ones on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from services.gateway import generate, to_proto
from services.gateway.config import GatewayConfig
from services.gateway.domain import ChatPrompt, Message, TextPrompt
from services.gateway.offload import LARGE_BYTES, LARGE_COUNT
from services.gateway.openai import chat, models
from services.gateway.openai.responses import request as responses
from tests.gateway.rest.helpers import CHAT, chat_body


@pytest.fixture
def config() -> GatewayConfig:
    return GatewayConfig()


def watch(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Callable[[], bool]:
    """Whether the last call of a function was on the thread that asks."""
    threads: list[int] = []
    work = getattr(module, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return work(*args, **kwargs)

    monkeypatch.setattr(module, name, watched)
    return lambda: threads.pop() == threading.get_ident()


@pytest.mark.parametrize("large", [False, True])
async def test_conversations(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    on_loop = watch(monkeypatch, chat, "chat_prompt")
    count = LARGE_BYTES // 16 if large else 2
    messages = [{"role": "user", "content": "hi"}] * count
    assert (await client.post(CHAT, json=chat_body(messages=messages))).status_code == 200
    assert on_loop() is not large
    items = [{"role": "user", "content": "hi"}] * count
    converted = watch(monkeypatch, responses, "messages_of")
    assert (await client.post("/v1/responses", json={"input": items})).status_code == 200
    assert on_loop() is not large
    assert converted() is not large


@pytest.mark.parametrize("large", [False, True])
async def test_tokenize(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    read = watch(monkeypatch, models, "_prompt_of")
    written = watch(monkeypatch, models, "_tokenized")
    prompt = "a" * (LARGE_BYTES + 1 if large else 3)
    answer = await client.post("/tokenize", json={"prompt": prompt, "return_token_strs": True})
    assert answer.json() == {
        "count": len(prompt),
        "max_model_len": 8192,
        "tokens": [97] * len(prompt),
        "token_strs": ["a"] * len(prompt),
    }
    assert read() is not large
    assert written() is not large


@pytest.mark.parametrize("large", [False, True])
async def test_messages_to_a_tokenizer(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    converted = watch(monkeypatch, to_proto, "encode_request")
    message = Message("user", "hi")
    prompt = ChatPrompt((message,) * (LARGE_COUNT + 1 if large else 2))
    assert len((await generate.encode_message(prompt)).chat.messages) == len(prompt.messages)
    assert converted() is not large
    await generate.encode_message(TextPrompt("a" * LARGE_BYTES))  # one copy
    assert converted()
