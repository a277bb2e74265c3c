"""Why a rank that has no line to the agent could not start: one file beside the agent's socket.

All ranks often fail for the same reason, and only the first to say so is heard.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_NAME = "reason"


def leave_reason(socket_path: str, sentence: str) -> None:
    """Leaves a sentence for the agent, unless another rank was quicker or the agent has gone."""
    with (
        suppress(FileExistsError, FileNotFoundError),
        Path(socket_path).with_name(_NAME).open("x") as file,
    ):
        file.write(sentence)


def read_reason(socket_path: str) -> str:
    """The sentence that a rank left; empty if none did."""
    with suppress(FileNotFoundError):
        return Path(socket_path).with_name(_NAME).read_text()
    return ""
