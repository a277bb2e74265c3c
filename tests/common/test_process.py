"""Real processes: how they start, stop and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.common.process import PARENT_ENV, child_environment

SERVICE = """
import asyncio, sys
from services.common import process
from services.common.errors import StartupError

async def main(stop):
    print("started", flush=True)
    {body}

process.run(main)
"""

PARENT = """
import subprocess, sys
from services.common.process import child_environment
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=child_environment(),
                         start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code; whatever is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def popen(code: str, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *args]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, text=True, env=env, stdout=pipe, stderr=pipe)
        started.append(process)
        return process

    yield popen
    for process in started:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_child_dies_with_its_parent(start: Start) -> None:
    parent = start(PARENT, SERVICE.format(body="await asyncio.Event().wait()"))
    child = psutil.Process(int(_line(parent)))
    assert child.is_running()
    parent.kill()
    _, alive = psutil.wait_procs([child], timeout=5)
    assert not alive


def test_a_child_that_missed_its_parents_death_leaves(start: Start) -> None:
    orphan = start(SERVICE.format(body=""), env={**os.environ, PARENT_ENV: "1"})
    assert orphan.wait(10) == 1
    assert _line(orphan) == ""


def test_the_variable_is_not_handed_on(start: Start) -> None:
    body = f"import os; print({PARENT_ENV!r} in os.environ, flush=True)"
    process = start(SERVICE.format(body=body), env=child_environment())
    assert _line(process) == "started"
    assert _line(process) == "False"
    assert process.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_stop(start: Start, number: int) -> None:
    process = start(SERVICE.format(body="await stop.wait(); return 3"))
    assert _line(process) == "started"
    process.send_signal(number)
    assert process.wait(10) == 3


def test_a_second_signal_ends_at_once(start: Start) -> None:
    body = "await stop.wait(); print('draining', flush=True); await asyncio.Event().wait()"
    process = start(SERVICE.format(body=body))
    assert _line(process) == "started"
    process.send_signal(signal.SIGTERM)
    assert _line(process) == "draining"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM


def test_a_second_signal_abandons_first(start: Start) -> None:
    body = "await stop.wait(); print('draining', flush=True); await asyncio.Event().wait()"
    code = SERVICE.format(body=body).replace(
        "process.run(main)", "process.run(main, abandon=lambda: print('abandoned', flush=True))"
    )
    process = start(code)
    assert _line(process) == "started"
    process.send_signal(signal.SIGINT)
    assert _line(process) == "draining"
    process.send_signal(signal.SIGINT)
    assert _line(process) == "abandoned"
    assert process.wait(10) == 128 + signal.SIGINT


def test_a_startup_error_is_one_sentence_and_status_1(start: Start) -> None:
    process = start(SERVICE.format(body="raise StartupError('there is no such model')"))
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (1, "shoal: there is no such model\n")


@pytest.mark.parametrize("closed", ["0", "1", "0, 1, 2"])
def test_closed_standard_streams_are_replaced(start: Start, tmp_path: Path, closed: str) -> None:
    said = tmp_path / "said"
    body = f"""
    import os, subprocess
    child = await asyncio.create_subprocess_exec("true")
    with open({str(said)!r}, "w") as file:
        print(await child.wait(), [os.path.exists(f"/proc/self/fd/{{n}}") for n in range(3)],
              file=file)
"""
    code = SERVICE.format(body=body).replace(
        "process.run(main)", f"import os; [os.close(n) for n in ({closed},)]; process.run(main)"
    )
    assert start(code).wait(20) == 0
    assert said.read_text() == "0 [True, True, True]\n"


_FORKS = """
import asyncio, collections
from services.common import process, rpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

async def main(stop):
    server = rpc.Server([])
    await server.start("unix:grpc.sock")

    async def talk():
        async with rpc.open_channel("unix:grpc.sock") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                await stub.Check(health_pb2.HealthCheckRequest())

    talkers = [asyncio.create_task(talk()) for _ in range(5)]
    ends = []
    for _ in range(60):
        child = await asyncio.create_subprocess_exec("true", start_new_session=True)
        ends.append(await child.wait())
    for talker in talkers:
        talker.cancel()
    print(collections.Counter(ends))

process.run(main)
"""


def test_children_start_while_other_threads_are_in_grpc(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "Counter({0: 60})\n", done.stdout + done.stderr
