"""The supervisor against real processes that only look like services."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.common.errors import StartupError
from services.fleet.config import FleetConfig
from services.fleet.local import LocalFleet
from services.fleet.plan import ServiceSpec
from services.fleet.service import Progress, Service, State
from tests.fleet import scripted


class Recorder:
    """A display that keeps what it is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.seen: set[tuple[str, str, str]] = set()

    def update(self, services: Sequence[Service]) -> None:
        for service in services:
            self.seen.add((service.spec.name, service.state.value, service.progress.phase))

    def line(self, text: str) -> None:
        self.lines.append(text)

    def close(self) -> None:
        self.lines.append("closed")


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> FleetConfig:
    return FleetConfig(port=0, grpc_port=-1, run_dir=str(tmp_path_factory.mktemp("f")))


def _pids(fleet: LocalFleet) -> dict[str, int | None]:
    return {info.name: info.pid for info in fleet.processes}


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture
def children() -> set[int]:
    """The processes of fleets that other tests share, which are no business of this one's."""
    return _children()


async def test_a_fleet_starts_reports_and_stops_in_order(config: FleetConfig) -> None:
    display = Recorder()
    async with LocalFleet(config, display, plan=scripted.plan) as fleet:
        assert fleet.model == "scripted"
        assert fleet.url.startswith("http://127.0.0.1:")
        assert ("worker-0", "loading", "loading weights") in display.seen
        table = json.loads((fleet.run_dir / "fleet.json").read_text())
        assert table["url"] == fleet.url
        assert {entry["name"]: entry["pid"] for entry in table["processes"]} == _pids(fleet)
        assert all(entry["state"] == "ready" for entry in table["processes"])
        processes = [psutil.Process(pid) for pid in _pids(fleet).values()]
        assert all(os.getpgid(process.pid) == process.pid for process in processes)
    assert not any(process.is_running() for process in processes)
    stops = [line for line in display.lines if line.endswith("stops")]
    assert stops[:2] == ["gateway stops", "worker stops"]
    assert set(stops[2:]) == {"tokenizer stops", "detokenizer stops"}


def test_the_url_says_what_is_spoken(config: FleetConfig) -> None:
    assert LocalFleet(config).url.startswith("http://")
    assert LocalFleet(replace(config, tls_cert="c", tls_key="k")).url.startswith("https://")


