"""Conversations to prompt text, by the model's own Jinja template.

Renders as Hugging Face's apply_chat_template does: the same sandbox, filters, globals
and whitespace rules, and the template alone decides about BOS. Knows nothing of
token ids; control tokens in user text are kept apart by `services.tokenizer.control`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import InvalidRequest, StartupError
from services.tokenizer.control import ControlGuard, Marking, Restored
from services.tokenizer.dialect import knows_tools
from services.tokenizer.tool_text import with_tools_as_text

# What a template on a user's input can fail with, beside its own refusals.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
# A template that joins a call's arguments to strings wants their text, not an object.
_JOINS_ARGUMENTS = re.compile(
    r"arguments(['\"]\])?\s*\+|\+\s*[\w.'\"\[\]]*arguments(['\"]\])?\s*(\+|[-}])"
)
# Marks the end of the final message's content while it is to be continued. The blank
# shows whether the template strips.
_END_OF_CONTENT = "\ue102\ue103\ue104 "


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is rendered: JSON values, as OpenAI's API has them.

    A message's `content` is a string or None, a tool call's `arguments` JSON as text.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A compiled template; `render` may be called from several threads.

    One that has no notion of tools is shown them as text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], guard: ControlGuard) -> None:
        """Compiles. Raises StartupError if the template is not valid."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"the model's chat template is not valid: {error}") from error
        # One plain dict, which every rendering copies: Jinja's chain of them is ten times as slow.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)
        self._guard = guard
        self._knows_tools = knows_tools(source)
        self._text_arguments = _JOINS_ARGUMENTS.search(source) is not None
        # A template that asks whether content is none wants to see None; any other
        # would print the word, or fail to join it to a string.
        self._knows_null = bool(re.search(r"content(['\"]\])?\s+is\s+(not\s+)?none", source, re.I))

    def render(self, conversation: Conversation) -> Restored:
        """The prompt's text.

        Raises InvalidRequest, with the template's own words if it refuses.
        """
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )
        marking = self._guard.marking()
        try:
            variables = self._variables(conversation, marking)
        except RecursionError:
            raise InvalidRequest("the conversation is nested too deeply", param="messages")
        rendered = self._run(variables)
        if conversation.continue_final_message:
            rendered = _cut_open(rendered)
        return marking.restore(rendered)

    def _variables(self, conversation: Conversation, marking: Marking) -> dict[str, Any]:
        """What the template sees, everything from the request marked."""
        shown = [self._message(message) for message in conversation.messages]
        tools = conversation.tools
        if not self._knows_tools:
            shown, tools = with_tools_as_text(shown, tools), None
        messages = marking.mark(shown)
        if conversation.continue_final_message:
            messages[-1]["content"] = _left_open(conversation.messages[-1], messages[-1])
        return {
            **self._special_tokens,
            "tools": marking.mark(tools),
            "documents": None,
            **marking.mark(self._checked(conversation.variables)),
            "messages": messages,
            "add_generation_prompt": conversation.add_generation_prompt,
        }

    def _run(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except jinja2.UndefinedError as error:
            raise InvalidRequest(f"the chat template cannot render this: {error}", param="messages")
        except jinja2.TemplateError as error:
            raise InvalidRequest(str(error), param="messages")
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(f"the chat template cannot render this: {error}", param="messages")

    def _checked(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        for name in variables:
            if name in _RESERVED or name in self._special_tokens:
                raise InvalidRequest(
                    f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs"
                )
        return dict(variables)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template expects it, nulls left out."""
        result = {key: value for key, value in message.items() if value is not None}
        if message.get("content") is None:
            result["content"] = None if self._knows_null else ""
        if calls := result.pop("tool_calls", None):
            result["tool_calls"] = [_tool_call(call, self._text_arguments) for call in calls]
        if "reasoning_content" in result:
            # The name that gpt-oss's template reads.
            result.setdefault("thinking", result["reasoning_content"])
        return result


def _tool_call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """A call with its arguments, which must be an object, as an object or as text."""
    function = dict(call["function"])
    text = function.get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"tool call arguments are not JSON: {error}", param="messages")
    if not isinstance(arguments, dict):
        raise InvalidRequest("tool call arguments are not a JSON object", param="messages")
    return {**call, "function": {**function, "arguments": text if as_text else arguments}}


def _left_open(message: Mapping[str, Any], marked: Mapping[str, Any]) -> str:
    """The final message's content with its end marked."""
    if message.get("content") is None:
        raise InvalidRequest("the final message has no content to continue", param="messages")
    return f"{marked['content']}{_END_OF_CONTENT}"


def _cut_open(rendered: str) -> str:
    """Cuts behind the final message's content; with its trailing blanks, unless the
    template has stripped them."""
    place = rendered.rfind(_END_OF_CONTENT.strip())
    if place < 0:
        raise InvalidRequest(
            "the chat template leaves the final message out, so it cannot be continued",
            param="continue_final_message",
        )
    kept = rendered[place:].startswith(_END_OF_CONTENT)
    return rendered[:place] if kept else rendered[:place].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}, which marks what the assistant said for
    training, and renders as what is in it."""

    tags = {"generation"}  # noqa: RUF012  # the name and kind that Jinja asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
