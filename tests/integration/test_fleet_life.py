"""Load, leaving clients, idleness and dead services, on real processes and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.integration.served import ServedFleet
from tests.programs import eventually

STREAMS = 200


HELD: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("gateway", "shoal_gateway_requests_in_flight", {}),
    ("gateway", "shoal_gateway_handles", {}),
    ("tokenizer", "shoal_tokenizer_jobs", {}),
    ("detokenizer", "shoal_detokenizer_open_texts", {}),
    ("worker", "shoal_worker_handles", {}),
    ("worker", "shoal_worker_engine_requests", {}),
    ("worker", "shoal_worker_pages", {"state": "locked"}),
    ("worker", "shoal_worker_pages", {"state": "in_flight"}),
    ("worker", "vllm:num_requests_running", {}),
    ("worker", "vllm:num_requests_waiting", {}),
)


def _held(fleet: ServedFleet) -> dict[str, float]:
    """What requests hold in any process, by metric; empty when all is let go."""
    sums = {
        f"{name} {labels or ''}": fleet.total(role, name, **labels) for role, name, labels in HELD
    }
    return {name: value for name, value in sums.items() if value}


def assert_nothing_is_held(fleet: ServedFleet, *, timeout: float = 10.0) -> None:
    eventually(lambda: not _held(fleet), timeout=timeout, what=lambda: _held(fleet))


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, list[str], int]:
    """Text, finish reasons and [DONE]s of one streamed completion."""
    text, finishes, dones = "", [], 0
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                dones += 1
                continue
            assert not dones, "an event after [DONE]"
            choice = json.loads(data)["choices"][0]
            text += choice["text"]
            if choice["finish_reason"]:
                finishes.append(choice["finish_reason"])
    return text, finishes, dones


async def test_two_hundred_streams_at_once(fleet: ServedFleet) -> None:
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=300, limits=limits) as client:
        results = await asyncio.gather(
            *(
                _stream(
                    client,
                    {
                        "prompt": f"Story number {number}: once upon a time",
                        "max_tokens": 4 + number % 8,
                        "temperature": 0,
                        "ignore_eos": True,
                    },
                )
                for number in range(STREAMS)
            )
        )
    for text, finishes, dones in results:
        assert text
        assert finishes == ["length"]
        assert dones == 1
    assert_nothing_is_held(fleet)


def _send_raw(fleet: ServedFleet, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends one request on a socket of its own and leaves the answer unread."""
    host, _, port = fleet.url.removeprefix("http://").rpartition(":")
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(head.encode() + raw)
    return connection


def test_an_idle_fleet_uses_no_cpu(fleet: ServedFleet) -> None:
    """The best of three windows: whatever else the machine does only adds to it."""
    assert_nothing_is_held(fleet)
    window, best = 10.0, 1.0
    for _ in range(3):
        processes = fleet.tree()
        before = {p.pid: _cpu_seconds(p.pid) for p in processes}
        time.sleep(window)  # the window that is measured
        used = {p.pid: _cpu_seconds(p.pid) - before[p.pid] for p in processes}
        share = sum(used.values()) / window
        print(f"idle fleet: {share:.2%} of a core over {window:.0f} s, {len(used)} processes")
        for process in processes:
            print(f"  {used[process.pid] / window:.2%} {' '.join(process.cmdline()[2:5])}")
        best = min(best, share)
        if best < 0.01:
            break
    assert best < 0.01


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process's threads, to the nanosecond; times(2) counts in ticks of 10 ms."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def test_a_killed_service_is_noticed_and_restarted() -> None:
    with ServedFleet("--engine", "fake", "--model", "byte") as fleet:
        for role in ("worker", "tokenizer", "detokenizer"):
            (entry,) = fleet.processes(role)
            printed = len(fleet.log)
            os.kill(entry["pid"], signal.SIGKILL)
            took = eventually(lambda: _status(fleet, "/readyz") == 503, timeout=5)
            refused = _complete(fleet)
            print(f"{role} killed: /readyz 503 after {took:.2f} s")
            if refused.status_code != 200:  # it may be back already
                assert refused.status_code == 503
                assert refused.json()["error"]["type"] == "service_unavailable_error"
            eventually(lambda: _status(fleet, "/readyz") == 200, timeout=30)
            assert any(entry["name"] in line for line in fleet.log[printed:]), fleet.log[printed:]
            answer = _complete(fleet)
            assert answer.status_code == 200, answer.text
        gateway = fleet.processes("gateway")[0]
        os.kill(gateway["pid"], signal.SIGKILL)
        eventually(lambda: _status(fleet, "/readyz") == 200, timeout=30)
        assert _complete(fleet).status_code == 200


def test_nothing_outlives_a_killed_supervisor() -> None:
    fleet = ServedFleet("--engine", "fake", "--model", "byte")
    try:
        family = fleet.tree()
        assert len(family) >= 6  # supervisor, gateway, tokenizer, detokenizer, agent, rank
        fleet.process.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, [p.cmdline() for p in alive]
    finally:
        fleet.stop()


def test_interrupt_ends_everything_cleanly() -> None:
    fleet = ServedFleet("--engine", "fake", "--model", "byte")
    family = fleet.tree()
    assert fleet.stop() == 0, fleet.log[-20:]
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive, [p.cmdline() for p in alive]


def _status(fleet: ServedFleet, path: str) -> int:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{fleet.url}{path}", timeout=5).status_code
    return 0


def _complete(fleet: ServedFleet) -> httpx.Response:
    return httpx.post(
        f"{fleet.url}/v1/completions", json={"prompt": "hi", "max_tokens": 3}, timeout=30
    )
