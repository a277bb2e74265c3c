"""The loop: lines in, answers out, and what the slash commands do."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TextIO

import httpx

from services.client.chat.client import ChatClient
from services.client.chat.conversation import BadConversation, Conversation
from services.client.chat.lines import Interrupted, LineSource
from services.client.chat.meter import Meter, Stopwatch
from services.client.endpoint import ApiError

HELP = """\
/system TEXT      set the system message and forget the conversation; without TEXT: remove it
/set NAME VALUE   set temperature, max_tokens, top_p, seed, ...; without VALUE: the server's own
/set              list what is set
/model NAME       ask another model; without NAME: list those served
/retry            ask the last question again
/save FILE        write the conversation to a file
/load FILE        go on with a saved one
/stats            how fast the answers came
/clear            forget the conversation
/help             this list
/exit             leave, as Ctrl-D does
Ctrl-C stops an answer; what was said so far stays in the conversation.
Escape Enter makes a new line. Lines between two lines of \"\"\" are one message."""

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

Command = Callable[[str], Awaitable[None]]


class Shell:
    """One person's conversation.

    Answers alone go to `out`, so that a script can take them. With `stats`, each is followed by
    a line about its speed.
    """

    def __init__(
        self,
        client: ChatClient,
        conversation: Conversation,
        *,
        out: TextIO = sys.stdout,
        notes: TextIO = sys.stderr,
        stats: bool = False,
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._out = out
        self._notes = notes
        self._stats = stats
        self._meter = Meter()
        self._commands: dict[str, Command] = {
            "/system": self._set_system,
            "/set": self._set,
            "/model": self._choose_model,
            "/retry": self._retry,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._show_stats,
            "/clear": self._clear,
            "/reset": self._clear,
            "/help": self._help,
        }

    @property
    def commands(self) -> list[str]:
        """The words that begin a command."""
        return [*self._commands, "/exit"]

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
            if text in ("/exit", "/quit"):
                return
            if text.startswith("/"):
                await self._command(text)
            elif text:
                await self.ask(text)

    async def ask(self, text: str) -> bool:
        """Streams the answer to one message; whether it came to its end."""
        pieces: list[str] = []
        watch = Stopwatch()
        answer = asyncio.create_task(self._answer(text, pieces, watch))
        with _on_interrupt(answer):
            await asyncio.wait([answer])
        if pieces:
            print(file=self._out, flush=True)
        if answer.cancelled():
            self._note("stopped")
        elif (error := answer.exception()) is not None:
            if not isinstance(error, ApiError):
                raise error
            self._note(str(error))
            self._conversation.unanswered = text
            return False
        self._meter.answers.append(watch)
        if self._stats:
            self._note(f"[{watch}]", dim=True)
        self._conversation.add(text, "".join(pieces))
        return not answer.cancelled()

    async def _answer(self, question: str, pieces: list[str], watch: Stopwatch) -> None:
        talk = self._conversation
        watch.start()
        thinking = False
        stream = self._client.stream(talk.model, talk.messages(question), talk.settings)
        async with aclosing(stream):  # closed at Ctrl-C too: the server stops at once
            async for piece in stream:
                watch.take(piece)
                if piece.thought:
                    thinking = True
                    self._note(piece.thought, end="", dim=True)
                if piece.text:
                    if thinking:
                        self._note("\n")
                        thinking = False
                    pieces.append(piece.text)
                    print(piece.text, end="", file=self._out, flush=True)

    async def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            self._note(f"there is no command {name}; /help lists them")
            return
        try:
            await command(rest.strip())
        except (BadConversation, ApiError) as error:
            self._note(str(error))

    async def _set_system(self, text: str) -> None:
        self._conversation.system = text
        self._conversation.forget()
        self._note("the system message is set" if text else "no system message")

    async def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self._conversation.set(name, value.strip())
        settings = self._conversation.settings
        listed = ", ".join(f"{name} = {value}" for name, value in settings.items())
        self._note(listed or "nothing is set: the server's own settings")

    async def _choose_model(self, name: str) -> None:
        try:
            served = await self._client.models()
        except httpx.TransportError:
            raise ApiError(f"nothing answers at {self._client.url}")
        if not name:
            current = self._conversation.model
            self._note("\n".join(f"{'*' if one == current else ' '} {one}" for one in served))
        elif name in served:
            self._conversation.model = name
            self._note(f"asking {name} from now on")
        else:
            self._note(f"the model {name!r} is not served; there are: {', '.join(served)}")

    async def _retry(self, text: str) -> None:
        talk = self._conversation
        turns, unanswered = list(talk.turns), talk.unanswered
        question = talk.take_back()
        if question is None:
            self._note("there is no question to ask again")
            return
        await self.ask(question)
        if talk.unanswered:  # it failed: an answer that was there before stays
            talk.turns, talk.unanswered = turns, unanswered

    async def _save(self, file: str) -> None:
        self._conversation.save(_needed(file, "/save FILE"))
        self._note(f"saved to {file}")

    async def _load(self, file: str) -> None:
        self._conversation.load(_needed(file, "/load FILE"))
        turns = self._conversation.turns
        self._note(f"loaded {len(turns) // 2} questions and answers from {file}")

    async def _show_stats(self, text: str) -> None:
        self._note(str(self._meter))

    async def _clear(self, text: str) -> None:
        self._conversation.forget()
        self._note("the conversation is forgotten")

    async def _help(self, text: str) -> None:
        self._note(HELP)

    def _note(self, text: str, *, end: str = "\n", dim: bool = False) -> None:
        if dim and self._notes.isatty():
            text = f"{_DIM}{text}{_PLAIN}"
        print(text, file=self._notes, end=end, flush=True)


def _needed(value: str, usage: str) -> str:
    if not value:
        raise BadConversation(f"say {usage}")
    return value


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
