"""One service as its own process: started, killed, kept away, started again.

An `Instance` is kept running, as an orchestrator would, unless it is held down. It tells
the deaths that somebody caused from those that nobody did.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import psutil

from services.common.process import child_environment
from tests.chaos.client import get

Role = Literal["worker", "tokenizer", "detokenizer", "gateway"]

_READY_SECONDS = 180.0
_STOP_SECONDS = 60.0


async def until(condition: Callable[[], Awaitable[bool]], seconds: float, what: str) -> None:
    """Asks another process until it says so; it has no event to wait on."""
    try:
        async with asyncio.timeout(seconds):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {what}")


class Instance:
    """A service process and its successors."""

    def __init__(self, role: Role, index: int, directory: Path, flags: list[str]) -> None:
        self.role = role
        self.name = f"{role}-{index}"
        self.starts = 0
        self.unasked: list[str] = []  # ends that nobody caused
        self.draining = False
        self.address = ""  # a gateway's, known once it listens
        self.grpc_address = ""
        self.socket = directory / f"{self.name}.sock"
        self.log = directory / f"{self.name}.txt"
        self._admin = directory / f"{self.name}.admin"
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None
        self._caused: dict[int, set[int]] = {}  # pid -> exit statuses that are accounted for
        self._up = asyncio.Event()
        self._up.set()
        self._keeper: asyncio.Task[None] | None = None
        self._ending = False

    # -- its life

    def start(self) -> None:
        """Keeps a process running from now on."""
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> int:
        """Ends it for good, in order; returns its exit status."""
        self._ending = True
        process = self._process
        if self._keeper is None or process is None:
            return 0
        if process.returncode is None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM, exits=(0,))
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        finally:
            self.kill()
            self._up.set()
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        return process.returncode or 0

    async def _keep(self) -> None:
        while not self._ending and not self.unasked:
            await self._up.wait()
            with self.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env={**child_environment(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            self.starts += 1
            self.draining = False
            await self._see_out(self._process)

    async def _see_out(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with self.log.open("ab", buffering=0) as log:  # others read it meanwhile
            async for line in process.stdout:
                if line.startswith(b'{"http":'):
                    endpoints = json.loads(line)
                    self.address, self.grpc_address = endpoints["http"], endpoints["grpc"]
                else:
                    log.write(line)
        status = await process.wait()
        if self.role == "gateway":
            self.address = ""
        if status not in self._caused.pop(process.pid, set()):
            self.unasked.append(f"{self.name} (pid {process.pid}) ended with status {status}")

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "services", self.role, *self._flags]
        if self.role == "gateway":
            return [*command, "--port=0", "--grpc-port=0"]
        return [*command, f"--address=unix:{self.socket}", f"--admin-address=unix:{self._admin}"]

    # -- what faults do to it

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def open(self) -> bool:
        """A gateway that a load balancer would send new requests to."""
        return bool(self.address) and not self.draining

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def send(self, number: signal.Signals, *, exits: tuple[int, ...] = ()) -> None:
        """Sends a signal, after which the process may end with one of `exits`."""
        if self.alive:
            self.draining = self.draining or number == signal.SIGTERM
            self._caused.setdefault(self.pid, set()).update(exits)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send(signal.SIGKILL, exits=(-signal.SIGKILL,))

    def signal_rank(self, number: signal.Signals) -> bool:
        """Sends a signal to the worker's rank alone; False if there is none (yet).

        The agent may, or with SIGKILL must, end with status 1 after it.
        """
        ranks = self.processes()[1:]
        if not ranks:
            return False
        self._caused.setdefault(self.pid, set()).add(1)
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks[-1].send_signal(number)
        return True

    def hold_down(self) -> None:
        """Kills it, and does not start it again until `let_up`."""
        self._up.clear()
        self.kill()

    def let_up(self) -> None:
        self._up.set()

    async def restarted(self, since: int) -> None:
        """Returns when it has started more than `since` times and is ready."""
        await until(self._started_after(since), _READY_SECONDS, f"{self.name} starts again")
        await self.ready()

    def _started_after(self, since: int) -> Callable[[], Awaitable[bool]]:
        async def check() -> bool:
            return self.starts > since and self.alive

        return check

    # -- what can be asked of it

    @property
    def admin(self) -> str:
        """Where /readyz and /metrics are."""
        return self.address if self.role == "gateway" else f"unix:{self._admin}"

    async def is_ready(self) -> bool:
        scope = "?scope=gateway" if self.role == "gateway" else ""
        return bool(self.admin) and (await get(self.admin, f"/readyz{scope}"))[0] == 200

    async def ready(self) -> None:
        """Returns when it takes work; AssertionError if it has ended though nobody caused it."""

        async def is_ready() -> bool:
            assert not self.unasked, (self.unasked, self.log.read_text(errors="replace")[-2000:])
            return await self.is_ready()

        await until(is_ready, _READY_SECONDS, f"{self.name} is ready")

    async def metrics(self) -> dict[str, float]:
        """Its metrics by sample name with labels; empty if it does not answer."""
        status, text = await get(self.admin, "/metrics") if self.admin else (0, "")
        lines = text.splitlines() if status == 200 else []
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def processes(self) -> list[psutil.Process]:
        """The service's process and, for a worker, its ranks; torchrun stands between them."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def faults_logged(self) -> list[str]:
        """Lines of its log that tell of a fault of ours, not of a fault that was caused."""
        text = self.log.read_text(errors="replace")
        words = ("Traceback", "fault in", "IntegrityError", "never retrieved", "never awaited")
        return [line for line in text.splitlines() if any(word in line for word in words)]
