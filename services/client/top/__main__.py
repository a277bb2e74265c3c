"""`shoal top`: looks at the fleet again and again until `q`, or once for a script."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from services.client.endpoint import ApiError, Endpoint
from services.client.top.config import ServiceFilter, SortKey, TopConfig
from services.client.top.source import FleetSource, decode
from services.client.top.view import Choices, Series, screen
from services.common import process
from services.common.config import parse
from services.common.errors import StartupError
from services.gateway.watch.shapes import FleetSnapshot

_KEYS = "q quit   s, S sort by {sort}   f show {service}"


def main(argv: Sequence[str]) -> NoReturn:
    """Exits 0 after `q` or Ctrl-C; 1 after one sentence if there is no fleet to see."""
    config = parse(
        TopConfig, argv, prog="shoal top", description="Shows a fleet in the terminal, live."
    )
    process.run(lambda stop: _top(config, stop))


async def _top(config: TopConfig, stop: asyncio.Event) -> None:
    async with FleetSource(Endpoint.of(config)) as source:
        try:
            if config.json:
                await _print_json(source, config, stop)
            elif config.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
                _print_table(decode(await source.read()), config)
            else:
                await Screen(source, config, stop).run()
        except ApiError as error:
            raise StartupError(str(error))


async def _print_json(source: FleetSource, config: TopConfig, stop: asyncio.Event) -> None:
    while not stop.is_set():
        print((await source.read()).decode(), flush=True)
        if config.once:
            return
        await _pause(stop, config.interval)


def _print_table(snapshot: FleetSnapshot, config: TopConfig) -> None:
    series = Series()
    series.add(snapshot)
    # A pipe is as wide as it needs to be: nothing is cut there.
    console = Console() if sys.stdout.isatty() else Console(width=240)
    console.print(screen(snapshot, _choices(config), series))


def _choices(config: TopConfig) -> Choices:
    return Choices(cast(ServiceFilter, config.service), cast(SortKey, config.sort))


class Screen:
    """The live view. It stays when the gateway goes, says so, and goes on when it is back."""

    def __init__(self, source: FleetSource, config: TopConfig, stop: asyncio.Event) -> None:
        self._source = source
        self._interval = config.interval
        self._stop = stop
        self._choices = _choices(config)
        self._series = Series()
        self._snapshot: FleetSnapshot | None = None
        self._fault = ""
        self._live = Live(screen=True, auto_refresh=False)

    async def run(self) -> None:
        """Raises ApiError if the first look fails."""
        self._take(decode(await self._source.read()))
        with self._live, _keys(self._on_key):
            self._draw()
            while not self._stop.is_set():
                await _pause(self._stop, self._interval)
                try:
                    self._take(decode(await self._source.read()))
                    self._fault = ""
                except ApiError as error:
                    self._fault = str(error)
                self._draw()

    def _take(self, snapshot: FleetSnapshot) -> None:
        self._snapshot = snapshot
        self._series.add(snapshot)

    def _on_key(self, key: str) -> None:
        if key in ("q", "Q"):
            self._stop.set()
        else:
            self._choices.press(key)
            self._draw()

    def _draw(self) -> None:
        assert self._snapshot is not None, "looked at"
        parts: list[RenderableType] = [screen(self._snapshot, self._choices, self._series), Text()]
        if self._fault:
            parts.append(Text(f"{self._fault}; what is shown is old", style="bold red"))
        keys = _KEYS.format(sort=self._choices.sort, service=self._choices.service)
        self._live.update(Group(*parts, Text(keys, style="dim")), refresh=True)


@contextmanager
def _keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_key` for each key that is pressed, without waiting for Enter and unseen."""
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        data = os.read(terminal, 64)
        if not data:  # the terminal has gone
            on_key("q")
        for key in data.decode("utf-8", "replace"):
            on_key(key)

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    """Until `stop`, or for some time."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return


if __name__ == "__main__":
    main(sys.argv[1:])
