"""How a model writes tool calls and reasoning: what its tokenizer says, less what flags say.

Knows nothing of parsing; see `services.gateway.openai.output`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from protos import tokenizer_pb2
from services.gateway.domain import Dialect, ReasoningFormat, ReasoningState, ToolFormat

ToolCallParser = Literal["auto", "hermes", "llama3_json", "none"]
ReasoningParser = Literal["auto", "deepseek_r1", "qwen3", "none"]

_TOOL_FORMATS: Mapping[int, ToolFormat] = {
    tokenizer_pb2.TOOL_FORMAT_HERMES: "hermes",
    tokenizer_pb2.TOOL_FORMAT_LLAMA3_JSON: "llama3_json",
}
_REASONING_FORMATS: Mapping[int, ReasoningFormat] = {
    tokenizer_pb2.REASONING_FORMAT_DEEPSEEK_R1: "deepseek_r1",
    tokenizer_pb2.REASONING_FORMAT_QWEN3: "qwen3",
}
_REASONING_STATES: Mapping[int, ReasoningState] = {
    tokenizer_pb2.REASONING_STATE_OPEN: "open",
    tokenizer_pb2.REASONING_STATE_CLOSED: "closed",
}


def dialect_of(
    info: tokenizer_pb2.TokenizerInfo, tools: ToolCallParser, reasoning: ReasoningParser
) -> Dialect:
    """A model's dialect; a flag other than "auto" stands over what its template shows.

    A value that this version does not know counts as none.
    """
    return Dialect(
        _TOOL_FORMATS.get(info.tool_format, "none") if tools == "auto" else tools,
        _REASONING_FORMATS.get(info.reasoning_format, "none") if reasoning == "auto" else reasoning,
        info.reasoning_end_id if info.HasField("reasoning_end_id") else None,
    )


def reasoning_state(answer: tokenizer_pb2.EncodeResponse) -> ReasoningState:
    """What an encoded prompt says of the reasoning that follows it."""
    return _REASONING_STATES.get(answer.reasoning, "unknown")
