"""A small streaming client of the OpenAI chat API: requests out, pieces of text in."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

import httpx

from services.common.errors import StartupError

Turn = dict[str, str]  # {"role": ..., "content": ...}

_CONNECT_SECONDS = 5.0


class ChatError(Exception):
    """The server refused or failed; the message is for the person who chats."""


class ChatClient:
    """Talks to one server at `url`, the base that ends in /v1."""

    def __init__(self, url: str, api_key: str = "", ca: str = "") -> None:
        """Raises StartupError if `ca`, a file of authorities, cannot be used."""
        self._url = url.rstrip("/")
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(timeout=timeout, headers=headers, verify=_trust(ca))

    async def models(self) -> list[str]:
        """The names of the served models.

        Raises:
            httpx.TransportError: nothing answers.
            ChatError: what answers does not speak this API.
        """
        response = await self._http.get(f"{self._url}/models", timeout=_CONNECT_SECONDS)
        if response.status_code != 200:
            raise ChatError(_error_text(response.content, response.status_code))
        try:
            return [card["id"] for card in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise ChatError(f"what answers at {self._url} does not speak the OpenAI API")

    async def stream(
        self,
        model: str,
        turns: Sequence[Turn],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[str, None]:
        """The answer, piece by piece; closing the iterator makes the server give up.

        Raises:
            ChatError: with the server's own sentence.
        """
        body: dict[str, Any] = {"model": model, "messages": list(turns), "stream": True}
        if temperature is not None:
            body["temperature"] = temperature
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        try:
            async with self._http.stream(
                "POST", f"{self._url}/chat/completions", json=body
            ) as response:
                if response.status_code != 200:
                    raise ChatError(_error_text(await response.aread(), response.status_code))
                async with aclosing(_events(response)) as events:
                    async for data in events:
                        yield _delta(data)
        except httpx.TransportError as error:
            raise ChatError(f"the connection to {self._url} broke: {error or type(error).__name__}")

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()


def _trust(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise StartupError(f"cannot use --tls-ca {ca}: {error.strerror or error}")


async def _events(response: httpx.Response) -> AsyncGenerator[str, None]:
    """The data of each server-sent event up to `[DONE]`; several data lines are one event."""
    lines: list[str] = []
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            lines.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and lines:
            data = "\n".join(lines)
            lines.clear()
            if data == "[DONE]":
                return
            yield data
    raise ChatError("the answer was cut off before its end")


def _delta(data: str) -> str:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise ChatError(f"the server sent a line that is not JSON: {data[:200]}")
    if "error" in chunk:
        raise ChatError(_message(chunk) or "the server failed")
    choices = chunk.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _error_text(body: bytes, status: int) -> str:
    try:
        return _message(json.loads(body)) or f"the server answered {status}"
    except ValueError:
        return f"the server answered {status}"


def _message(value: Any) -> str:
    error = value.get("error") if isinstance(value, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else ""
