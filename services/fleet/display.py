"""What a person sees while a fleet loads: a live table on a terminal, plain lines elsewhere.

Everything goes to stderr; stdout is for the one line with the URL. What cannot be written, as on
a full disk or once nobody reads any more, is left out: a log is no reason to end a fleet.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.fleet.service import Service, State

_STYLES = {
    State.STARTING: "dim",
    State.LOADING: "yellow",
    State.READY: "green",
    State.FAILED: "red",
    State.STOPPING: "yellow",
    State.STOPPED: "dim",
}


class Display(Protocol):
    """Shows the services' states and passes their log lines on."""

    def update(self, services: Sequence[Service]) -> None:
        """Something about the services has changed."""
        ...

    def line(self, text: str) -> None:
        """A line that a service wrote: of its log, or to stderr."""
        ...

    def close(self) -> None:
        """The fleet is loaded, or has failed: only log lines follow."""
        ...


def open_display() -> Display:
    """The display that suits stderr."""
    return TerminalDisplay() if sys.stderr.isatty() else PlainDisplay(sys.stderr)


class SilentDisplay:
    """Shows nothing but the services' log lines."""

    def update(self, services: Sequence[Service]) -> None:
        """Nothing to show."""

    def line(self, text: str) -> None:
        _write(text, sys.stderr)

    def close(self) -> None:
        """Nothing to close."""


class PlainDisplay:
    """One line whenever a service changes its state or phase, while the fleet loads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: dict[str, tuple[State, str]] = {}
        self._open = True

    def update(self, services: Sequence[Service]) -> None:
        if not self._open:
            return
        for service in services:
            news = (service.state, service.progress.phase)
            if self._shown.get(service.spec.name) == news:
                continue
            self._shown[service.spec.name] = news
            self.line(f"shoal: {service.spec.name}: {describe(service)}")

    def line(self, text: str) -> None:
        _write(text, self._stream)

    def close(self) -> None:
        self._open = False


class TerminalDisplay:
    """A table that is redrawn in place, with a bar for each worker that loads."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(Table(), console=self._console, refresh_per_second=8, transient=True)
        with suppress(OSError):
            self._live.start()

    def update(self, services: Sequence[Service]) -> None:
        if self._live.is_started:
            with suppress(OSError):
                self._live.update(self._table(services))

    def line(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        with suppress(OSError):
            self._live.stop()

    def _table(self, services: Sequence[Service]) -> Table:
        table = Table.grid(padding=(0, 2))
        for service in services:
            progress = service.progress
            bar: ProgressBar | str = ""
            if service.state is State.LOADING and progress.total:
                bar = ProgressBar(total=progress.total, completed=progress.done, width=30)
            style = _STYLES[service.state]
            table.add_row(service.spec.name, Text(describe(service), style=style), bar)
        return table


def describe(service: Service) -> str:
    """The service's state in a few words."""
    if service.state is State.LOADING and service.progress.phase:
        return service.progress.phase
    return service.state.value


def _write(text: str, stream: TextIO) -> None:
    with suppress(OSError):
        print(text, file=stream, flush=True)
