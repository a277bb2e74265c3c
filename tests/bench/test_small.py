"""Benchmarks of fleets and services in their smallest form, so that they do not rot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import default_fleet, encode, gateways, grpc_session, quota, routing, watching
from bench.figures import OWN, Rounds


def positive(rounds: Rounds) -> set[str]:
    """The measures, all of whose values are more than 0."""
    return {
        measure
        for measure, row in rounds.as_json().items()
        if all(value > 0 for values in row.values() for value in values)
    }


@pytest.mark.integration
async def test_gateways_are_measured_free_and_held() -> None:
    rounds = Rounds()
    config = gateways.GatewaysConfig(
        streams=8,
        requests=16,
        max_tokens=32,
        short_requests=16,
        rounds=1,
        share=0.5,
        gateways=("2",),
    )
    await gateways.measure(config, rounds)
    assert (rounds.median(OWN, "busiest gateway's share of connections, 2") or 0) * 8 in range(4, 9)
    assert {"held: requests/s, 2", "free: tokens/s, 2"} <= positive(rounds)
    assert rounds.median(OWN, "held: of linear, 2") == 1.0  # nothing else to compare with


@pytest.mark.integration
async def test_sessions_are_compared_with_calls() -> None:
    ways = Rounds()
    config = grpc_session.BenchConfig(streams=2, requests=4, max_tokens=8, rounds=1)
    await grpc_session.measure(config, ways)
    assert ways.systems == ["Generate", "Session"]
    assert {"requests/s", "tokens/s"} <= positive(ways)
    told = Rounds()
    for name, value in (("Generate", 200.0), ("Session", 500.0)):
        told.add(name, "requests/s", value)
    assert grpc_session.ratios(told).splitlines()[-1] == "| requests/s | 2.5 |"


@pytest.mark.integration
async def test_short_prompts_are_measured_beside_a_long_one() -> None:
    rounds = Rounds()
    config = encode.BenchConfig(
        tokenizers=1, threads=("1",), model="byte", words=20, long_words=500, seconds=0.1, rounds=1
    )
    await encode.measure(config, rounds)
    assert {
        "thousand tokens/s, 1",
        "short prompt, p99 ms, alone",
        "short prompt, p99 ms, beside 500 words",
    } <= positive(rounds)


@pytest.mark.integration
async def test_a_fleet_is_measured_by_its_client(tmp_path: Path) -> None:
    rounds = Rounds()
    config = default_fleet.BenchConfig(
        sweep_concurrency=("1", "2"),
        num_prompts=2,
        output_len=4,
        report=str(tmp_path / "report.html"),
        model="byte",
        engine="fake",
        rounds=1,
    )
    await default_fleet.measure(config, rounds)
    assert rounds.systems == ["1 at once", "2 at once"]
    assert set(rounds.measures) == set(default_fleet.MEASURES)
    assert {"output tokens/s", "TTFT p50 ms"} <= positive(rounds)  # one read may bring all tokens
    assert "shoal bench" in (tmp_path / "report.html").read_text()


def test_routing_and_watching_have_their_figures() -> None:
    rounds = Rounds()
    routing.measure(routing.BenchConfig(prompt_tokens=64, requests=2, rounds=1), rounds)
    assert "CPU us a warm request, 1000" in positive(rounds)
    assert watching.cost(lambda: sum(range(1000)), 200) > 0


def test_an_account_stops_who_overdraws_it_and_lets_go_again() -> None:
    program = "print(1, flush=True)\nwhile True: pass"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            account = quota.Account(child.pid, used=0.0)
            account.settle(earned=0.0)
            assert account.left < 0
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)  # returns when it is
            account.settle(earned=1000.0)
            assert account.left >= 0
            os.waitid(os.P_PID, child.pid, os.WCONTINUED)
        finally:
            child.kill()
