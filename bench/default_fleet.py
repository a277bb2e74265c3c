"""What a client sees of the default fleet: `shoal bench` on `shoal serve`, the embedded model.

    python -m bench.default_fleet --report build/default-fleet.html

A sweep of a closed loop, repeated on one fleet; `--report` is the page of the last sweep.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import figures
from bench.figures import Rounds
from services.client.bench.config import BenchConfig as ClientConfig
from services.common.config import borrow, option, parse, share, to_argv
from services.common.process import child_environment
from services.fleet.config import FleetConfig
from services.fleet.display import open_display
from services.fleet.local import LocalFleet

MEASURES = {  # of the JSON of `shoal bench`
    "requests/s": "request_throughput",
    "output tokens/s": "output_throughput",
    "TTFT p50 ms": "median_ttft_ms",
    "TTFT p99 ms": "p99_ttft_ms",
    "TPOT p50 ms": "median_tpot_ms",
    "TPOT p99 ms": "p99_tpot_ms",
    "E2EL p50 ms": "median_e2el_ms",
}


@dataclass(frozen=True)
class BenchConfig:
    """The sweep, with the flags of `shoal bench`."""

    sweep_concurrency: tuple[str, ...] = borrow(
        ClientConfig, "sweep_concurrency", default=("1", "2", "4", "8")
    )
    num_prompts: int = borrow(ClientConfig, "num_prompts", default=16)
    input_len: int = borrow(ClientConfig, "input_len", default=64)
    output_len: int = borrow(ClientConfig, "output_len", default=16)
    report: str = borrow(ClientConfig, "report")
    model: str = borrow(FleetConfig, "model")
    engine: str = borrow(FleetConfig, "engine")
    rounds: int = option(3, "sweeps on one fleet, each with other prompts")
    json: str = option("", "file for the figures; default: none")


async def measure(config: BenchConfig, rounds: Rounds) -> None:
    """Starts the fleet, sweeps and stops it. Raises RuntimeError if `shoal bench` fails."""
    fleet_config = share(FleetConfig, config, port=0, grpc_port=-1, log_level="warning")
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory:
        output = Path(directory) / "runs.json"
        async with LocalFleet(fleet_config, open_display()) as fleet:
            for number in range(config.rounds):
                client = ClientConfig(
                    url=fleet.url,
                    sweep_concurrency=config.sweep_concurrency,
                    num_prompts=config.num_prompts,
                    input_len=config.input_len,
                    output_len=config.output_len,
                    ignore_eos=True,
                    seed=100 * number,  # a sweep counts it up: no prompt may come twice
                    report=config.report,
                    output_json=str(output),
                )
                await _run(client)
                sweep = json.loads(await asyncio.to_thread(output.read_text))
                for run in sweep.get("runs", [sweep]):
                    _add(run, rounds)


async def _run(client: ClientConfig) -> None:
    """Its tables go to this process's stdout."""
    command = [sys.executable, "-m", "services", "bench", *to_argv(client)]
    child = await asyncio.create_subprocess_exec(*command, env=child_environment())
    try:
        if await child.wait() != 0:
            raise RuntimeError("shoal bench failed")
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()


def _add(run: Mapping[str, Any], rounds: Rounds) -> None:
    for measure_name, name in MEASURES.items():
        rounds.add(run["load"], measure_name, run[name])


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(BenchConfig, argv, prog="bench.default_fleet", description=__doc__ or "")
    figures.run("default_fleet", config, lambda rounds: measure(config, rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
