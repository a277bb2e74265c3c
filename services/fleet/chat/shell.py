"""The conversation: lines in, answers out, and what the slash commands do."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import TextIO

from services.fleet.chat.client import ChatClient, ChatError, Turn
from services.fleet.chat.config import ChatConfig
from services.fleet.chat.lines import Interrupted, LineSource

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message and forget the conversation; without TEXT: remove it
/help          this list
/exit          leave, as Ctrl-D does
Ctrl-C stops an answer; what was said so far stays in the conversation."""


class Shell:
    """One person's conversation with one model."""

    def __init__(
        self,
        client: ChatClient,
        model: str,
        config: ChatConfig,
        *,
        out: TextIO = sys.stdout,
        notes: TextIO = sys.stderr,
    ) -> None:
        self._client = client
        self._model = model
        self._config = config
        self._out = out  # answers alone, so that a script can take them
        self._notes = notes
        self._system = config.system
        self._turns: list[Turn] = []

    async def run(self, lines: LineSource) -> None:
        """Asks and answers until the end of input or /exit."""
        while True:
            try:
                line = await lines.read()
            except Interrupted:
                self._note("Ctrl-D or /exit leaves")
                continue
            if line is None:
                return
            text = line.strip()
            if text.startswith("/"):
                if not self._command(text):
                    return
            elif text:
                await self.ask(text)

    async def ask(self, text: str) -> bool:
        """Streams the answer to one message; whether it came to its end."""
        turns = [*self._turns, {"role": "user", "content": text}]
        pieces: list[str] = []
        answer = asyncio.create_task(self._answer(turns, pieces))
        with _on_interrupt(answer):
            await asyncio.wait([answer])
        if pieces:
            print(file=self._out, flush=True)
        if answer.cancelled():
            self._note("stopped")
        elif (error := answer.exception()) is not None:
            if not isinstance(error, ChatError):
                raise error
            self._note(str(error))
            return False
        self._turns = [*turns, {"role": "assistant", "content": "".join(pieces)}]
        return not answer.cancelled()

    async def _answer(self, turns: list[Turn], pieces: list[str]) -> None:
        system: list[Turn] = [{"role": "system", "content": self._system}] if self._system else []
        stream = self._client.stream(
            self._model,
            system + turns,
            temperature=self._config.temperature,
            max_tokens=self._config.max_tokens,
        )
        async with aclosing(stream):  # closed at Ctrl-C too: the server stops at once
            async for piece in stream:
                pieces.append(piece)
                print(piece, end="", file=self._out, flush=True)

    def _command(self, text: str) -> bool:
        """Does what a slash command says; whether to go on."""
        name, _, rest = text.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._turns.clear()
            self._note("the conversation is forgotten")
        elif name == "/system":
            self._system = rest.strip()
            self._turns.clear()
            self._note("the system message is set" if self._system else "no system message")
        elif name == "/help":
            self._note(HELP)
        else:
            self._note(f"there is no command {name}; /help lists them")
        return True

    def _note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)


@contextmanager
def _on_interrupt(task: asyncio.Task[None]) -> Iterator[None]:
    """Has SIGINT cancel the task instead of ending the process."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
