"""A body of /v1/responses as the chat body that asks for the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from services.common.errors import InvalidRequest, ShoalError, Unsupported
from services.gateway.domain import Gateway, GenerationRequest
from services.gateway.offload import LARGE_BYTES, sized
from services.gateway.openai import fields, schema
from services.gateway.openai.answer import Answer, Job
from services.gateway.openai.chat import chat_request, model_dialect, shape_output
from services.gateway.openai.decode import Caller, decode, refuse, unsupported
from services.gateway.openai.fanout import FanOut
from services.gateway.openai.responses.answer import ResponseAnswer
from services.gateway.openai.responses.schema import (
    INCLUDABLE,
    LOGPROBS,
    InputItem,
    InputPart,
    ResponsesBody,
    TextFormat,
)
from services.gateway.openai.tools.use import ToolUse

# How fields of the chat body are called here.
PARAMS = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


async def parse_response(raw: bytes, caller: Caller, gateway: Gateway) -> Job:
    """Decodes and checks a body.

    Raises:
        InvalidRequest, Unsupported, and what `Gateway.dialect` raises.
    """
    body, request, tools = await sized(len(raw), LARGE_BYTES, partial(_read, raw, caller))
    dialect = await model_dialect(gateway, request)
    request, plan = shape_output(request, dialect, tools)

    def answer(gateway: Gateway, whole: FanOut) -> Answer:
        return ResponseAnswer(body, plan, gateway, whole)

    return Job((request,), bool(body.stream), answer, PARAMS)


def _read(raw: bytes, caller: Caller) -> tuple[ResponsesBody, GenerationRequest, ToolUse]:
    """The body, and what it asks for."""
    body = decode(raw, ResponsesBody)
    refuse(body, fields.RESPONSES.refused)
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise unsupported(f"include: {name[:64]!r}", param="include")
    try:
        return body, *chat_request(chat_body(body), caller)
    except ShoalError as error:
        if error.param is not None:
            error.param = PARAMS.get(error.param, error.param)
        raise


def chat_body(body: ResponsesBody) -> schema.ChatBody:
    """The chat body that asks for the same.

    Raises:
        InvalidRequest, Unsupported.
    """
    common = {name: getattr(body, name) for name in schema.SamplingBody.__struct_fields__}
    format = body.text.format if body.text is not None else None
    logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return schema.ChatBody(
        **common,
        messages=messages_of(body),
        tools=_chat_tools(body.tools),
        tool_choice=_chat_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if format is None else _response_format(format),
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
        verbosity=body.text.verbosity if body.text is not None else None,
    )


def messages_of(body: ResponsesBody) -> list[schema.Message]:
    """The conversation: instructions first, then each item."""
    conversation = _Conversation()
    if body.instructions is not None:
        conversation.say("system", body.instructions)
    if isinstance(body.input, str):
        conversation.say("user", body.input)
    else:
        if not body.input:
            raise InvalidRequest("input must have at least one item", param="input")
        for index, item in enumerate(body.input):
            conversation.add(f"input[{index}]", item)
    return conversation.messages


class _Conversation:
    """Messages as they come from items: an assistant's turn is one message, however many
    items it took."""

    def __init__(self) -> None:
        self.messages: list[schema.Message] = []
        self._reasoning: list[str] = []  # for the assistant's next message

    def say(self, role: str, content: str) -> None:
        self.messages.append(schema.Message(role, content))

    def add(self, at: str, item: InputItem) -> None:
        """Raises InvalidRequest or Unsupported."""
        if item.type == "message":
            self._add_message(at, item)
        elif item.type == "function_call":
            self._add_call(at, item)
        elif item.type == "function_call_output":
            text = _text(f"{at}.output", item.output)
            self.messages.append(schema.Message("tool", text, tool_call_id=item.call_id))
        elif item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else item.summary or []
            self._reasoning.append(_text(f"{at}.content", parts))
        else:
            raise Unsupported(f"{at}.type {item.type[:64]!r} is not supported", param=f"{at}.type")

    def _add_message(self, at: str, item: InputItem) -> None:
        if item.role not in ("user", "assistant", "system", "developer"):
            raise InvalidRequest(
                f"{at}.role must be one of user, assistant, system, developer", param=f"{at}.role"
            )
        message = schema.Message(item.role, _text(f"{at}.content", item.content))
        if item.role == "assistant":
            message.reasoning_content = self._take_reasoning()
        self.messages.append(message)

    def _add_call(self, at: str, item: InputItem) -> None:
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None:
                raise InvalidRequest(f"{at}.{name} is required", param=f"{at}.{name}")
        function = schema.Function(item.name or "", item.arguments or "")
        call = schema.ToolCall(function, item.call_id or "")
        if not self.messages or self.messages[-1].role != "assistant":
            message = schema.Message("assistant", reasoning_content=self._take_reasoning())
            self.messages.append(message)
        self.messages[-1].tool_calls = [*(self.messages[-1].tool_calls or ()), call]

    def _take_reasoning(self) -> str | None:
        text, self._reasoning = "\n".join(self._reasoning), []
        return text or None


def _text(at: str, content: str | Sequence[InputPart] | None) -> str:
    """Text, or the texts of parts, joined as chat's are."""
    if content is None:
        raise InvalidRequest(f"{at} is required", param=at)
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type != "refusal" and part.type not in _TEXT_PARTS:
            raise InvalidRequest(
                f"{at}[{index}]: the model takes text only, not a part of type {part.type[:64]!r}",
                param=f"{at}[{index}].type",
            )
        if text is None:
            raise InvalidRequest(f"{at}[{index}].text is required", param=f"{at}[{index}].text")
        texts.append(text)
    return "\n".join(texts)


def _chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Flat tools as chat has them."""
    if tools is None:
        return None
    return [
        {
            "type": tool.get("type"),
            "function": {
                key: tool[key]
                for key in ("name", "description", "parameters", "strict")
                if tool.get(key) is not None
            },
        }
        for tool in tools
    ]


def _chat_tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = [_chat_tool_choice(tool) for tool in choice["tools"]]
        mode = choice.get("mode")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    return choice


def _response_format(format: TextFormat) -> schema.ResponseFormat:
    """`text.format` as chat has it."""
    chat: dict[str, Any] = {"type": format.type}
    if format.type == "json_schema":
        chat["json_schema"] = {
            "name": format.name or "",
            "schema": format.schema,
            "strict": format.strict,
        }
    return msgspec.convert(chat, schema.ResponseFormat)
