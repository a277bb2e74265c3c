"""The tokenizer's own types as messages of the wire."""

from __future__ import annotations

import time

from protos import tokenizer_pb2
from services import __version__
from services.common.text.vocabulary import Vocabulary
from services.tokenizer.dialect import ReasoningState, reasoning_format, tool_format

_REASONING_STATES: dict[ReasoningState, tokenizer_pb2.ReasoningState.ValueType] = {
    "unknown": tokenizer_pb2.REASONING_STATE_UNSPECIFIED,
    "open": tokenizer_pb2.REASONING_STATE_OPEN,
    "closed": tokenizer_pb2.REASONING_STATE_CLOSED,
}
_TOOL_FORMATS = {
    "none": tokenizer_pb2.TOOL_FORMAT_UNSPECIFIED,
    "hermes": tokenizer_pb2.TOOL_FORMAT_HERMES,
    "llama3_json": tokenizer_pb2.TOOL_FORMAT_LLAMA3_JSON,
}
_REASONING_FORMATS = {
    "none": tokenizer_pb2.REASONING_FORMAT_UNSPECIFIED,
    "deepseek_r1": tokenizer_pb2.REASONING_FORMAT_DEEPSEEK_R1,
    "qwen3": tokenizer_pb2.REASONING_FORMAT_QWEN3,
}


def reasoning_to_proto(state: ReasoningState) -> tokenizer_pb2.ReasoningState.ValueType:
    """What a prompt says about reasoning."""
    return _REASONING_STATES[state]


def info_to_proto(model: str, vocabulary: Vocabulary) -> tokenizer_pb2.TokenizerInfo:
    """What a tokenizer or detokenizer is; `model` is its name as given, which may be empty."""
    template = vocabulary.metadata.chat_template
    return tokenizer_pb2.TokenizerInfo(
        epoch=time.time_ns(),
        model=model or vocabulary.files.name,
        vocab_size=vocabulary.metadata.vocab_size,
        has_chat_template=template is not None,
        eos_token_ids=sorted(vocabulary.metadata.eos_token_ids),
        tool_format=_TOOL_FORMATS[tool_format(template or "")],
        reasoning_format=_REASONING_FORMATS[reasoning_format(template or "")],
        reasoning_end_id=vocabulary.tokenizer.token_to_id("</think>"),
        version=__version__,
    )