async def test_every_service_comes_back_after_sigkill(
    config: FleetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with LocalFleet(config, plan=scripted.plan) as fleet:
        url = fleet.url
        for name, pid in _pids(fleet).items():
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                await fleet.replaced(name, pid)
            assert f"{name} (pid {pid}) was killed by SIGKILL" in caplog.text
        assert fleet.url == url
        table = json.loads((fleet.run_dir / "fleet.json").read_text())
        assert {entry["name"]: entry["pid"] for entry in table["processes"]} == _pids(fleet)


async def test_a_table_that_cannot_be_written_ends_no_service(
    config: FleetConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with LocalFleet(config, plan=scripted.plan) as fleet:
        (fleet.run_dir / "fleet.json.new").mkdir()  # as on a full disk, nothing can be written
        pids = _pids(fleet)
        assert pids["worker-0"] is not None
        os.kill(pids["worker-0"], signal.SIGKILL)
        async with asyncio.timeout(20):
            await fleet.replaced("worker-0", pids["worker-0"])
        assert "the fleet's table is not up to date" in caplog.text
        assert {**_pids(fleet), "worker-0": 0} == {**pids, "worker-0": 0}
        (fleet.run_dir / "fleet.json.new").rmdir()


async def test_no_room_for_a_table_is_told_before_a_service_starts(
    config: FleetConfig, children: set[int]
) -> None:
    table = Path(config.run_dir) / "fleet.json.new"
    table.mkdir()
    with pytest.raises(StartupError, match=rf"^cannot write to {config.run_dir}: Is a directory$"):
        await LocalFleet(config, plan=scripted.plan).start()
    assert _children() == children
    table.rmdir()


async def test_a_mistake_at_start_ends_the_fleet_with_its_sentence(
    config: FleetConfig, children: set[int]
) -> None:
    def plan(config: FleetConfig, run_dir: Path) -> list[ServiceSpec]:
        *others, _ = scripted.plan(config, run_dir)
        return [*others, scripted.spec("worker", run_dir, "--mishap=mistake")]

    fleet = LocalFleet(config, plan=plan)
    with pytest.raises(StartupError, match=r"^there is no model 'nonesuch'$"):
        await fleet.start()
    assert set(_pids(fleet).values()) == {None}
    assert _children() == children


async def test_a_start_can_be_given_up(config: FleetConfig, children: set[int]) -> None:
    def plan(config: FleetConfig, run_dir: Path) -> list[ServiceSpec]:
        *others, _ = scripted.plan(config, run_dir)
        return [*others, scripted.spec("worker", run_dir, "--mishap=never-ready")]

    display = Recorder()
    fleet = LocalFleet(config, display, plan=plan)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            await fleet.start()
    assert "closed" in display.lines
    assert _children() == children


async def test_a_service_that_will_not_stop_is_killed(
    config: FleetConfig, children: set[int]
) -> None:
    def plan(config: FleetConfig, run_dir: Path) -> list[ServiceSpec]:
        gateway, *others = scripted.plan(config, run_dir)
        return [replace(gateway, command=(*gateway.command, "--mishap=stubborn")), *others]

    fleet = LocalFleet(replace(config, drain_timeout=0.1), plan=plan, stop_margin=0.1)
    await fleet.start()
    await fleet.stop()
    assert _children() == children


async def test_a_service_stopped_while_it_is_being_started_is_not_left_running(
    children: set[int],
) -> None:
    class NoProbe:
        async def watch(self, service: Service) -> AsyncIterator[Progress]:
            await asyncio.Event().wait()
            yield Progress(ready=True)

    begins = asyncio.Event()
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    spec = ServiceSpec("worker-0", "worker", command, "", "")
    service = Service(spec, NoProbe(), dict(os.environ), on_change=begins.set)
    running = asyncio.create_task(service.run())
    await begins.wait()  # the process is being made: there is no child to tell yet
    assert service.pid is None
    await service.stop(1.0)
    async with asyncio.timeout(10):
        await running
    assert _children() == children


CHATTY = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
print("a log line")
print('{"http": "here"}', flush=True)
signal.sigwait({signal.SIGUSR1})
print('{"http": "and much more"}', flush=True)
"""


async def test_what_a_service_prints_is_not_piled_up() -> None:
    class FirstLine:
        async def watch(self, service: Service) -> AsyncIterator[Progress]:
            assert await service.stdout.get() == '{"http": "here"}'
            assert service.stdout.empty()  # what it logs is not for those who watch
            yield Progress(ready=True)

    def on_change() -> None:
        if service.state is State.FAILED:
            failed.set()

    failed = asyncio.Event()
    spec = ServiceSpec("gateway", "gateway", (sys.executable, "-c", CHATTY), "", "")
    service = Service(spec, FirstLine(), dict(os.environ), on_change=on_change)
    running = asyncio.create_task(service.run())
    async with asyncio.timeout(10):
        await service.wait_ready()
        assert service.pid is not None
        os.kill(service.pid, signal.SIGUSR1)
        await failed.wait()  # it has ended, and all that it printed was read
        assert service.stdout.empty()
        await service.stop(1.0)
        await running


async def test_a_port_in_use_is_one_sentence(config: FleetConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is in use"):
            await LocalFleet(replace(config, port=port), plan=scripted.plan).start()


async def test_two_fleets_do_not_share_a_directory(config: FleetConfig) -> None:
    async with LocalFleet(config, plan=scripted.plan):
        with pytest.raises(StartupError, match="another fleet"):
            await LocalFleet(config, plan=scripted.plan).start()


async def test_a_directory_of_its_own_is_removed() -> None:
    fleet = LocalFleet(FleetConfig(port=0, grpc_port=-1), plan=scripted.plan)
    async with fleet:
        path = fleet.run_dir
        assert path.is_dir()
    assert not path.exists()


SUPERVISOR = """
import asyncio
from services.fleet.config import FleetConfig
from services.fleet.local import LocalFleet
from tests.fleet import scripted

async def main():
    async with LocalFleet(FleetConfig(port=0, grpc_port=-1), plan=scripted.plan) as fleet:
        print(*(info.pid for info in fleet.processes), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SUPERVISOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_sigkill_of_the_supervisor_leaves_no_process(supervisor: subprocess.Popen[str]) -> None:
    assert supervisor.stdout is not None
    children = [psutil.Process(int(pid)) for pid in supervisor.stdout.readline().split()]
    assert len(children) == 4
    supervisor.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
