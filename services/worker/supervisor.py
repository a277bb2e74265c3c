"""Starts the ranks, watches them, and leaves none behind.

Owns the rank processes, the socket to rank 0 and the question whether the engine
is alive. It does not know what a request is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from protos import engine_pb2
from services.common.errors import StartupError
from services.common.process import child_environment
from services.common.run_directory import RunDirectory
from services.worker.command_queue import PIECE_BYTES, CommandQueue
from services.worker.config import WorkerConfig, num_threads
from services.worker.framing import CONFIG_ENV, SOCKET_ENV, read_message, write_message
from services.worker.last_words import read_reason
from services.worker.rank_command import rank_command

log = logging.getLogger(__name__)

RANK_MODULE = "services.worker.rank"
_SOCKET = "rank"


_RUN_PREFIX = "shoal-run-"  # of the directory with rank 0's socket and torchrun's logs


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the supervisor waits, in seconds.

    A ready engine may be silent for max(`silence`, 10 x its recent step time); it
    sends a sign of life every two seconds while idle, so one rule serves both states.
    """

    connect: float = 180.0  # from the start of the processes to rank 0's connection
    load: float = 900.0  # between two reports of progress while loading
    silence: float = 10.0
    exit: float = 5.0  # from the goodbye to SIGKILL


