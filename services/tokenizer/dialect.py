"""What a chat template's source gives away: how its model writes tool calls and reasoning.

Templates are programs, so this is a look at the marks they contain, no more; the
gateway's flags overrule it. Knows nothing of how the marks are parsed in an output.
"""

from __future__ import annotations

import re
from typing import Literal

ToolFormat = Literal["hermes", "llama3_json", "none"]
ReasoningFormat = Literal["deepseek_r1", "qwen3", "none"]
ReasoningState = Literal["unknown", "open", "closed"]

_TOOLS = re.compile(r"\btools?\b|tool_calls")


def knows_tools(template: str) -> bool:
    """Whether a template says anything of tools; one that does not needs help."""
    return _TOOLS.search(template) is not None


def tool_format(template: str) -> ToolFormat:
    """The format of the calls that a template teaches."""
    if "<tool_call>" in template or not knows_tools(template):
        return "hermes"
    llama = "<|python_tag|>" in template or "<|start_header_id|>" in template
    return "llama3_json" if llama else "none"


def reasoning_format(template: str) -> ReasoningFormat:
    """The format of the reasoning that a template knows."""
    if "</think>" not in template:
        return "none"
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


def reasoning_state(prompt: str) -> ReasoningState:
    """Whether the end of a rendered prompt opens or closes the output's reasoning."""
    end = prompt[-64:].rstrip()
    if end.endswith("<think>"):
        return "open"
    return "closed" if end.endswith("</think>") else "unknown"
