"""What is being talked about: turns, system message, model and settings; saved and loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from services.client.chat.client import Turn


def _texts(text: str) -> list[str]:
    value = json.loads(text) if text.startswith("[") else [text]
    if not all(isinstance(item, str) for item in value):
        raise ValueError("not texts")
    return list(value)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("JSON has no such number")
    return value


# Fields of a request that /set knows, and how their values are read.
SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": _number,
    "max_tokens": int,
    "top_p": _number,
    "top_k": int,
    "min_p": _number,
    "seed": int,
    "stop": _texts,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "repetition_penalty": _number,
    "reasoning_effort": str,
}


class BadConversation(Exception):
    """A file or a setting that cannot be used; the message is for the person who chats."""


@dataclass(slots=True)
class Conversation:
    """One conversation with one model. `turns` ends with an answer, but while one is made."""

    model: str
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    unanswered: str = ""  # the last question, if its answer failed

    def messages(self, question: str) -> list[Turn]:
        """What to send to have a question answered."""
        system: list[Turn] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self.turns.append({"role": "user", "content": question})
        self.turns.append({"role": "assistant", "content": answer})
        self.unanswered = ""

    def forget(self) -> None:
        """Forgets every question and answer."""
        self.turns = []
        self.unanswered = ""

    def take_back(self) -> str | None:
        """Forgets the last question, which is returned, and its answer; None if there is none."""
        if self.unanswered:
            question, self.unanswered = self.unanswered, ""
            return question
        if not self.turns:
            return None
        question = self.turns[-2]["content"]
        del self.turns[-2:]
        return question

    def set(self, name: str, text: str) -> None:
        """Sets a field of the requests, or unsets it if `text` is empty. Raises BadConversation."""
        if name not in SETTINGS:
            known = ", ".join(SETTINGS)
            raise BadConversation(f"there is no setting {name!r}; choose from {known}")
        if not text:
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = SETTINGS[name](text)
        except ValueError:
            raise BadConversation(f"{text!r} is no value for {name}")

    def save(self, file: str) -> None:
        """Writes everything to a JSON file. Raises BadConversation."""
        value = {
            "model": self.model,
            "system": self.system,
            "settings": self.settings,
            "messages": self.turns,
        }
        try:
            Path(file).expanduser().write_text(
                json.dumps(value, indent=2, ensure_ascii=False) + "\n"
            )
        except OSError as error:
            raise BadConversation(f"cannot write {file}: {error.strerror}")

    def load(self, file: str) -> None:
        """Takes over what a file has, but for the model. Raises BadConversation."""
        try:
            text = Path(file).expanduser().read_text()
            value = json.loads(text, parse_float=_number, parse_constant=_number)
        except OSError as error:
            raise BadConversation(f"cannot read {file}: {error.strerror}")
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise BadConversation(f"{file} is not JSON")
        except ValueError:
            raise BadConversation(
                f"{file} has a number that no request can carry, such as NaN or Infinity"
            )
        messages = value.get("messages") if isinstance(value, dict) else None
        settings = (value.get("settings") or {}) if isinstance(value, dict) else None
        if not _is_turns(messages) or not isinstance(settings, dict):
            raise BadConversation(f"{file} is not a saved conversation")
        self.system = str(value.get("system") or "")
        self.settings = {name: settings[name] for name in settings if name in SETTINGS}
        self.forget()
        self.turns = [{"role": turn["role"], "content": turn["content"]} for turn in messages]


def _is_turns(messages: Any) -> TypeGuard[list[Turn]]:
    """Whether they are questions and answers, in turn."""
    if not isinstance(messages, list) or len(messages) % 2:
        return False
    return all(
        isinstance(turn, dict)
        and turn.get("role") == ("assistant" if index % 2 else "user")
        and isinstance(turn.get("content"), str)
        for index, turn in enumerate(messages)
    )
