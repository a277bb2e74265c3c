"""What is shown while a fleet loads."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from services.fleet.display import PlainDisplay, SilentDisplay, TerminalDisplay
from services.fleet.plan import ServiceSpec
from services.fleet.service import Progress, Service, State


class NoProbe:
    async def watch(self, service: Service) -> AsyncIterator[Progress]:
        yield Progress(ready=True)


@pytest.fixture
def worker() -> Service:
    return Service(ServiceSpec("worker-0", "worker", ("true",)), NoProbe(), {})


def test_plain_lines_tell_each_change_once_and_stop_when_loaded(worker: Service) -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.update([worker])
    worker.state = State.LOADING
    for done in range(3):
        worker.progress = Progress(False, "loading weights", done, 3)
        display.update([worker])
    worker.state = State.READY
    display.update([worker])
    display.line("a log line")
    display.close()
    worker.state = State.FAILED
    display.update([worker])
    assert stream.getvalue().splitlines() == [
        "shoal: worker-0: starting",
        "shoal: worker-0: loading weights",
        "shoal: worker-0: ready",
        "a log line",
    ]


def test_the_terminal_shows_a_bar_and_passes_lines_unchanged(worker: Service) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    display = TerminalDisplay(console)
    worker.state = State.LOADING
    worker.progress = Progress(False, "loading weights", 1, 2)
    display.update([worker])
    display.line("[brackets] stay " + "x" * 100)
    display.close()
    shown = stream.getvalue()
    assert "loading weights" in shown
    assert "━" in shown
    assert "[brackets] stay " + "x" * 100 in shown


class Unwritable(io.StringIO):
    """A log whose disk is full, or whose reader has gone."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_cannot_be_written_is_left_out(
    worker: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Unwritable())
    terminal = Console(file=Unwritable(), force_terminal=True, width=80)
    for display in (PlainDisplay(Unwritable()), TerminalDisplay(terminal), SilentDisplay()):
        display.update([worker])
        display.line("a log line")
        display.close()
