"""What templates show of their models' ways."""

from __future__ import annotations

import pytest

from services.common.text.vocabulary import build_vocabulary
from services.tokenizer.dialect import (
    ReasoningFormat,
    ReasoningState,
    ToolFormat,
    knows_tools,
    reasoning_format,
    reasoning_state,
    tool_format,
)
from services.tokenizer.to_proto import info_to_proto, reasoning_to_proto

# The marks of published templates, in short.
QWEN3 = (
    "{%- if tools %}<tools>...<tool_call>\n{...}\n</tool_call>{% endif %}"
    "{% if '</think>' in content %}{% endif %}<|im_start|>assistant\n"
)
LLAMA = "{%- if tools is not none %}<|start_header_id|>{% endif %}<|python_tag|>"
DEEPSEEK = "{{ '<｜Assistant｜><think>\\n' }}{{ content.split('</think>')[-1] }}"
MISTRAL = "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning", "knows"),
    [
        (QWEN3, "hermes", "qwen3", True),
        (LLAMA, "llama3_json", "none", True),
        (DEEPSEEK, "hermes", "deepseek_r1", False),
        (MISTRAL, "none", "none", True),
        (PLAIN, "hermes", "none", False),
    ],
)
def test_formats(template: str, tools: ToolFormat, reasoning: ReasoningFormat, knows: bool) -> None:
    assert tool_format(template) == tools
    assert reasoning_format(template) == reasoning
    assert knows_tools(template) is knows


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>assistant\n", "unknown"),
        ("<｜Assistant｜><think>\n", "open"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
        ("what does <think> mean?<|im_end|>\n<|im_start|>assistant\n", "unknown"),
        ("", "unknown"),
    ],
)
def test_what_a_prompt_says_of_reasoning(prompt: str, state: ReasoningState) -> None:
    assert reasoning_state(prompt) == state
    assert (reasoning_to_proto(state) == 0) is (state == "unknown")


def test_the_embedded_model_says_so_on_the_wire() -> None:
    info = info_to_proto("", build_vocabulary(""))
    assert info.model == "SmolLM2-135M-Instruct"
    assert (info.tool_format, info.reasoning_format) == (1, 0)
    assert not info.HasField("reasoning_end_id")
