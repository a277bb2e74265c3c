"""What a fleet costs as it grows: CPU a token and a request, from 2 to 64 workers, 1 to 8 gateways.

    python -m bench.fleet_sim

Gateways, tokenizer and detokenizer are the real processes. Workers are simulated, many to a
process (bench/sim_workers.py). Every engine steps at a steady pace, slow enough that the
machine is never full, and what is measured is the CPU time of each process: so the figures
hold on a machine whose wall clock others share. `bench.fleet_model` fits them all at once, and how
well the fit explains each point is their spread.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bench import announced, cpu, figures
from bench.fleet_model import HOSTS, Point, fit, report
from services.client.connection import Origin, Pool
from services.common import process
from services.common.config import option, parse
from services.common.process import child_environment

_READY_SECONDS = 120.0
_WARM_TOKENS = 4


@dataclass(frozen=True)
class SimConfig:
    """Which fleets are measured, and how long."""

    workers: tuple[str, ...] = option(("2", "8", "32", "64"), "numbers of workers")
    gateways: tuple[str, ...] = option(("1", "2", "4", "8"), "numbers of gateways")
    rows: tuple[str, ...] = option(
        ("1", "4", "16"), "requests that each gateway has at each worker: rows in a frame"
    )
    step_ms: float = option(100.0, "how long a step of every engine takes, in milliseconds")
    steps: int = option(30, "tokens a stream: steps that each fleet is measured for")
    idle_seconds: float = option(4.0, "seconds without a request, to tell what sessions cost")
    max_streams: int = option(1024, "fleets that need more streams at once are left out")
    short_requests: int = option(200, "requests of one token, to tell a request from its tokens")
    json: str = option("", "file for the points and the prices; default: none")


async def measure(config: SimConfig, points: list[Point]) -> None:
    """Adds every point of the grid to `points`, as soon as it is measured."""
    sizes = itertools.product(map(int, config.workers), map(int, config.gateways))
    for workers, gateways in sizes:
        async with _fleet(config, workers, gateways) as fleet:
            await fleet.warm_up()
            points.append(await fleet.rest(config.idle_seconds))
            points.append(await fleet.measure(config.short_requests, tokens=1, at_once=16))
            for rows in map(int, config.rows):
                streams = rows * workers * gateways
                if streams <= config.max_streams:
                    points.append(await fleet.measure(streams, config.steps, at_once=streams))
            print(f"{len(points)} points", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """Processes by role, and where the gateways are."""

    workers: int
    step_seconds: float
    processes: dict[str, list[psutil.Process]]
    gateways: list[tuple[str, int]]

    async def warm_up(self) -> None:
        """A stream for every pair of gateway and worker, so that every session has been used."""
        await self._send(2 * self.workers * len(self.gateways), _WARM_TOKENS, at_once=64)

    async def rest(self, seconds: float) -> Point:
        """Sends nothing, and reads the clocks."""
        before, start = self._cpu(), time.perf_counter()
        await asyncio.sleep(seconds)  # what is measured
        return self._point(before, time.perf_counter() - start)

    async def measure(self, requests: int, tokens: int, at_once: int) -> Point:
        """Sends streams, spread over gateways and workers, and reads the clocks."""
        before, start = self._cpu(), time.perf_counter()
        await self._send(requests, tokens, at_once)
        seconds = time.perf_counter() - start
        rows = max(1.0, at_once / (self.workers * len(self.gateways)))
        return self._point(before, seconds, requests, requests * tokens, requests * tokens / rows)

    def _point(
        self,
        before: dict[str, float],
        seconds: float,
        requests: int = 0,
        tokens: int = 0,
        frames: float = 0.0,
    ) -> Point:
        after = self._cpu()
        return Point(
            workers=self.workers,
            gateways=len(self.gateways),
            step_seconds=self.step_seconds,
            requests=requests,
            tokens=tokens,
            frames=frames,
            session_seconds=self.workers * len(self.gateways) * seconds,
            seconds=seconds,
            cpu={role: after[role] - before[role] for role in after},
        )

    async def _send(self, requests: int, tokens: int, at_once: int) -> None:
        body = json.dumps(
            {"prompt": "x" * 64, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        ).encode()
        numbers = iter(range(requests))

        pools = [Pool(Origin(host, port)) for host, port in self.gateways]

        async def client(index: int) -> None:
            for _ in numbers:
                await pools[index % len(pools)].post("/v1/completions", body)

        try:
            await asyncio.gather(*(client(index) for index in range(min(at_once, requests))))
        finally:
            for pool in pools:
                pool.close()

    def _cpu(self) -> dict[str, float]:
        return {
            role: cpu.of_threads(one.pid for one in group) for role, group in self.processes.items()
        }


@asynccontextmanager
async def _fleet(config: SimConfig, workers: int, gateways: int) -> AsyncIterator[_Fleet]:
    """Starts everything, waits until every gateway reaches every worker, and stops it."""
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="sim-"))
        addresses = [f"unix:{directory}/w{number}" for number in range(workers)]
        texts = {role: f"unix:{directory}/{role}" for role in ("tokenizer", "detokenizer")}
        groups: dict[str, list[psutil.Process]] = {}

        async def start(role: str, module: str, *flags: str) -> asyncio.subprocess.Process:
            child = await stack.enter_async_context(_child(module, *flags))
            groups.setdefault(role, []).append(psutil.Process(child.pid))
            return child

        for role, address in texts.items():
            await start(
                *(role, "services", role, f"--address={address}"),
                *("--model=byte", "--log-level=warning"),
            )
        for share in (addresses[host::HOSTS] for host in range(HOSTS)):
            host = await start(
                *("worker", "bench.sim_workers"),
                *(f"--addresses={','.join(share)}", f"--step-ms={config.step_ms}"),
            )
            assert host.stdout is not None
            await host.stdout.readline()
        endpoints = []
        for _ in range(gateways):
            gateway = await start(
                *("gateway", "services", "gateway", "--port=0", "--grpc-port=-1"),
                *("--log-level=warning", "--routing=round-robin", "--hold-timeout=60"),
                f"--worker-addresses={','.join(addresses)}",
                f"--tokenizer-addresses={texts['tokenizer']}",
                f"--detokenizer-addresses={texts['detokenizer']}",
            )
            host_name, port = (await announced.endpoints(gateway))["http"].split(":")
            endpoints.append((host_name, int(port)))
        for endpoint in endpoints:
            await _until_it_reaches(endpoint, workers)
        yield _Fleet(workers, config.step_ms / 1000, groups, endpoints)


@asynccontextmanager
async def _child(module: str, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *flags),
        stdout=asyncio.subprocess.PIPE,
        env={**child_environment(), "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parent.parent,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


async def _until_it_reaches(endpoint: tuple[str, int], workers: int) -> None:
    """Polls a gateway's metrics: another process's state can only be asked for."""
    wanted = f'shoal_gateway_peers_ready{{peer="worker"}} {workers:.1f}'.encode()
    async with asyncio.timeout(_READY_SECONDS):
        while wanted not in await _get(endpoint, "/metrics"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        while b"not ready" in await _get(endpoint, "/readyz"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def _get(endpoint: tuple[str, int], path: str) -> bytes:
    reader, writer = await asyncio.open_connection(*endpoint)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: sim\r\nConnection: close\r\n\r\n".encode())
        return await reader.read()
    finally:
        writer.close()


def main(argv: list[str]) -> None:
    """Measures, fits and prints."""
    config = parse(SimConfig, argv, prog="bench.fleet_sim", description=__doc__ or "")

    async def run(stop: asyncio.Event) -> None:
        points: list[Point] = []
        work = asyncio.create_task(measure(config, points))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if work.done():
            work.result()
        else:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        prices = fit(points)
        print(report(points, prices))
        figures.write(
            "fleet_sim",
            config,
            {
                "points": [point.as_json() for point in points],
                "prices": {role: asdict(price) for role, price in prices.items()},
            },
        )

    process.run(run)


if __name__ == "__main__":
    main(sys.argv[1:])
