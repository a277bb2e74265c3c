"""The README's examples, run as they stand there, and its outputs compared."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.common.config import flag_name
from services.fleet.config import FleetConfig
from tests.integration.served import ServedFleet

README = (Path(__file__).parents[2] / "README.md").read_text()
ROOT = "http://127.0.0.1:8000"


def _block(language: str, marker: str) -> str:
    for found in re.finditer(rf"```{language}\n(.*?)```", README, re.DOTALL):
        if marker in found[1]:
            return found[1]
    raise AssertionError(f"no {language} block with {marker!r}")


def _timeless(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from run to run."""
    for name in ("id", "created"):
        del answer[name]
    del answer["usage"]["prompt_tokens_details"]
    return answer


def test_curl(fleet: ServedFleet) -> None:
    command = _block("sh", "curl").replace(ROOT, fleet.url)
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    shown = json.loads(_block("json", "chat.completion"))
    assert _timeless(json.loads(done.stdout)) == _timeless(shown)


def test_openai_sdk(fleet: ServedFleet) -> None:
    program = _block("python", "OpenAI").replace(ROOT, fleet.url)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == _block("text", "Paris")


def test_a_tool_call(fleet: ServedFleet) -> None:
    program = _block("python", "tool_choice").replace(ROOT, fleet.url)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == _block("text", "weather")


def test_chat_shell(fleet: ServedFleet) -> None:
    command = _block("sh", "shoal chat").replace(ROOT, fleet.url)
    words = command.replace(".venv/bin/shoal", f"{sys.executable} -m services").split()
    done = subprocess.run(
        [*words, "--temperature", "0"],
        input="What is the capital of France?\n/exit\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "The capital of France is Paris." in done.stdout


def test_every_flag_named_exists() -> None:
    named = set(re.findall(r"`(--[a-z0-9-]+)[ `]", README))
    known = {flag_name(name) for name in FleetConfig.__dataclass_fields__}
    assert named <= known
    assert len(named) >= 10
