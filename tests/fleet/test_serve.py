"""`shoal serve` as a process: how it ends, and how it refuses to start."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.served import ServedFleet
from tests.programs import Program

pytestmark = pytest.mark.integration

FAKE = ("--engine", "fake", "--model", "byte")


def _serve(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services", "serve", "--grpc-port", "-1", *args]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )


def _hang_on(fleet: ServedFleet) -> threading.Thread:
    """Opens a stream that goes on for minutes; returns once it has begun."""
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream(
                "POST", f"{fleet.url}/v1/completions", json=body, timeout=60
            ) as response:
                for _ in response.iter_raw():
                    begun.set()
        except httpx.TransportError:
            begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    return thread


def test_a_second_signal_ends_everything_at_once_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tempfile.mkdtemp(prefix="shoal-")  # a short path, for the sockets
    monkeypatch.setenv("TMPDIR", home)
    fleet = ServedFleet(*FAKE, "--fake-step-ms", "100", "--run-dir=")
    try:
        assert any(name.startswith("shoal-fleet-") for name in os.listdir(home))
        reader = _hang_on(fleet)
        family = fleet.tree()
        fleet.process.send_signal(signal.SIGINT)
        told = "shoal: stopping: open requests may finish within 30 s; Ctrl-C again ends at once"
        fleet.wait_for_line(re.compile(f"^{told}$"), timeout=10)
        fleet.wait_for_line(re.compile("draining"), timeout=10)
        assert fleet.process.poll() is None  # the stream is still served
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(5) == 128 + signal.SIGINT
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
        reader.join(10)
        assert not [name for name in os.listdir(home) if name.startswith("shoal-")]
    finally:
        fleet.stop()
        shutil.rmtree(home)


def test_a_drain_is_bounded_and_the_status_is_0() -> None:
    fleet = ServedFleet(*FAKE, "--fake-step-ms", "100", "--drain-timeout", "0.5")
    reader = _hang_on(fleet)
    assert fleet.stop() == 0
    reader.join(10)


def test_a_missing_model_is_one_sentence() -> None:
    result = _serve("--port", "0", "--model", "/nonesuch", "--log-level", "error")
    assert (result.returncode, result.stdout) == (1, "")
    assert "Traceback" not in result.stderr
    *progress, sentence = result.stderr.splitlines()
    assert sentence == "shoal: model /nonesuch does not exist"
    assert sentence not in progress


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = _serve("--port", str(port), *FAKE)
    assert result.returncode == 1
    assert result.stderr == (
        f"shoal: port {port} on 127.0.0.1 is in use; choose another with --port\n"
    )


@pytest.mark.parametrize("streams", ["<&- >&-", ">/dev/full"], ids=["closed", "full"])
def test_a_fleet_serves_without_standard_streams(streams: str) -> None:
    run_dir = tempfile.mkdtemp(prefix="shoal-")
    serve = [sys.executable, "-m", "services", "serve", "--grpc-port=-1", "--port=0", *FAKE]
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", *serve, f"--run-dir={run_dir}"]
    try:
        with Program(command, {"HF_HUB_OFFLINE": "1"}) as fleet:
            for service in ("gateway", "tokenizer-0", "detokenizer-0", "worker-0"):
                fleet.wait_for_line(f"^shoal: {service}: ready$")
            table = json.loads((Path(run_dir) / "fleet.json").read_text())
            assert httpx.get(f"{table['url']}/models", timeout=10).status_code == 200
            fleet.process.send_signal(signal.SIGINT)
            fleet.process.wait(30)
        assert os.listdir(run_dir) == ["lock"]
    finally:
        shutil.rmtree(run_dir)
