"""`shoal chat`: finds a server, or starts a fleet of its own, and opens the shell."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

import httpx

from services.client.chat.client import ChatClient
from services.client.chat.config import ChatConfig
from services.client.chat.conversation import Conversation
from services.client.chat.lines import open_lines
from services.client.chat.shell import Shell
from services.client.endpoint import DEFAULT_URL, ApiError, Endpoint
from services.common import logs
from services.common.config import parse
from services.common.errors import StartupError


def main(argv: Sequence[str]) -> NoReturn:
    """Chats until Ctrl-D; with --prompt exits 1 if the answer failed."""
    config = parse(
        ChatConfig, argv, prog="shoal chat", description="Chats with a model in the terminal."
    )
    try:
        status = asyncio.run(chat(config))
    except (StartupError, ApiError) as error:
        print(f"shoal: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


async def chat(config: ChatConfig) -> int:
    """Runs the whole chat and returns the exit status."""
    async with _server(config) as (url, name), ChatClient(Endpoint.of(config, url)) as client:
        model = name or next(iter(await client.models()), "")
        on_terminal = sys.stdin.isatty() and not config.prompt
        shell = Shell(client, _conversation(config, model), stats=on_terminal)
        if config.prompt:
            return 0 if await shell.ask(config.prompt) else 1
        if on_terminal:
            print(f"Chatting with {model} at {url}; /help lists what you can do", file=sys.stderr)
        await shell.run(open_lines(shell.commands))
    return 0


def _conversation(config: ChatConfig, model: str) -> Conversation:
    given = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    settings = {name: value for name, value in given.items() if value is not None}
    return Conversation(model, config.system, settings)


@asynccontextmanager
async def _server(config: ChatConfig) -> AsyncIterator[tuple[str, str]]:
    """The URL of a server that answers, and the model to ask there (empty: the first).

    A fleet of our own lives as long as the context.
    """
    url = config.url or DEFAULT_URL
    if await _answers(config, url):
        yield url, config.model
        return
    if config.url:
        raise StartupError(f"nothing answers at {url}")
    # Imported here: a chat with a running fleet needs none of it.
    from services.fleet.config import FleetConfig
    from services.fleet.display import open_display
    from services.fleet.extras import missing
    from services.fleet.local import LocalFleet

    if problem := missing(("gateway", "worker")):
        raise StartupError(f"nothing answers at {url}, and no fleet can be started: {problem}")
    print(f"nothing answers at {url}; starting a fleet", file=sys.stderr)
    argv = ["--port=0", "--grpc-port=-1", "--log-level=warning"]
    argv += [f"--model={config.model}"] if config.model else []
    fleet_config = parse(FleetConfig, argv, prog="shoal chat", description="")
    display = open_display()
    logs.setup("fleet", level="warning")
    async with LocalFleet(fleet_config, display) as fleet:
        yield fleet.url, fleet.model


async def _answers(config: ChatConfig, url: str) -> bool:
    async with ChatClient(Endpoint.of(config, url)) as client:
        try:
            await client.models()
        except httpx.TransportError:
            return False
    return True
