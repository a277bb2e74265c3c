"""The harness of the CPU engine's peers, with peers that compute nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.engine_peers.__main__ import HERE, LOADS, BenchConfig, Load, Peer, measure, table
from services.common.model_files import resolve

ECHO = """
import sys, time
sys.path.insert(0, sys.argv[1])
from protocol import answer
print("what a library prints is no reply", flush=True)
def generate(prompts, max_new):
    until = time.process_time() + float(sys.argv[2]) * max_new
    while time.process_time() < until:
        pass
    return [[prompt[0]] * max_new for prompt in prompts]
answer(generate)
"""


def peer(tmp_path: Path, name: str, seconds: float) -> Peer:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    command = [sys.executable, str(script), str(HERE), str(seconds)]
    return Peer(name, command, BenchConfig(threads=1))


def test_peers_are_asked_in_turn_and_compared(tmp_path: Path) -> None:
    peers = [
        peer(tmp_path, "shoal none", 0.0001),
        peer(tmp_path, "shoal none, fleet", 0.0002),
        peer(tmp_path, "other", 0.0004),
    ]
    try:
        for one in peers:
            one.wait_ready()
        figures = measure(peers, BenchConfig().loads, rounds=1)["cpu"]
    finally:
        for one in peers:
            one.close()
    assert set(figures["other"]) == {"single", *LOADS}
    assert figures["shoal none"]["single"][0] > 1.5 * figures["other"]["single"][0]
    lines = table(figures, "tokens a CPU second").splitlines()
    ratios = ["shoal none / best peer", "shoal none, fleet / alone"]
    assert [line.split("  ")[0] for line in lines[1:]] == [*figures, *ratios]
    assert float(lines[-1].split()[-1]) < 1


@pytest.mark.integration
def test_a_whole_fleet_is_a_peer() -> None:
    command = [sys.executable, str(HERE / "peer_fleet.py"), str(resolve("").path), "none"]
    fleet = Peer("shoal none, fleet", command, BenchConfig())
    try:
        fleet.wait_ready()
        times = fleet.times(Load(prompts=2, length=5, new=3))
    finally:
        fleet.close()
    assert 0 < times["seconds"] < times["cpu"] * 100


def test_a_peer_that_ends_is_named(tmp_path: Path) -> None:
    broken = Peer("other", [sys.executable, "-c", ""], BenchConfig())
    with pytest.raises(RuntimeError, match="the peer other ended"):
        broken.wait_ready()
    broken.close()
