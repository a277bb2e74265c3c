"""Models, and the tokenizer's endpoints in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import msgspec

from services.common.errors import InvalidRequest, ModelNotFound
from services.gateway.domain import Gateway, ModelCard, TextPrompt
from services.gateway.openai import fields
from services.gateway.openai.chat_prompt import chat_prompt
from services.gateway.openai.decode import decode, refuse
from services.gateway.openai.schema import (
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)

_MAX_TOKEN_ID = 2**32 - 1


class _Kind(msgspec.Struct):
    """Enough of a /tokenize body to tell a text from a conversation."""

    messages: Any = None


def model_list(gateway: Gateway) -> dict[str, Any]:
    """GET /v1/models."""
    return {"object": "list", "data": [_model(card) for card in gateway.models()]}


def model_by_id(gateway: Gateway, id: str) -> dict[str, Any]:
    """GET /v1/models/{id}.

    Raises:
        ModelNotFound.
    """
    for card in gateway.models():
        if card.id == id:
            return _model(card)
    raise ModelNotFound(f"The model {id!r} does not exist.", param="model")


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "shoal",
        "root": card.id,
        "parent": None,
        "max_model_len": card.max_model_len,
    }


async def tokenize(gateway: Gateway, raw: bytes) -> dict[str, Any]:
    """POST /tokenize.

    Raises:
        InvalidRequest, Unsupported, and what `Gateway.tokenize` raises.
    """
    body: TokenizeChatBody | TokenizeTextBody
    if decode(raw, _Kind).messages is not None:
        body = decode(raw, TokenizeChatBody)
        refuse(body, fields.TOKENIZE_CHAT.refused)
        prompt: Any = chat_prompt(body)
    else:
        body = decode(raw, TokenizeTextBody)
        special = True if body.add_special_tokens is None else body.add_special_tokens
        prompt = TextPrompt(body.prompt, special)
    answer = await gateway.tokenize(
        body.model or "", prompt, return_token_strs=bool(body.return_token_strs)
    )
    return {
        "count": len(answer.token_ids),
        "max_model_len": answer.max_model_len,
        "tokens": list(answer.token_ids),
        "token_strs": None if answer.token_strs is None else list(answer.token_strs),
    }


async def detokenize(gateway: Gateway, raw: bytes) -> dict[str, Any]:
    """POST /detokenize.

    Raises:
        InvalidRequest, and what `Gateway.detokenize` raises.
    """
    body = decode(raw, DetokenizeBody)
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) <= _MAX_TOKEN_ID):
        raise InvalidRequest("tokens: a token id is outside the vocabulary", param="tokens")
    return {"prompt": await gateway.detokenize(body.model or "", body.tokens)}
