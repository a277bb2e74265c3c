"""Log-probabilities in the two shapes of the OpenAI API.

A token whose bytes are no whole characters is written as "bytes:\\xe2\\x80", so
that two such tokens never share a key.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.domain import Gateway, TokenLogprobs

_LOWEST = -9999.0  # JSON has no infinity; what OpenAI writes for impossible tokens


def token_text(data: bytes) -> str:
    """A token's bytes as text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


async def _spell(
    gateway: Gateway, model: str, logprobs: Sequence[TokenLogprobs]
) -> Mapping[int, bytes]:
    """The bytes of every token that the log-probabilities name."""
    token_ids = list(
        dict.fromkeys(
            token_id
            for entry in logprobs
            for token_id in (entry.token_id, *(top for top, _ in entry.top))
        )
    )
    return dict(zip(token_ids, await gateway.token_bytes(token_ids, model), strict=True))


async def chat_logprobs(
    gateway: Gateway, model: str, logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """The `content` entries of chat's `logprobs`."""
    spelling = await _spell(gateway, model, logprobs)

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = spelling[token_id]
        return {
            "token": token_text(data),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(data),
        }

    return [
        {
            **entry(item.token_id, item.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in item.top],
        }
        for item in logprobs
    ]


class CompletionLogprobs:
    """The `logprobs` of one choice of a completion, piece by piece.

    `text_offset` counts characters from the start of the choice's text, the echoed
    prompt included; a token inside a character has the character's offset.
    """

    def __init__(self, gateway: Gateway, model: str) -> None:
        self._gateway = gateway
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    async def add(
        self, logprobs: Sequence[TokenLogprobs], *, starts_prompt: bool = False
    ) -> dict[str, list[Any]]:
        """The next piece; the first token of a prompt has no log-probability."""
        spelling = await _spell(self._gateway, self._model, logprobs)
        piece: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for index, item in enumerate(logprobs):
            data = spelling[item.token_id]
            piece["tokens"].append(token_text(data))
            piece["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(data))
            if starts_prompt and index == 0:
                piece["token_logprobs"].append(None)
                piece["top_logprobs"].append(None)
                continue
            piece["token_logprobs"].append(max(item.logprob, _LOWEST))
            # The chosen token is always there, beside the likeliest.
            tops = dict([*item.top, (item.token_id, item.logprob)])
            piece["top_logprobs"].append(
                {token_text(spelling[key]): max(value, _LOWEST) for key, value in tops.items()}
            )
        return piece


async def prompt_scores(
    gateway: Gateway, model: str, count: int, logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token but the first the likeliest `count` and itself.

    A token's rank is known, and not null, where it is among the likeliest.
    """
    spelling = await _spell(gateway, model, logprobs)

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = token_text(spelling[token_id])
        return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": text}

    def scores(item: TokenLogprobs) -> dict[str, Any]:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(item.top, 1)}
        likeliest = item.top[:count]
        shown = {item.token_id: item.logprob, **dict(likeliest)}
        return {
            str(token_id): entry(token_id, logprob, ranks.get(token_id))
            for token_id, logprob in shown.items()
        }

    return [scores(item) if index else None for index, item in enumerate(logprobs)]


def join(pieces: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Pieces of one choice as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for piece in pieces for item in piece[name]] for name in names}
