"""Every benchmark, one after the other, each with its figures in a file.

    python -m bench --output build/figures
    python -m bench --only wire,engine_peers --mini-sglang PATH --smg-python PYTHON

`python -m bench.page build/figures` then puts the figures into docs/benchmarks.md. A benchmark that
fails does not stop the others; the exit status is 1 then.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.peers.wire import WireConfig
from services.common import process
from services.common.config import borrow, option, parse
from services.common.process import child_environment

# The flags of each benchmark in its shortest form. The order is that of a run.
QUICK: dict[str, tuple[str, ...]] = {
    "wire": ("--scale=0.05", "--short-requests=128", "--streams=1,16"),
    "engine_peers": ("--loads=single", "--no-fleet"),
    "roofline": ("--prompt=64", "--rows=2", "--context=64"),
    "growth": ("--streams=1,16,64", "--idle-streams=100"),
    "gateways": ("--streams=16", "--requests=32", "--max-tokens=32", "--short-requests=64"),
    "encode": ("--seconds=0.3",),
    "bookkeeping": ("--steps=5", "--largest=1000"),
    "default_fleet": ("--num-prompts=2", "--output-len=4", "--sweep-concurrency=1,2"),
    "fleet": ("--streams=16", "--requests=32", "--max-tokens=32"),
    "grpc_session": ("--streams=16", "--requests=64"),
    "routing": ("--requests=5",),
    "watching": ("--number=5000",),
    "engine": ("--streams=2", "--tokens=4", "--long-prompt=64", "--shared-prefix=64"),
    "perplexity": ("--tokens=256", "--window=128"),
    "fleet_sim": ("--workers=2", "--gateways=1", "--rows=1,4", "--steps=6", "--idle-seconds=0.5"),
}
_NO_ROUNDS = ("perplexity", "fleet_sim")  # nothing timed; fitted to many points instead
_PEERS = {  # the flags about peers that a benchmark takes
    "wire": ("mini_sglang", "mini_python", "smg_python"),
    "engine_peers": ("ctranslate2", "openvino", "llama_cpp"),
}
_PEER = "peers, as bench/README.md installs them"


@dataclass(frozen=True)
class AllConfig:
    """What is run."""

    only: tuple[str, ...] = option((), "benchmarks to run; default: all", metavar="NAME,...")
    output: str = option("build/figures", "directory for the figures", metavar="PATH")
    rounds: int = option(3, "rounds of each that has any")
    quick: bool = option(False, "the shortest form of each, to see that it works")
    mini_sglang: str = borrow(WireConfig, "mini_sglang", group=_PEER)
    mini_python: str = borrow(WireConfig, "mini_python", group=_PEER)
    smg_python: str = borrow(WireConfig, "smg_python", group=_PEER)
    ctranslate2: str = option("", "a Python that has CTranslate2; empty leaves it out", group=_PEER)
    openvino: str = option("", "a Python that has OpenVINO GenAI; empty leaves it out", group=_PEER)
    llama_cpp: str = option(
        "", "a Python that has llama-cpp-python; empty leaves it out", group=_PEER
    )

    def __post_init__(self) -> None:
        if unknown := [name for name in self.only if name not in QUICK]:
            raise ValueError(f"--only {unknown[0]!r} is none of {', '.join(QUICK)}")


def command(config: AllConfig, name: str) -> list[str]:
    """The command of one benchmark."""
    package = "bench.peers.wire" if name == "wire" else f"bench.{name}"
    peers = [
        f"--{peer.replace('_', '-')}={value}"
        for peer in _PEERS.get(name, ())
        if (value := getattr(config, peer))
    ]
    output = Path(config.output).resolve()
    flags = [f"--json={output / name}.json"]
    if name not in _NO_ROUNDS:
        flags.append(f"--rounds={1 if config.quick else config.rounds}")
    if name == "default_fleet":
        flags.append(f"--report={output / name}.html")
    short = QUICK[name] if config.quick else ()
    return [sys.executable, "-m", package, *flags, *peers, *short]


async def run_all(config: AllConfig, stop: asyncio.Event) -> int:
    """Runs them in turn until told to stop; 1 if one failed."""
    await asyncio.to_thread(Path(config.output).mkdir, parents=True, exist_ok=True)
    failed: list[str] = []
    for name in config.only or QUICK:
        print(f"==> {name}", flush=True)
        started = time.monotonic()
        status = await _run(command(config, name), stop)
        print(f"==> {name}: {time.monotonic() - started:.0f} s", flush=True)
        if stop.is_set():
            break
        if status:
            failed.append(name)
    print(f"figures are in {config.output}; python -m bench.page {config.output} shows them")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


async def _run(words: list[str], stop: asyncio.Event) -> int:
    # In a session of its own: Ctrl-C reaches it once, from here, and it tells what it has.
    child = await asyncio.create_subprocess_exec(
        *words, env=child_environment(), start_new_session=True
    )
    ended, stopped = asyncio.create_task(child.wait()), asyncio.create_task(stop.wait())
    await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if child.returncode is None:
        child.terminate()
    return await ended


def main(argv: list[str]) -> None:
    """Runs them all."""
    config = parse(AllConfig, argv, prog="bench", description=__doc__ or "")
    process.run(lambda stop: run_all(config, stop))


if __name__ == "__main__":
    main(sys.argv[1:])
