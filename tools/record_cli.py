"""Records docs/cli.md: what every command prints, run for real against a fleet of its own.

    python -m tools.record_cli

A test checks that every command is there; figures are of the machine that recorded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.commands import COMMANDS

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
_READY = re.compile(r"Shoal is ready: (http://\S+)/v1 ")
_LINES = 40  # that are shown of one run
_HEAD = """# The command line

<!-- Made by `python -m tools.record_cli`; do not edit. -->

Every command, as it ran on a machine with two cores and no GPU that had much else to do: its times
are no measure. [Flags](reference/flags.md) has all flags; `shoal COMMAND --help` says the same.
Long outputs are cut where `...` stands. In a clone, `. .venv/bin/activate` puts `shoal` on the path
after the first `make run`, or write `.venv/bin/shoal` for `shoal`.
"""
# What is shown of each command: the words after `shoal`, where {url} is the fleet's.
RUNS: dict[str, str] = {
    "serve": "serve --port 0 --grpc-port -1",
    "chat": 'chat --url {url}/v1 --temperature 0 --prompt "What is the capital of France?"',
    "top": "top --url {url}/v1 --once",
    "bench": "bench --url {url}/v1 --num-prompts 4 --concurrency 2 --input-len 32 --output-len 8",
    "doctor": "doctor --port 0 --grpc-port 0 --url {url}/v1",
    "plan": "plan --gpu h100 --context 4096",
    "download": "download --model nobody/nothing",
    "completion": "completion bash",
    "gateway": "gateway --port 99999",
    "tokenizer": "tokenizer --model /nonesuch --log-level error",
    "detokenizer": "detokenizer --address nowhere",
    "worker": "worker --tp 7 --log-level error",
}


def _shoal(words: str) -> list[str]:
    return ["bash", "-c", f"{sys.executable} -m services {words}"]


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "NO_COLOR": "1"}


@contextmanager
def _fleet() -> Iterator[tuple[str, str]]:
    """A running fleet: its root URL, and what it printed until it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services", *RUNS["serve"].split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(),
    )
    assert process.stdout is not None
    printed: list[str] = []
    try:
        for line in process.stdout:
            if not line.startswith("{"):  # log lines are for machines
                printed.append(line)
            if match := _READY.search(line):
                yield match[1], "".join(printed)
                break
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _run(words: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            _shoal(words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=directory,
            timeout=120,
            env={**_environment(), "PYTHONPATH": str(PAGE.parents[1])},
        )
    status = f"(exit status {done.returncode})\n" if done.returncode else ""
    return done.stdout + done.stderr + status


def _cut(text: str) -> str:
    lines = [line.rstrip()[:140] for line in text.strip("\n").splitlines()]
    return "\n".join([*lines[:_LINES], "..."] if len(lines) > _LINES else lines)


def record() -> str:
    """The page, from one run of everything."""
    parts = [_HEAD, "```console", "$ shoal --help", _cut(_run("--help")), "```\n"]
    with _fleet() as (url, started):
        for name, command in COMMANDS.items():
            words = RUNS[name].format(url=url)
            shown = started if name == "serve" else _run(words)
            home = str(Path(sys.prefix).parent)
            text = _cut(shown).replace(home, "~/shoal").replace(str(Path.home()), "~")
            parts += [f"## shoal {name}\n", f"{command.summary[0].upper()}{command.summary[1:]}.\n"]
            parts += ["```console", f"$ shoal {words}", text, "```\n"]
    return "\n".join(parts).replace(url, "http://127.0.0.1:8000")  # the port was a free one


if __name__ == "__main__":
    PAGE.write_text(record())
