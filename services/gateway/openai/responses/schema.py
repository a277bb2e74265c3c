"""The body of POST /v1/responses, as msgspec structs.

What a field means for the result is in `services.gateway.openai.fields`.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from services.gateway.openai.schema import Integer, SamplingBody


class InputPart(Struct):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct):
    """One item of the conversation; which fields count depends on `type`."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class TextFormat(Struct):
    """`text.format`: text, json_object, or json_schema with a schema."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningConfig(Struct):
    """`reasoning`; `summary` is ignored: reasoning is given as it was written."""

    effort: str | None = None


class ResponsesBody(SamplingBody, kw_only=True):
    """POST /v1/responses."""

    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: Integer | None = None
    top_logprobs: Integer | None = None
    include: list[str] | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    truncation: Any = None


LOGPROBS = "message.output_text.logprobs"
# What `include` may ask for; the second is content of a stored kind, and there is none.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
