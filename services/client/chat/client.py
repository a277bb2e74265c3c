"""A streaming client of the OpenAI chat API: requests out, pieces of an answer in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from services.client.endpoint import ApiError, Caller, Endpoint, error_text, list_models
from services.client.events import DONE, Chunk, EventSplitter, decode_chunk

Turn = dict[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: text, reasoning, or the token counts at its end."""

    text: str = ""
    thought: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str = ""


class ChatClient(Caller):
    """Talks to one server. Raises StartupError if the endpoint's authorities cannot be used."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.url = endpoint.url

    async def models(self) -> list[str]:
        """The names of the served models. Raises httpx.TransportError and ApiError."""
        return await list_models(self._http, self.url)

    async def stream(
        self, model: str, turns: Sequence[Turn], settings: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """The answer, piece by piece; closing the iterator makes the server give up.

        `settings` are more fields of the request.

        Raises:
            ApiError: with the server's own sentence.
        """
        body = {
            "model": model,
            "messages": list(turns),
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        url = f"{self.url}/chat/completions"
        try:
            async with self._http.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise ApiError(error_text(await response.aread(), response.status_code))
                splitter = EventSplitter()
                ended = False
                async for data in response.aiter_bytes():
                    for event in splitter.feed(data):
                        if event == DONE:
                            return
                        piece = _piece(decode_chunk(event))
                        ended = ended or bool(piece.finish_reason)
                        yield piece
                if not ended:
                    raise ApiError("the answer was cut off before its end")
        except httpx.TransportError as error:
            raise ApiError(f"the connection to {self.url} broke: {error or type(error).__name__}")


def _piece(chunk: Chunk) -> Piece:
    usage = chunk.usage
    prompt_tokens = usage.prompt_tokens if usage else None
    output_tokens = usage.completion_tokens if usage else None
    if not chunk.choices:
        return Piece(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    choice = chunk.choices[0]
    return Piece(
        choice.said, choice.thought, prompt_tokens, output_tokens, choice.finish_reason or ""
    )
