"""Where the shell's lines come from: an editor with history on a terminal, else stdin."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TextIO

_QUOTES = '"""'


class Interrupted(Exception):
    """Ctrl-C while a line was being typed."""


class LineSource(Protocol):
    """Asks for one line after another."""

    async def read(self) -> str | None:
        """The next line; None at the end of input. Raises Interrupted on Ctrl-C."""
        ...


class TerminalLines:
    """prompt_toolkit with a history file: Enter sends, Escape Enter makes a new line."""

    def __init__(self, commands: Sequence[str] = ()) -> None:
        """`commands` are completed at the begin of a line."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        keys = KeyBindings()

        @keys.add("enter")
        def send(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        path = history_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._session: PromptSession[str] = PromptSession(
            history=FileHistory(str(path)),
            multiline=True,  # so that pasted lines stay together
            key_bindings=keys,
            prompt_continuation="  ",
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
        )

    async def read(self) -> str | None:
        try:
            return await self._session.prompt_async("> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise Interrupted


class StreamLines:
    """Plain lines of a pipe or file.

    They are read on a daemon thread: a blocked read of a pipe must not hold up the end. Bytes
    that are no text become U+FFFD.
    """

    def __init__(self, stream: TextIO) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._pump, args=(stream,), daemon=True).start()

    async def read(self) -> str | None:
        return await self._lines.get()

    def _pump(self, stream: TextIO) -> None:
        try:
            for line in stream:
                if not self._put(line.rstrip("\n")):
                    return
        except (OSError, ValueError) as error:
            print(f"shoal: cannot read on: {error}", file=sys.stderr)
        finally:
            self._put(None)  # also where reading failed: somebody waits for the next line

    def _put(self, line: str | None) -> bool:
        if self._loop.is_closed():
            return False
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
        return True


class Messages:
    """Joins lines to messages: those between two lines of three quotes are one."""

    def __init__(self, lines: LineSource) -> None:
        self._lines = lines

    async def read(self) -> str | None:
        line = await self._lines.read()
        if line is None or line.strip() != _QUOTES:
            return line
        inner: list[str] = []
        while (line := await self._lines.read()) is not None and line.strip() != _QUOTES:
            inner.append(line)
        return "\n".join(inner)


def open_lines(commands: Sequence[str] = ()) -> LineSource:
    """The source that suits stdin."""
    terminal = sys.stdin.isatty()
    return Messages(TerminalLines(commands) if terminal else StreamLines(sys.stdin))


def history_path() -> Path:
    """The history file, by the XDG rule."""
    state = os.environ.get("XDG_STATE_HOME")
    return Path(state or Path.home() / ".local" / "state") / "shoal" / "chat_history"
