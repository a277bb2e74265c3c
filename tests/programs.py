"""Programs that tests start: what they print, and that none is left. Knows nothing of Shoal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self


class Program:
    """A process, ended when the context is left; `log` collects the lines that it prints.

    `env` is added to this process's environment.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.log: list[str] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                with self._changed:
                    self.log.append(line.rstrip("\n"))
                    self._changed.notify_all()

    def wait_for_line(
        self, pattern: str | re.Pattern[str], *, timeout: float = 60.0
    ) -> re.Match[str]:
        """The match in the first line, printed already or to come, that has one."""
        pattern = re.compile(pattern)
        deadline = time.monotonic() + timeout
        seen = 0
        with self._changed:
            while True:
                for line in self.log[seen:]:
                    if match := pattern.search(line):
                        return match
                seen = len(self.log)
                left = deadline - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._reader.is_alive()):
                    shown = "\n".join(self.log[-60:])
                    raise AssertionError(f"no line matches {pattern.pattern!r} in:\n{shown}")
                self._changed.wait(min(left, 0.5))

    def stop(self) -> int:
        """Ends it, and returns the exit status."""
        return self._end(signal.SIGTERM, timeout=30.0)

    def _end(self, how: signal.Signals, timeout: float) -> int:
        status = end(self.process, how, timeout=timeout)
        self._reader.join(10)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def end(
    process: subprocess.Popen[str] | subprocess.Popen[bytes],
    how: signal.Signals = signal.SIGTERM,
    *,
    timeout: float = 30.0,
) -> int:
    """Ends a process, if it has not ended yet: asks it to, and kills it after the timeout.

    Returns its exit status.
    """
    if process.poll() is None:
        process.send_signal(how)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return process.returncode


def eventually(
    check: Callable[[], bool], *, timeout: float, what: Callable[[], object] | str = "condition"
) -> float:
    """Waits until `check` holds and returns the seconds it took.

    Another process's state can only be asked for, not awaited, so this polls.
    """
    start = time.monotonic()
    pause = threading.Event()
    while not check():
        if time.monotonic() - start > timeout:
            detail = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout} s: {detail}")
        pause.wait(0.02)
    return time.monotonic() - start
