"""Holds processes to a share of a core each, as a container's CPU limit does.

    python -m bench.quota --pids 101,102 --share 0.2

Each process has an account that fills by its share of the time and is emptied by its CPU time;
while it is overdrawn the process is stopped. So a service can be made the bottleneck on a machine
that has not enough cores for it to be one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from bench import cpu
from services.common import process
from services.common.config import option, parse
from services.common.process import child_environment

_TICK_SECONDS = 0.002
_MOST_SAVED = 0.02  # seconds of CPU time that an idle process may have saved


@dataclass(frozen=True)
class QuotaConfig:
    """Whom to hold, and to what."""

    pids: tuple[str, ...] = option((), "processes", metavar="PID,...")
    share: float = option(0.2, "of a core, of each")


@dataclass(slots=True)
class Account:
    """What one process may still use, in seconds of CPU time."""

    pid: int
    used: float
    left: float = 0.0
    stopped: bool = False

    def settle(self, earned: float) -> None:
        """Books what was earned and used since the last time, and stops it or lets it go."""
        used = cpu.of_threads([self.pid])
        self.left = min(self.left + earned - (used - self.used), _MOST_SAVED)
        self.used = used
        if self.stopped != (self.left < 0):
            self.stopped = self.left < 0
            os.kill(self.pid, signal.SIGSTOP if self.stopped else signal.SIGCONT)


@asynccontextmanager
async def held(pids: Sequence[int], share: float) -> AsyncIterator[None]:
    """Inside, the processes get no more than their share; another process sees to it."""
    warden = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.quota", f"--share={share}"),
        f"--pids={','.join(map(str, pids))}",
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
    )
    assert warden.stdout is not None
    try:
        if await warden.stdout.readline() != b"holding\n":
            raise RuntimeError("the process that holds the others did not start")
        yield
        if warden.returncode is not None:
            raise RuntimeError("the process that held the others ended meanwhile")
    finally:
        if warden.returncode is None:
            warden.terminate()
        await warden.wait()
        _let_go(pids)  # should it have been killed


def _let_go(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def hold(config: QuotaConfig, stop: asyncio.Event) -> None:
    """Settles the accounts until told to stop."""
    pids = list(map(int, config.pids))
    accounts = [Account(pid, cpu.of_threads([pid])) for pid in pids]
    print("holding", flush=True)
    before = time.monotonic()
    try:
        while not stop.is_set():
            await asyncio.sleep(_TICK_SECONDS)  # the tick is what this process is
            now = time.monotonic()
            for account in accounts:
                account.settle(config.share * (now - before))
            before = now
    finally:
        _let_go(pids)


def main(argv: list[str]) -> None:
    """Runs until a signal."""
    config = parse(QuotaConfig, argv, prog="bench.quota", description=__doc__ or "")
    process.run(lambda stop: hold(config, stop))


if __name__ == "__main__":
    main(sys.argv[1:])
