r"""The CPU engine beside its peers: same prompts, lengths and threads, in one run.

    python -m bench.engine_peers --ctranslate2 VENV/bin/python --openvino VENV/bin/python \
        --llama-cpp VENV/bin/python

Each peer is a process of its own, in an environment of its own; they are asked in turn, and the
median over the rounds counts. `bench/README.md` says how to install them. A single stream is
128 new tokens after a prompt of 128, its prefill apart; streams are prompts of 128 tokens and 64
new ones each, prefill included. Beside Shoal's engine alone stand whole fleets over HTTP, so that
the table also tells what a fleet adds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.engine_peers import models
from bench.figures import machine
from services.common import logs
from services.common.config import option, parse
from services.common.cores import available_cores

HERE = Path(__file__).parent
FLEET = ", fleet"  # ends the names of those measured over HTTP
CLOCKS = {"seconds": "second", "cpu": "CPU second"}  # the second for a machine with other work
Figures = dict[str, dict[str, list[float]]]  # by peer and load


@dataclass(frozen=True)
class BenchConfig:
    """Who is measured."""

    ctranslate2: str = option("", "a Python that has CTranslate2; default: left out")
    openvino: str = option("", "a Python that has OpenVINO GenAI; default: left out")
    llama_cpp: str = option("", "a Python that has llama-cpp-python; default: left out")
    no_transformers: bool = option(False, "leave transformers out")
    no_fleet: bool = option(False, "leave the fleets out, whose workers always take all cores")
    rounds: int = option(3, "times each load is measured; the median counts")
    threads: int = option(2, "CPU threads of each")
    loads: tuple[str, ...] = option(
        ("single", "prefill of 512", "8 streams", "32 streams"), "what is measured"
    )
    work_dir: str = option("build/engine-peers", "where converted models are kept")
    json: str = option("", "file for the figures; default: none")


@dataclass(frozen=True, slots=True)
class Load:
    """What every peer generates: so many prompts of a length, with so many new tokens each."""

    prompts: int
    length: int
    new: int

    def question(self) -> str:
        random = np.random.default_rng(self.length)
        ids = random.integers(1000, 40_000, (self.prompts, self.length))
        return json.dumps({"prompts": ids.tolist(), "max_new": self.new})


ONE, FIRST = Load(1, 128, 128), Load(1, 128, 1)
LOADS = {
    "prefill of 512": Load(1, 512, 1),
    "8 streams": Load(8, 128, 64),
    "32 streams": Load(32, 128, 64),
}


class Peer:
    """A peer's process."""

    def __init__(self, name: str, command: Sequence[str], config: BenchConfig) -> None:
        self.name = name
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        environment["OMP_NUM_THREADS"] = str(config.threads)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def wait_ready(self) -> None:
        """Raises RuntimeError if the process ends before."""
        self._read()

    def times(self, load: Load) -> dict[str, float]:
        """How long the peer takes for a load, by clock."""
        assert self._process.stdin is not None
        self._process.stdin.write(load.question() + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._read())
        return {clock: float(reply[clock]) for clock in CLOCKS}

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()  # which closes the pipes too

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # else what a library printed when it was imported
                return line
        raise RuntimeError(f"the peer {self.name} ended; run its command by hand to see why")


def commands(config: BenchConfig) -> dict[str, list[str]]:
    """The command of each peer, its model converted if need be."""
    threads, paths = str(config.threads), models.prepare(Path(config.work_dir), config.ctranslate2)

    def script(python: str, name: str, *arguments: object) -> list[str]:
        return [python, str(HERE / f"peer_{name}.py"), *map(str, arguments)]

    found = {
        f"shoal {kind}": script(sys.executable, "shoal", paths.gguf, threads, kind)
        for kind in ("none", "int8")
    }
    fits = config.threads == available_cores()
    if not (config.no_fleet or fits):
        print("fleets are left out: their workers take all cores, and --threads does not")
    if not config.no_fleet and fits:
        for kind in ("none", "int8"):
            found[f"shoal {kind}{FLEET}"] = script(sys.executable, "fleet", paths.gguf, kind)
    if not config.no_transformers:
        found["transformers"] = script(sys.executable, "transformers", paths.hf, threads)
    for kind, converted in paths.ctranslate2.items():
        found[f"ctranslate2 {kind}"] = script(config.ctranslate2, "ctranslate2", converted, threads)
    if config.openvino:
        found["openvino genai"] = script(config.openvino, "openvino", paths.gguf, threads)
    if config.llama_cpp:
        found["llama.cpp"] = script(config.llama_cpp, "llama_cpp", paths.gguf, threads)
    return found


def measure(peers: Sequence[Peer], loads: Sequence[str], rounds: int) -> dict[str, Figures]:
    """Tokens a second of each peer for each load, round by round; by clock."""
    figures: dict[str, Figures] = {
        clock: {peer.name: {name: [] for name in loads} for peer in peers} for clock in CLOCKS
    }
    for _ in range(rounds):
        for name in loads:
            for peer in peers:
                for clock, speed in _speeds(peer, name).items():
                    figures[clock][peer.name][name].append(speed)
    return figures


def _speeds(peer: Peer, name: str) -> dict[str, float]:
    """Tokens a second of one load, by clock."""
    if name == "single":
        first, whole = peer.times(FIRST), peer.times(ONE)
        return {clock: (ONE.new - 1) / (whole[clock] - first[clock]) for clock in CLOCKS}
    load = LOADS[name]
    tokens = load.prompts * (load.length if load.new == 1 else load.new)
    return {clock: tokens / seconds for clock, seconds in peer.times(load).items()}


def table(figures: Figures, title: str) -> str:
    """Medians, and below them Shoal's ratio to the best of the others, and a fleet's to its
    engine alone."""
    columns = list(next(iter(figures.values())))
    medians = {
        name: {column: statistics.median(values) for column, values in row.items()}
        for name, row in figures.items()
    }
    lines = [f"{title:<28}" + "".join(f"{column:>16}" for column in columns)]
    for name, row in medians.items():
        lines.append(f"{name:<28}" + "".join(f"{row[column]:>16,.1f}" for column in columns))
    others = [row for name, row in medians.items() if not name.startswith("shoal")]
    best = {column: max(row[column] for row in others) for column in columns} if others else None
    for name, row in medians.items():
        if best and name.startswith("shoal") and not name.endswith(FLEET):
            lines.append(_ratios(f"{name} / best peer", row, best))
    for name, row in medians.items():
        engine = name.removesuffix(FLEET)
        if engine != name and engine in medians:
            lines.append(_ratios(f"{name} / alone", row, medians[engine]))
    return "\n".join(lines)


def _ratios(title: str, row: Mapping[str, float], base: Mapping[str, float]) -> str:
    return f"{title:<28}" + "".join(f"{row[column] / base[column]:>16.2f}" for column in base)


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the figures to a file if one is named."""
    config = parse(BenchConfig, argv, prog="bench.engine_peers", description=__doc__ or "")
    config = replace(config, work_dir=str(Path(config.work_dir).resolve()))
    logs.setup("bench", level="warning")
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    with ExitStack() as processes:
        peers = []
        for name, command in commands(config).items():
            peers.append(Peer(name, command, config))
            processes.callback(peers[-1].close)
        for peer in peers:
            peer.wait_ready()
        figures = measure(peers, config.loads, config.rounds)
    for clock, title in CLOCKS.items():
        print(table(figures[clock], f"tokens a {title}"))
    if config.json:
        report = {"machine": facts, "config": vars(config), "figures": figures}
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        Path(config.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
