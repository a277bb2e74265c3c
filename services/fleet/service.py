"""One service of the fleet over all its restarts.

It starts the process, follows its readiness through a probe, reports its death and
starts it again. It knows nothing of the other services, nor of what a service is.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import StartupError
from services.fleet.child import Child, Exit, is_announcement, sentence_of
from services.fleet.plan import ServiceSpec

log = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 10.0
_USER_MISTAKES = (1, 2)  # exit statuses of a StartupError and of a wrong command line


class State(enum.StrEnum):
    """Where a service stands."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    FAILED = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a probe found: ready, or loading and how far (`total` 0 is unknown)."""

    ready: bool
    phase: str = ""
    done: int = 0
    total: int = 0


class Probe(Protocol):
    """Follows one service's readiness."""

    def watch(self, service: Service) -> AsyncIterator[Progress]:
        """News of the process that runs now; is closed when it ends."""
        ...


class Service:
    """A service that is kept running until it is stopped."""

    def __init__(
        self,
        spec: ServiceSpec,
        probe: Probe,
        environment: Mapping[str, str],
        *,
        on_change: Callable[[], None] = lambda: None,
        on_output: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.spec = spec
        self.state = State.STARTING
        self.progress = Progress(ready=False)
        self.pid: int | None = None
        # Of the process that runs now, until it is ready: who reads it is the probe.
        self.stdout: asyncio.Queue[str] = asyncio.Queue()
        self._probe = probe
        self._environment = environment
        self._on_change = on_change
        self._on_output = on_output
        self._child: Child | None = None
        self._was_ready = False
        self._was_ever_ready = False
        self._stopping = asyncio.Event()
        self._ready = asyncio.Event()

    async def run(self) -> None:
        """Keeps a process alive until `stop`.

        Raises:
            StartupError: the very first process ended with a user mistake before it was
                ready; the message is its own.
        """
        backoff = _FIRST_BACKOFF_SECONDS
        while not self._stopping.is_set():
            was_ready = await self._run_once()
            if self._stopping.is_set():
                break
            if was_ready:
                backoff = _FIRST_BACKOFF_SECONDS
            log.warning("starting %s again in %g s", self.spec.name, backoff)
            try:
                async with asyncio.timeout(backoff):
                    await self._stopping.wait()
            except TimeoutError:
                backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
        self._enter(State.STOPPED)

    async def wait_ready(self) -> None:
        """Returns once the process that runs is ready."""
        await self._ready.wait()

    async def stop(self, timeout: float) -> None:
        """Ends the process: SIGTERM, and SIGKILL after `timeout` seconds."""
        self._stopping.set()
        child = self._child
        if child is None:
            return
        self._enter(State.STOPPING)
        child.terminate()
        try:
            async with asyncio.timeout(timeout):
                await child.wait()
        except TimeoutError:
            name = self.spec.name
            log.warning("%s (pid %d) did not stop in %g s; killing it", name, child.pid, timeout)
            child.kill()
            await child.wait()

    def kill(self) -> None:
        """Ends the process at once and for good."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    async def _run_once(self) -> bool:
        """Runs one process to its end; whether it was ready at some time."""
        self.stdout, self._was_ready = asyncio.Queue(), False
        self._enter(State.STARTING)
        child = await Child.spawn(
            self.spec.command, self._environment, out=self._on_stdout, err=self._on_stderr
        )
        self._child, self.pid = child, child.pid
        if self._stopping.is_set():  # while it was being started, with nobody to tell
            child.kill()
        self._on_change()
        ended = asyncio.create_task(child.wait())
        probe = asyncio.create_task(self._follow())
        try:
            await asyncio.wait([ended, probe], return_when=asyncio.FIRST_COMPLETED)
            if probe.done():
                probe.result()  # raises: a probe fails only by a fault of ours
            end = await ended
        finally:
            child.kill()
            ended.cancel()
            probe.cancel()
            await asyncio.gather(ended, probe, return_exceptions=True)
            self._child, self.pid = None, None
            self._ready.clear()
        if not self._stopping.is_set():
            self._report(end, child.pid)
        return self._was_ready

    def _report(self, end: Exit, pid: int) -> None:
        if end.code in _USER_MISTAKES and not self._was_ever_ready:
            raise StartupError(end.reason or f"{self.spec.name} {end}")
        self._enter(State.FAILED)
        log.error("%s (pid %d) %s", self.spec.name, pid, end)

    async def _follow(self) -> None:
        async for progress in self._probe.watch(self):
            self.progress = progress
            if progress.ready:
                self._was_ready = self._was_ever_ready = True
                self._ready.set()
                self._enter(State.READY)
            else:
                self._ready.clear()
                self._enter(State.LOADING)

    def _on_stdout(self, line: str) -> None:
        if not is_announcement(line):
            self._on_output(line)
        elif not self._was_ready:
            self.stdout.put_nowait(line)

    def _on_stderr(self, line: str) -> None:
        # Before it was ever ready, its last sentence is what the whole fleet ends with.
        if self._was_ever_ready or sentence_of(line) is None:
            self._on_output(line)

    def _enter(self, state: State) -> None:
        if not (self._stopping.is_set() and state in (State.LOADING, State.READY)):
            self.state = state
        self._on_change()
