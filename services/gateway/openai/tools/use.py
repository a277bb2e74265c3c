"""The tools of a request and the choice among them, checked.

Knows nothing of how a model writes a call; see `services.gateway.openai.tools.grammar`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from services.common.errors import InvalidRequest, Unsupported

MAX_TOOLS = 128
MAX_NAME = 256  # characters


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


class ToolUse(Struct, frozen=True):
    """The tools that may be called in one output, and whether one must be."""

    tools: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None
) -> ToolUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` of a body say.

    Raises:
        InvalidRequest, Unsupported: naming the field at fault.
    """
    known = _tools(tools or ())
    several = parallel is not False
    mode, names = _choice(choice)
    if mode == "none" or not (known or choice):
        return ToolUse()
    if not known:
        if mode == "auto":
            return ToolUse()
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    for name in names:
        if name not in known:
            raise InvalidRequest(f"tool_choice: there is no tool {name!r}", param="tool_choice")
    allowed = tuple(known[name] for name in names) if names else tuple(known.values())
    if mode == "named":
        return ToolUse(allowed, required=True, parallel=False)
    return ToolUse(allowed, required=mode == "required", parallel=several)


def _tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Tool]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools may have at most {MAX_TOOLS} entries", param="tools")
    known: dict[str, Tool] = {}
    for index, entry in enumerate(tools):
        tool = _tool(f"tools[{index}]", entry)
        if tool.name in known:
            raise InvalidRequest(f"tools: there are two named {tool.name!r}", param="tools")
        known[tool.name] = tool
    return known


def _tool(at: str, entry: Mapping[str, Any]) -> Tool:
    kind = entry.get("type")
    if kind != "function":
        if isinstance(kind, str):
            raise Unsupported(f"{at}.type {kind[:64]!r} is not supported", param=f"{at}.type")
        raise InvalidRequest(f"{at}.type must be 'function'", param=f"{at}.type")
    function = entry.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{at}.function must be an object", param=f"{at}.function")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidRequest(
            f"{at}.function.name must be a string of 1 to {MAX_NAME} characters",
            param=f"{at}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{at}.function.parameters must be a JSON schema", param=f"{at}.function.parameters"
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(
            f"{at}.function.strict must be a boolean", param=f"{at}.function.strict"
        )
    return Tool(name, parameters or {"type": "object", "properties": {}}, bool(strict))


def _choice(choice: Any) -> tuple[Literal["auto", "none", "required", "named"], tuple[str, ...]]:
    """The mode, and the tools that the choice is limited to; none named are all."""
    if choice is None or choice == "auto":
        return "auto", ()
    if choice == "none":
        return "none", ()
    if choice == "required":
        return "required", ()
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return "named", (_name(choice),)
    allowed = choice.get("allowed_tools") if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list) and allowed["tools"]:
        mode = allowed.get("mode")
        if mode == "auto" or mode == "required":
            return mode, tuple(dict.fromkeys(_name(entry) for entry in allowed["tools"]))
    raise InvalidRequest(
        "tool_choice must be auto, none, required, or an object of type function or allowed_tools",
        param="tool_choice",
    )


def _name(entry: Any) -> str:
    function = entry.get("function") if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            "tool_choice: function.name must be a string", param="tool_choice.function.name"
        )
    return name
