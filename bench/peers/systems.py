"""How each system is started: its processes, by role, and where it listens."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench import announced, cpu
from bench.peers.steps import NAME
from services.client.answer import Failure
from services.client.connection import Origin, Pool
from services.common.process import child_environment

ROOT = Path(__file__).parent.parent.parent
_READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Site:
    """Where one run of a system has its files, and what its stub worker sends."""

    directory: Path
    model: Path
    token_ids: Sequence[int]

    @property
    def report(self) -> Path:
        """Where the stub says when it sent what."""
        return self.directory / "sent.json"

    @property
    def tokens(self) -> str:
        return ",".join(map(str, self.token_ids))


@dataclass(slots=True)
class Running:
    """A started system; CPU time counts a process with all that it started."""

    origin: Origin
    processes: dict[str, psutil.Process]

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far, by role, and this process's as the client's."""
        spent = {role: cpu.of_family(root) for role, root in self.processes.items()}
        return {**spent, "client": cpu.of_process(psutil.Process())}


class System:
    """One system under test."""

    name = ""

    @asynccontextmanager
    async def run(self, site: Site) -> AsyncIterator[Running]:
        """Starts it, waits until it answers, and stops it."""
        async with AsyncExitStack() as stack:
            running = await self._start(site, stack)
            await _until_it_answers(running.origin)
            yield running

    async def _start(self, site: Site, stack: AsyncExitStack) -> Running:
        raise NotImplementedError


@dataclass(frozen=True)
class Shoal(System):
    """The real gateway, tokenizer and, with `detokenizer`, detokenizer, over a stub worker."""

    detokenizer: bool = True
    max_running: int = 1 << 16  # requests that the worker says it can run

    @property
    def name(self) -> str:  # type: ignore[override]
        return "shoal" if self.detokenizer else "shoal, detokenizers 0"

    async def _start(self, site: Site, stack: AsyncExitStack) -> Running:
        children: dict[str, psutil.Process] = {}
        addresses = {
            role: f"unix:{site.directory}/{role}" for role in ("worker", "tokenizer", "detokenizer")
        }

        async def start(role: str, *command: str) -> asyncio.subprocess.Process:
            child = await stack.enter_async_context(_child([sys.executable, "-m", *command]))
            children[role] = psutil.Process(child.pid)
            return child

        worker = await start(
            *("worker", "bench.peers.shoal_worker", f"--address={addresses['worker']}"),
            *(f"--tokens={site.tokens}", f"--report={site.report}", f"--model={NAME}"),
            f"--max-running-requests={self.max_running}",
        )
        texts = ("tokenizer", "detokenizer") if self.detokenizer else ("tokenizer",)
        for role in texts:
            await start(
                *(role, "services", role, f"--address={addresses[role]}"),
                *(f"--model={site.model}", f"--served-model-name={NAME}", "--log-level=warning"),
            )
        decoder = (
            f"--detokenizer-addresses={addresses['detokenizer']}"
            if self.detokenizer
            else f"--model={site.model}"
        )
        gateway = await start(
            *("gateway", "services", "gateway", "--port=0", "--grpc-port=-1"),
            *("--log-level=warning", "--hold-timeout=60", decoder),
            f"--worker-addresses={addresses['worker']}",
            f"--tokenizer-addresses={addresses['tokenizer']}",
        )
        await _line(worker)
        async with asyncio.timeout(_READY_SECONDS):
            origin = Origin.of("http://" + (await announced.endpoints(gateway))["http"])
        return Running(origin, children)


@dataclass(frozen=True)
class MiniSglang(System):
    """Its frontend and tokenizer processes from a checkout, over a stub scheduler."""

    checkout: Path = field(default_factory=Path)
    python: str = ""
    name = "mini-sglang"

    async def _start(self, site: Site, stack: AsyncExitStack) -> Running:
        port = _free_port()
        command = [
            *(self.python, "-m", "bench.peers.mini_sglang_server", "--port", str(port)),
            *("--model", str(site.model), "--tokens", site.tokens, "--report", str(site.report)),
        ]
        paths = os.pathsep.join([str(self.checkout / "python"), str(ROOT)])
        child = await stack.enter_async_context(_child(command, {"PYTHONPATH": paths}))
        return Running(Origin("127.0.0.1", port), {"all its processes": psutil.Process(child.pid)})


@dataclass(frozen=True)
class Smg(System):
    """The Rust gateway in gRPC mode, over a stub worker."""

    python: str = ""
    name = "smg"

    async def _start(self, site: Site, stack: AsyncExitStack) -> Running:
        worker_port, port, metrics_port = _free_port(), _free_port(), _free_port()
        environment = {"PYTHONPATH": str(ROOT)}
        worker = await stack.enter_async_context(
            _child(
                [
                    *(self.python, "-m", "bench.peers.smg_worker", "--port", str(worker_port)),
                    *("--model", str(site.model), "--tokens", site.tokens),
                    *("--report", str(site.report)),
                ],
                environment,
            )
        )
        await _line(worker)
        gateway = await stack.enter_async_context(
            _child(
                [
                    *(str(Path(self.python).with_name("smg")), "launch"),
                    *("--host", "127.0.0.1", "--port", str(port)),
                    *("--worker-urls", f"grpc://127.0.0.1:{worker_port}"),
                    *("--model-path", str(site.model), "--policy", "round_robin"),
                    *("--prometheus-port", str(metrics_port), "--log-level", "warn"),
                ],
                environment,
            )
        )
        processes = {"worker": psutil.Process(worker.pid), "gateway": psutil.Process(gateway.pid)}
        return Running(Origin("127.0.0.1", port), processes)


@asynccontextmanager
async def _child(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=None if os.environ.get("SHOAL_BENCH_LOUD") else asyncio.subprocess.DEVNULL,
        env={**child_environment(), "HF_HUB_OFFLINE": "1", **(environment or {})},
        cwd=ROOT,
    )
    try:
        yield child
    finally:
        family: list[psutil.Process] = []
        if child.returncode is None:
            family = psutil.Process(child.pid).children(recursive=True)
            child.terminate()
        for one in family:  # a peer may leave its own behind
            with suppress(psutil.NoSuchProcess):
                one.terminate()
        await child.wait()
        await asyncio.to_thread(psutil.wait_procs, family, timeout=5)


async def _line(child: asyncio.subprocess.Process) -> bytes:
    assert child.stdout is not None
    async with asyncio.timeout(_READY_SECONDS):
        return await child.stdout.readline()


async def _until_it_answers(origin: Origin) -> None:
    """Asks for a token until one comes: the peers' readiness differs in form."""
    body = chat_body("ready?", 1)
    async with asyncio.timeout(_READY_SECONDS):
        while True:
            pool = Pool(origin)
            try:
                await pool.post("/v1/chat/completions", body, timeout=10)
            except Failure as failure:
                if os.environ.get("SHOAL_BENCH_LOUD"):
                    print(failure.kind, failure, file=sys.stderr)
                await asyncio.sleep(0.2)
            else:
                return
            finally:
                pool.close()


def chat_body(prompt: str, max_tokens: int, top_p: float = 1.0) -> bytes:
    """A streamed chat request in the words that every system knows."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "top_p": top_p,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(body).encode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
