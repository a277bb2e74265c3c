"""What a request of the wire weighs: no part of it may be large and count for nothing."""

from __future__ import annotations

import pytest

from protos import common_pb2, tokenizer_pb2
from services.tokenizer.from_proto import prepare_from_proto
from services.tokenizer.lanes import TINY_CHARACTERS

LONG = "x" * 100_000
CALL = common_pb2.ToolCall


def size(*messages: common_pb2.ChatMessage, **fields: str) -> int:
    chat = common_pb2.ChatPrompt(messages=messages, **fields)  # type: ignore[arg-type]
    return prepare_from_proto(tokenizer_pb2.EncodeRequest(chat=chat))[1]


@pytest.mark.parametrize(
    "message",
    [
        common_pb2.ChatMessage(role=LONG),
        common_pb2.ChatMessage(role="user", content=LONG),
        common_pb2.ChatMessage(role="user", name=LONG),
        common_pb2.ChatMessage(role="tool", tool_call_id=LONG),
        common_pb2.ChatMessage(role="assistant", reasoning_content=LONG),
        common_pb2.ChatMessage(role="assistant", tool_calls=[CALL(id=LONG)]),
        common_pb2.ChatMessage(role="assistant", tool_calls=[CALL(name=LONG)]),
        common_pb2.ChatMessage(role="assistant", tool_calls=[CALL(arguments=LONG)]),
    ],
)
def test_every_text_of_a_message_counts(message: common_pb2.ChatMessage) -> None:
    assert size(message) >= len(LONG)


def test_every_text_beside_the_messages_counts() -> None:
    assert size(tools_json=LONG) >= len(LONG)
    assert size(template_kwargs_json=LONG) >= len(LONG)


def test_many_empty_messages_are_not_tiny() -> None:
    assert size(common_pb2.ChatMessage(role="user", content="hello")) < TINY_CHARACTERS / 10
    assert size(*[common_pb2.ChatMessage(role="user", content="")] * 64) > TINY_CHARACTERS
