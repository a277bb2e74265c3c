"""Short forms of what the tests send, and readers of what comes back."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.gateway.rest.fake import MODEL

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, **fields}


def completion_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **fields}


def events(response: httpx.Response) -> list[Any]:
    """The JSON events of a whole stream, which must end with one [DONE]."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert data.count("[DONE]") == 1
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def choices_of(stream: list[Any], index: int = 0) -> list[Any]:
    """The choice objects of one index, in order."""
    return [
        choice
        for event in stream
        for choice in event.get("choices", [])
        if choice["index"] == index
    ]


def chat_text(stream: list[Any], index: int = 0) -> str:
    return "".join(choice["delta"].get("content", "") for choice in choices_of(stream, index))


def completion_text(stream: list[Any], index: int = 0) -> str:
    return "".join(choice["text"] for choice in choices_of(stream, index))


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which must be a proper envelope."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    assert "Traceback" not in response.text
    return error
