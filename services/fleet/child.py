"""One child process: its start, the lines it prints and its end.

A child leads a session of its own, so that a terminal's Ctrl-C reaches only the
supervisor, and is killed by the kernel when the supervisor dies.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

_SENTENCE = re.compile(r"shoal(?: [a-z]+)?: (.+)")

OnLine = Callable[[str], None]

_TAIL_LINES = 20  # of stderr, from which the reason of a failed start is taken
_CHUNK_BYTES = 65536
_DRAIN_SECONDS = 1.0  # for output that is still in the pipes when a child has ended


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended; a negative code is minus the number of the signal."""

    code: int
    last_lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exited with status {self.code}"
        try:
            return f"was killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was killed by signal {-self.code}"

    @property
    def reason(self) -> str:
        """The sentence it left on stderr, if any: the last after `shoal:` or `shoal worker:`."""
        for line in reversed(self.last_lines):
            if (sentence := sentence_of(line)) is not None:
                return sentence
        return self.last_lines[-1] if self.last_lines else ""


def sentence_of(line: str) -> str | None:
    """What follows `shoal:` or `shoal worker:` in a line with which a service gives up."""
    match = _SENTENCE.match(line)
    return match.group(1) if match else None


def is_announcement(line: str) -> bool:
    """Whether a gateway tells its addresses, in the one line on stdout that is no log line."""
    return line.startswith('{"http":')


class Child:
    """A running process."""

    def __init__(self, process: asyncio.subprocess.Process, out: OnLine, err: OnLine) -> None:
        self._process = process
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

        def keep(line: str) -> None:
            if line.strip():
                self._tail.append(line)
            err(line)

        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            asyncio.create_task(_forward(process.stdout, out)),
            asyncio.create_task(_forward(process.stderr, keep)),
        ]

    @classmethod
    async def spawn(
        cls, command: Sequence[str], environment: Mapping[str, str], *, out: OnLine, err: OnLine
    ) -> Child:
        """Starts a process whose lines go to `out` and `err`. Call it from the main thread."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        return cls(process, out, err)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> Exit:
        """Returns once it has ended and its last lines were read."""
        code = await self._process.wait()
        # A grandchild that outlives it may hold the pipes open.
        done, late = await asyncio.wait(self._readers, timeout=_DRAIN_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()
        return Exit(code, tuple(self._tail))

    def terminate(self) -> None:
        """Asks it to drain and leave."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and whatever it started in its session, at once."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


async def _forward(stream: asyncio.StreamReader, on_line: OnLine) -> None:
    async for line in _lines(stream):
        on_line(line)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length; `StreamReader.readline` refuses long ones."""
    rest = b""
    while chunk := await stream.read(_CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
