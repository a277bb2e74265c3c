"""Requests of the wire as the tokenizer's own types."""

from __future__ import annotations

import json
from typing import Any

from protos import common_pb2, tokenizer_pb2
from services.common.errors import InvalidRequest
from services.tokenizer.chat_template import Conversation
from services.tokenizer.lanes import Prepare

_MESSAGE_CHARACTERS = 16  # an empty message takes a template about as long as so many


def prepare_from_proto(request: tokenizer_pb2.EncodeRequest) -> tuple[Prepare, int]:
    """How to prepare a request's text or conversation, and about how long it is.

    What needs work, such as JSON in it, is left to the preparation.
    """
    limit = request.max_model_len if request.HasField("max_model_len") else None
    if request.HasField("text"):
        text = request.text
        special = not request.HasField("add_special_tokens") or request.add_special_tokens
        return (
            lambda encoder: encoder.prepare_text(
                text, add_special_tokens=special, max_model_len=limit
            ),
            len(text),
        )
    chat = request.chat
    size = chat.ByteSize() + _MESSAGE_CHARACTERS * len(chat.messages)
    return (
        lambda encoder: encoder.prepare_chat(conversation_from_proto(chat), max_model_len=limit),
        size,
    )


def conversation_from_proto(chat: common_pb2.ChatPrompt) -> Conversation:
    """A conversation. Raises InvalidRequest if JSON in it is not what it must be."""
    tools = _json(chat.tools_json, list, "tools")
    return Conversation(
        messages=[_message(message) for message in chat.messages],
        tools=tools or None,
        add_generation_prompt=(
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        ),
        continue_final_message=chat.continue_final_message,
        variables=_json(chat.template_kwargs_json, dict, "chat_template_kwargs") or {},
    )


def _message(proto: common_pb2.ChatMessage) -> dict[str, Any]:
    message: dict[str, Any] = {"role": proto.role}
    message["content"] = proto.content if proto.HasField("content") else None
    for name in ("name", "tool_call_id", "reasoning_content"):
        if proto.HasField(name):
            message[name] = getattr(proto, name)
    if proto.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in proto.tool_calls
        ]
    return message


def _json(text: str, kind: type, param: str) -> Any:
    """A JSON value of a kind; None for an empty text."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param)
    if not isinstance(value, kind):
        name = "array" if kind is list else "object"
        raise InvalidRequest(f"{param} must be a JSON {name}", param=param)
    return value
