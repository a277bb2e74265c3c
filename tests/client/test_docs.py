"""What the docs of the terminal's commands name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.client.bench.config import BenchConfig
from services.client.chat.config import ChatConfig
from services.client.chat.conversation import SETTINGS
from services.client.chat.shell import HELP
from services.client.top.config import SORT_KEYS, TopConfig
from services.common.config import flag_name

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "config"), [("bench", BenchConfig), ("chat", ChatConfig), ("top", TopConfig)]
)
def test_every_flag_named_exists(page: str, config: type) -> None:
    text = (DOCS / f"{page}.md").read_text()
    known = {flag_name(name) for name in config.__dataclass_fields__}  # type: ignore[attr-defined]
    named = set(re.findall(r"`[^`\n]*?(--[a-z-]+)", text))
    assert named - {"--help", "--model"} <= known
    assert len(named) >= 3


def test_the_pages_name_every_command_setting_and_order() -> None:
    chat, top = (DOCS / "chat.md").read_text(), (DOCS / "top.md").read_text()
    for command in re.findall(r"^(/[a-z]+)", HELP, re.MULTILINE):
        assert f"`{command}" in chat
    penalties = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    for setting in SETTINGS.keys() - penalties:
        assert f"`{setting}`" in chat
    assert ", ".join(SORT_KEYS) in top
