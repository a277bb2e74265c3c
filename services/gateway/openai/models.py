"""Models, and the tokenizer's endpoints in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.common.errors import InvalidRequest
from services.gateway.domain import ChatPrompt, Gateway, ModelCard, TextPrompt, Tokenized
from services.gateway.offload import LARGE_BYTES, sized, slices
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
        ModelNotFound, Unavailable.
    """
    return _model(gateway.model(id))


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


async def tokenize(gateway: Gateway, raw: bytes) -> bytes:
    """POST /tokenize.

    Raises:
        InvalidRequest, Unsupported, and what `Gateway.tokenize` raises.
    """
    body, prompt = await sized(len(raw), LARGE_BYTES, lambda: _prompt_of(raw))
    answer = await gateway.tokenize(
        body.model or "", prompt, return_token_strs=bool(body.return_token_strs)
    )
    return await sized(len(answer.token_ids), LARGE_BYTES, lambda: _tokenized(answer))


def _prompt_of(raw: bytes) -> tuple[TokenizeChatBody | TokenizeTextBody, ChatPrompt | TextPrompt]:
    if decode(raw, _Kind).messages is not None:
        chat = decode(raw, TokenizeChatBody)
        refuse(chat, fields.TOKENIZE_CHAT.refused)
        return chat, chat_prompt(chat)
    body = decode(raw, TokenizeTextBody)
    special = True if body.add_special_tokens is None else body.add_special_tokens
    return body, TextPrompt(body.prompt, special)


def _tokenized(answer: Tokenized) -> bytes:
    strs = b"null" if answer.token_strs is None else _json_list(answer.token_strs)
    return b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (
        len(answer.token_ids),
        answer.max_model_len,
        _json_list(answer.token_ids),
        strs,
    )


def _json_list(values: Sequence[Any]) -> bytes:
    """A list as JSON, however long."""
    parts = [msgspec.json.encode(list(part))[1:-1] for part in slices(values)]
    return b"[" + b",".join(parts) + b"]"


async def detokenize(gateway: Gateway, raw: bytes) -> bytes:
    """POST /detokenize.

    Raises:
        InvalidRequest, and what `Gateway.detokenize` raises.
    """
    body = await sized(len(raw), LARGE_BYTES, lambda: decode(raw, DetokenizeBody))
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) <= _MAX_TOKEN_ID):
        raise InvalidRequest("tokens: a token id is outside the vocabulary", param="tokens")
    text = await gateway.detokenize(body.model or "", body.tokens)
    return msgspec.json.encode({"prompt": text})
