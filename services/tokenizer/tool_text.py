"""Tools for chat templates that have no notion of them, in the words of Hermes.

The tools are listed in the system message, calls of the history are written into their
message's content, and results come as a user's turn:

    system     ... <tools> ... </tools> ... <tool_call>{"name": ..., "arguments": ...}</tool_call>
    assistant  <tool_call>
               {"name": "f", "arguments": {"a": 1}}
               </tool_call>
    user       <tool_response>
               4
               </tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """\
You can call functions. They are listed, one a line, as JSON between <tools> and </tools>:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON, like this:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
) -> list[dict[str, Any]]:
    """The conversation with everything about tools as plain text.

    A message's `tool_calls` are as templates see them: arguments are objects.
    """
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=listed)
    if plain and plain[0]["role"] == "system":
        content = plain[0].get("content")
        plain[0]["content"] = f"{content}\n\n{introduction}" if content else introduction
        return plain
    return [{"role": "system", "content": introduction}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(message)
    if message["role"] == "tool":
        content = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {**result, "role": "user", "content": content}
    if calls := result.pop("tool_calls", None):
        said = [result["content"]] if result.get("content") else []
        result["content"] = "\n".join([*said, *map(_call, calls)])
    return result


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"
