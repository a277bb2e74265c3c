"""A conversation as the OpenAI API writes it, to a `ChatPrompt`.

Text parts of one message are joined with a newline, as vLLM joins them.
"""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.gateway.domain import ChatPrompt, Message, ToolCall
from services.gateway.openai import schema
from services.gateway.openai.decode import object_json, refuse

ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_prompt(
    body: schema.ChatBody | schema.TokenizeChatBody, *, reasoning_effort: str | None = None
) -> ChatPrompt:
    """The conversation of a body.

    Raises:
        InvalidRequest, Unsupported: naming the message or field at fault.
    """
    if not body.messages:
        raise InvalidRequest("messages must have at least one message", param="messages")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )
    generates = body.add_generation_prompt
    kwargs = dict(body.chat_template_kwargs or {})
    if reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", reasoning_effort)
    return ChatPrompt(
        messages=tuple(_message(index, item) for index, item in enumerate(body.messages)),
        tools_json=object_json("tools", body.tools),
        add_generation_prompt=not continues if generates is None else generates,
        continue_final_message=continues,
        template_kwargs_json=object_json("chat_template_kwargs", kwargs),
    )


def _message(index: int, message: schema.Message) -> Message:
    at = f"messages[{index}]"
    if message.role not in ROLES:
        raise InvalidRequest(f"{at}.role must be one of {', '.join(ROLES)}", param=f"{at}.role")
    if not (message.audio is None and message.function_call is None):
        refuse(message, {"audio": (), "function_call": ()}, within=at)
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise InvalidRequest(
            f"{at}.tool_calls belong to the role assistant", param=f"{at}.tool_calls"
        )
    content = _content(f"{at}.content", message.content)
    if content is None and message.role == "assistant":
        content = message.refusal  # what it said instead
    if content is None and not calls:
        raise InvalidRequest(f"{at}.content is required", param=f"{at}.content")
    return Message(
        role=message.role,
        content=content,
        name=message.name,
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in calls
        ),
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )


def _content(at: str, content: str | list[schema.ContentPart] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"{at} must have at least one part", param=at)
    return "\n".join(_part(f"{at}[{index}]", part) for index, part in enumerate(content))


def _part(at: str, part: schema.ContentPart) -> str:
    if part.type not in ("text", "refusal"):
        raise InvalidRequest(
            f"{at}: the model takes text only, not a part of type {part.type[:64]!r}",
            param=f"{at}.type",
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise InvalidRequest(f"{at}.{part.type} is required", param=f"{at}.{part.type}")
    return text
