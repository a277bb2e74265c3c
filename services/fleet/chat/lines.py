"""Where the shell's lines come from: an editor with history on a terminal, else stdin."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Protocol, TextIO


class Interrupted(Exception):
    """Ctrl-C while a line was being typed."""


class LineSource(Protocol):
    """Asks for one line after another."""

    async def read(self) -> str | None:
        """The next line; None at the end of input. Raises Interrupted on Ctrl-C."""
        ...


class TerminalLines:
    """prompt_toolkit with a history file."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory

        path = history_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._session: PromptSession[str] = PromptSession(history=FileHistory(str(path)))

    async def read(self) -> str | None:
        try:
            return await self._session.prompt_async("> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise Interrupted


class StreamLines:
    """Plain lines of a pipe or file.

    They are read on a daemon thread: a blocked read of a pipe must not hold up the end.
    """

    def __init__(self, stream: TextIO) -> None:
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._pump, args=(stream,), daemon=True).start()

    async def read(self) -> str | None:
        return await self._lines.get()

    def _pump(self, stream: TextIO) -> None:
        for line in stream:
            if not self._put(line.rstrip("\n")):
                return
        self._put(None)

    def _put(self, line: str | None) -> bool:
        if self._loop.is_closed():
            return False
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
        return True


def open_lines() -> LineSource:
    """The source that suits stdin."""
    return TerminalLines() if sys.stdin.isatty() else StreamLines(sys.stdin)


def history_path() -> Path:
    """The history file, by the XDG rule."""
    state = os.environ.get("XDG_STATE_HOME")
    return Path(state or Path.home() / ".local" / "state") / "shoal" / "chat_history"
