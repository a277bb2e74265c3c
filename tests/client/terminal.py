"""A program on a pseudo-terminal, as a person has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

from tests.programs import end

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>78]|\r")


def _environment() -> dict[str, str]:
    """Without the size that readline left there, which programs believe more than the terminal."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {**kept, "TERM": "xterm-256color"}


class Terminal:
    """`shoal` with some words on a terminal of 160 columns; `shown` is all that it wrote."""

    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services", *words],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env={**_environment(), **(env or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )
        os.close(follower)
        self.shown = ""

    def send(self, text: str) -> None:
        """Types; "\\x03" is Ctrl-C, "\\r" Enter."""
        os.write(self._leader, text.encode())

    def expect(self, text: str, *, after: int = 0, timeout: float = 60.0) -> int:
        """Waits until `text` is shown after a place, and returns the place behind it."""
        deadline = time.monotonic() + timeout
        while (found := self.shown.find(text, after)) < 0:
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"no {text!r} in what was shown:\n{self.shown[-3000:]}")
        return found + len(text)

    def end(self, *, timeout: float = 60.0) -> int:
        """Reads to the end and returns the exit status."""
        while self._read(timeout):
            pass
        return self.process.wait(timeout)

    def _read(self, timeout: float) -> bool:
        """Takes in what comes next; False if nothing came, or nothing more will."""
        if not select.select([self._leader], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self._leader, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        if b"\x1b[6n" in data:  # where is the cursor?
            os.write(self._leader, b"\x1b[1;1R")
        self.shown += _ESCAPES.sub("", data.decode("utf-8", "replace"))
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end(self.process, signal.SIGKILL)
        os.close(self._leader)