class Ranks:
    """The rank processes of one engine, from `start` to `stop`.

    `lost` is set as soon as the engine cannot be used any more: its process ended,
    its connection closed, it said that it must exit, or it fell silent.
    """

    def __init__(
        self, config: WorkerConfig, *, limits: Limits | None = None, module: str = RANK_MODULE
    ) -> None:
        self.lost = asyncio.Event()
        self._config = config
        self._limits = limits or Limits()
        self._module = module
        self._on_event: Callable[[engine_pb2.EngineEvent], None] = lambda event: None
        self._on_responsive: Callable[[], None] = lambda: None
        self._directory: RunDirectory | None = None
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._commands = CommandQueue()
        self._unsent = asyncio.Event()  # the queue may hold something
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._exited = asyncio.Event()
        self._heard_at = 0.0
        self._step_seconds = 0.0  # a maximum that fades, so that one quick step hides nothing
        self._ready = False
        self._phase_changed = asyncio.Event()  # another window applies from now
        self._fatal = ""
        self._stuck = ""

    async def __aenter__(self) -> Ranks:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def responsive(self) -> bool:
        """The engine made a step, or said that it is idle, within the window."""
        if self.lost.is_set():
            return False
        return self._config.node_rank > 0 or self._silent_for() < self._window()

    async def start(
        self,
        on_event: Callable[[engine_pb2.EngineEvent], None],
        on_responsive: Callable[[], None],
    ) -> None:
        """Starts the processes and returns.

        `on_event` is called for each event of rank 0, `on_responsive` when `responsive`
        has changed while the engine is not lost. Raises StartupError if they have no room.
        """
        self._on_event, self._on_responsive = on_event, on_responsive
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        self._directory = self._make_directory()
        path = str(self._directory.path / _SOCKET)
        self._server = await asyncio.start_unix_server(self._read, path)
        environment = child_environment() | {
            CONFIG_ENV: json.dumps(dataclasses.asdict(self._config)),
            SOCKET_ENV: path,
            "OMP_NUM_THREADS": str(num_threads(self._config)),
        }
        # A session of its own: Ctrl-C in a terminal reaches the agent alone, which drains.
        self._process = await asyncio.create_subprocess_exec(
            *rank_command(self._config, self._module, self._directory.path),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        self._tasks = [
            asyncio.create_task(self._watch_exit(self._process)),
        ]
        if self._config.node_rank == 0:  # rank 0 is here, and gives signs of life
            self._tasks.append(asyncio.create_task(self._watch_silence()))

    def _make_directory(self) -> RunDirectory:
        try:
            return RunDirectory.beside(self._config.address, _RUN_PREFIX)
        except OSError as error:
            raise StartupError(f"cannot make a directory for the ranks: {error}") from error

    def send(self, command: engine_pb2.EngineCommand) -> None:
        """Queues a command for rank 0; dropped if it is gone, which `lost` tells.

        Never waits: a rank that stopped reading is found by its silence.
        """
        if self._writer is not None and not self._writer.is_closing():
            self._commands.add(command)
            self._unsent.set()

    def withdraw(self, handle: int) -> bool:
        """Takes back a submission that is still queued here; False if it is not."""
        return self._commands.withdraw(handle)

    async def _feed(self, writer: asyncio.StreamWriter) -> None:
        """Sends what is queued, as rank 0 reads it."""
        writer.transport.set_write_buffer_limits(high=PIECE_BYTES)
        with suppress(ConnectionError):  # it is gone, which the reader finds too
            while not writer.is_closing():
                await self._unsent.wait()
                self._unsent.clear()
                while (command := self._commands.next()) is not None:
                    write_message(writer, command)
                    await writer.drain()

    async def reason(self) -> str:
        """One sentence on why the engine was lost; waits a moment for the full story."""
        if not self._fatal and not self._stuck:
            try:
                async with asyncio.timeout(1.0):
                    await self._exited.wait()
            except TimeoutError:
                log.debug("the rank process still runs after its connection closed")
        if known := self._fatal or self._stuck or self._left_reason():
            return known
        status = self._process.returncode if self._process else None
        if status is None:
            return "the engine closed its connection"
        if status < 0:
            return f"the engine process was killed by {signal.Signals(-status).name}"
        return f"the engine process exited with status {status}"

    def _left_reason(self) -> str:
        return read_reason(str(self._directory.path / _SOCKET)) if self._directory else ""

    async def stop(self) -> None:
        """Ends every rank: a goodbye first, SIGKILL for what is left after the grace."""
        for task in self._tasks[1:]:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._server is not None:
            self._server.close()
        if self._process is not None:
            await self._end(self._process)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if self._writer is not None and not self._stuck:
            grace = self._limits.exit
            if self.lost.is_set():
                grace = min(1.0, grace)
            try:
                async with asyncio.timeout(grace):
                    await self._exited.wait()
            except TimeoutError:
                log.info("the ranks did not exit in %g s and are killed", grace)
        if not self._exited.is_set():
            # Ranks under torchrun lead sessions of their own; they die with torchrun.
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            await self._exited.wait()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._server is not None
        self._server.close()  # one rank 0, one connection
        self._writer = writer
        self._heard_at = asyncio.get_running_loop().time()
        self._phase_changed.set()
        self._tasks.append(asyncio.create_task(self._feed(writer)))
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    self._receive(await read_message(reader, engine_pb2.EngineEvent))
        finally:
            self._lose()

    def _receive(self, event: engine_pb2.EngineEvent) -> None:
        was_responsive = self.responsive
        self._heard_at = asyncio.get_running_loop().time()
        if self.responsive != was_responsive:
            self._on_responsive()
        if event.stats.step_us:
            self._step_seconds = max(event.stats.step_us / 1e6, 0.95 * self._step_seconds)
        if event.HasField("fatal"):
            self._fatal = event.fatal.message
            self._lose()
        if event.HasField("ready"):
            self._ready = True
            self._phase_changed.set()
        self._on_event(event)

    def _lose(self) -> None:
        self.lost.set()

    def _silent_for(self) -> float:
        return asyncio.get_running_loop().time() - self._heard_at

    def _window(self) -> float:
        if self._ready:
            return max(self._limits.silence, 10 * self._step_seconds)
        return self._limits.load if self._writer is not None else self._limits.connect

    async def _watch_exit(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._exited.set()
        self._lose()

    async def _watch_silence(self) -> None:
        """Sleeps until the window of the last event ends; a busy engine costs it nothing."""
        while True:
            try:
                async with asyncio.timeout(max(self._window() - self._silent_for(), 0.0) + 0.01):
                    await self._phase_changed.wait()
                self._phase_changed.clear()
            except TimeoutError:
                self._on_responsive()
                # The agent may be the one that was stopped or starved: what the rank
                # has sent meanwhile is read before it is judged.
                await asyncio.sleep(min(1.0, self._window() / 10))
                if self._silent_for() >= self._window():
                    break
        seconds = round(self._silent_for(), 1)
        if self._writer is None:
            self._stuck = f"the engine did not connect within {seconds} s of its start"
        else:
            self._stuck = f"the engine gave no sign of life for {seconds} s"
        self._lose()
