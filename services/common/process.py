"""How a Shoal process starts, stops and dies.

Every child asks the kernel to kill it when its parent dies, so that a fleet
leaves nothing behind even when its supervisor is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from services.common import standard_streams
from services.common.errors import StartupError

_PR_SET_PDEATHSIG = 1
_COLLECT_AFTER = 10_000  # objects more than were freed
PARENT_ENV = "SHOAL_PARENT_PID"

log = logging.getLogger(__name__)


def child_environment() -> dict[str, str]:
    """The environment for a child that is to die with this process."""
    return {**os.environ, PARENT_ENV: str(os.getpid())}


def die_with_parent() -> None:
    """Asks for SIGKILL when the parent dies, if the parent asked for that.

    The parent's death is that of the *thread* that forked (prctl(2)), so
    supervisors spawn from their main thread.
    """
    expected = os.environ.pop(PARENT_ENV, None)
    if expected is None or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(expected):  # it died before we asked
        os._exit(1)


def raise_file_limit() -> int:
    """Allows this process as many open files as it may have; returns how many.

    A shell's soft limit, often 1,024, is for programs that use `select`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def run(
    main: Callable[[asyncio.Event], Coroutine[Any, Any, int | None]],
    *,
    abandon: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Runs a service's main coroutine and exits with its status.

    `main` gets an event that SIGTERM, SIGINT or SIGHUP sets: drain, then return. A second
    signal ends the process at once, after `abandon`, which may not wait for anything.
    uvloop is used where it loads.
    """
    standard_streams.secure()
    die_with_parent()
    _spare_collections()
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    try:
        with runner:
            status = runner.run(_with_signals(main, abandon)) or 0
    except StartupError as error:
        print(f"shoal: {error}", file=sys.stderr, flush=True)
        status = 1
    sys.exit(status)


def _spare_collections() -> None:
    """Keeps the collector of cycles from going over all that was imported, again and again.

    By default it does so after every few hundred requests, each time for some milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 20)


async def _with_signals(
    main: Callable[[asyncio.Event], Coroutine[Any, Any, int | None]], abandon: Callable[[], None]
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            try:
                abandon()
            finally:
                os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the last: a terminal closed
        loop.add_signal_handler(number, on_signal, number)
    return await main(stop) or 0
