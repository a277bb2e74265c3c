"""`shoal bench`, `shoal chat` and `shoal top` with a real fleet, whose engine is fake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from services.client.doctor.ports import check_ports
from tests.client.terminal import Terminal
from tests.integration.served import ServedFleet


def shoal(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def tokens(fake_fleet: ServedFleet) -> float:
    return fake_fleet.total("gateway", "shoal_gateway_output_tokens_total")


def test_a_bench_counts_what_the_fleet_counted(fake_fleet: ServedFleet, tmp_path: Path) -> None:
    before = tokens(fake_fleet)
    done = shoal(
        *("bench", "--url", fake_fleet.url, "--num-prompts", "30", "--warmup", "0"),
        *("--tokenizer", "byte", "--input-len", "50", "--output-len", "12", "--ignore-eos"),
        *("--endpoint", "completions", "--goodput", "e2el:60000"),
        *("--output-json", str(tmp_path / "all.json")),
        *("--output-jsonl", str(tmp_path / "each.jsonl")),
        *("--report", str(tmp_path / "report.html")),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Requests completed / failed   30 / 0" in done.stdout
    figures = json.loads((tmp_path / "all.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    assert figures["total_output_tokens"] == 30 * 12 == tokens(fake_fleet) - before
    assert figures["request_goodput"] == figures["request_throughput"] > 0
    assert {line["input_tokens"] for line in lines} == {51}  # and the begin of the text
    assert {line["tokens_from"] for line in lines} == {"usage"}
    assert all(0 < line["ttft_ms"] <= line["e2el_ms"] for line in lines)
    assert (tmp_path / "report.html").read_text().count("<svg") == 4


def test_a_sweep_of_rates_draws_curves(fake_fleet: ServedFleet, tmp_path: Path) -> None:
    done = shoal(
        *("bench", "--url", fake_fleet.url, "--num-prompts", "10", "--output-len", "4"),
        *("--dataset-name", "shared-prefix", "--prefix-len", "64", "--input-len", "16"),
        *("--sweep-rates", "50,inf", "--report", str(tmp_path / "sweep.html")),
        *("--output-json", str(tmp_path / "sweep.json")),
    )
    assert (done.returncode, done.stderr) == (0, "")
    slow, fast = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert (slow["request_rate"], slow["completed"], fast["completed"]) == (50.0, 10, 10)
    assert slow["total_cached_tokens"] > 0
    assert slow["p99_scheduled_ttft_ms"] >= slow["p99_ttft_ms"] > 0
    assert (tmp_path / "sweep.html").read_text().count("<svg") == 5


def test_a_chat_answers_a_script(fake_fleet: ServedFleet) -> None:
    done = shoal(
        *("chat", "--url", fake_fleet.url),
        stdin='/set max_tokens 5\n"""\nhow\nare you\n"""\n/stats\n',
    )
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "1 answer, 5 tokens, TTFT median" in done.stderr


def test_top_shows_the_fleet_once(fake_fleet: ServedFleet) -> None:
    done = shoal("top", "--url", fake_fleet.url, "--once", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    snapshot = json.loads(done.stdout)
    found = {one["service"]: one["state"] for one in snapshot["instances"]}
    assert found == {"worker": "ready", "tokenizer": "ready", "detokenizer": "ready"}
    plain = shoal("top", "--url", fake_fleet.url, "--service", "worker")
    assert (plain.returncode, plain.stdout.count("ready")) == (0, 3)  # with the gateway's own


def test_top_shows_a_killed_worker(fake_fleet: ServedFleet) -> None:
    worker = fake_fleet.processes("worker")[0]
    words = ("top", "--url", fake_fleet.url, "--service", "worker", "--interval", "0.1")
    with Terminal(*words) as terminal:
        place = terminal.expect(" ready ", after=terminal.expect("worker"))
        os.kill(worker["pid"], 9)
        place = terminal.expect(" dead ", after=place)
        place = terminal.expect("gateway ", after=place)
        terminal.expect("out/s", after=place)
        terminal.send("q")
        assert terminal.end() == 0


def test_the_doctor_knows_the_ports_of_a_fleet(fake_fleet: ServedFleet) -> None:
    (gateway,) = fake_fleet.processes("gateway")
    port, grpc_port = (int(at.rpartition(":")[2]) for at in (fake_fleet.url, gateway["address"]))
    found = check_ports("127.0.0.1", {"--port": port, "--grpc-port": grpc_port})
    assert [(one.level, one.text) for one in found] == [
        (
            "warning",
            f"a Shoal that is running has port {number} on 127.0.0.1; choose another with {flag}"
            " to start one more",
        )
        for flag, number in (("--port", port), ("--grpc-port", grpc_port))
    ]
