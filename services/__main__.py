"""The `shoal` command: picks a service and hands it the rest of the command line.

Services are imported only when they are chosen, so that `shoal --help` is quick and
a gateway never loads torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from services import __version__


@dataclass(frozen=True)
class Command:
    """One word after `shoal`: where its `main(argv)` is and which extras it needs."""

    summary: str
    module: str
    extras: tuple[str, ...]
    role: str = ""


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "a whole fleet on this machine, as processes", "services.fleet", ("gateway", "worker")
    ),
    "chat": Command(
        "an interactive chat with a running fleet, or with one of its own",
        "services.client.chat",
        ("gateway",),
    ),
    "bench": Command(
        "a load client of any OpenAI API: latencies, throughput, a report",
        "services.client.bench",
        ("gateway",),
    ),
    "top": Command("a fleet, live in the terminal", "services.client.top", ("gateway",)),
    "download": Command(
        "fetch a model into the local hub cache, ahead of the services",
        "services.fleet.download",
        (),
    ),
    "doctor": Command("checks a machine, or a fleet, before trouble", "services.client.doctor", ()),
    "plan": Command(
        "what a model takes of a GPU, and what fits beside it", "services.fleet.planner", ()
    ),
    "gateway": Command(
        "the front door: REST, SSE and gRPC for clients", "services.gateway", ("gateway",)
    ),
    "tokenizer": Command("text to token ids", "services.tokenizer", ("tokenizer",)),
    "detokenizer": Command(
        "token ids to text", "services.tokenizer", ("tokenizer",), role="detokenizer"
    ),
    "worker": Command("a model replica: the engine", "services.worker", ("worker",)),
}
_GROUPS = {
    "everything": ("serve", "chat", "top", "bench"),
    "before the start": ("doctor", "plan", "download"),
    "one service": ("gateway", "tokenizer", "detokenizer", "worker"),
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command; exits 2 after one sentence if the command line is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        sys.exit(0 if words else 2)
    name, *rest = words
    if name in ("-V", "--version", "version"):
        print(f"shoal {__version__}")
        sys.exit(0)
    command = COMMANDS.get(name)
    if command is None:
        _fail(2, f"there is no command {name!r}; choose from {', '.join(COMMANDS)}")
    _run(name, command, rest)


def help_text() -> str:
    """What `shoal --help` prints."""
    lines = ["usage: shoal COMMAND [flags]", ""]
    for title, names in _GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<14}{COMMANDS[name].summary}" for name in names]
        lines.append("")
    lines += [
        "`shoal COMMAND --help` lists a command's flags with their defaults. Each flag can also be",
        "given as an environment variable: --max-queue 10 is SHOAL_MAX_QUEUE=10; the flag wins.",
        "`shoal --version` prints the version.",
    ]
    return "\n".join(lines)


def _run(name: str, command: Command, argv: list[str]) -> NoReturn:
    from services.fleet.extras import missing

    asks_for_help = any(word in ("-h", "--help", "--version") for word in argv)
    if not asks_for_help and (problem := missing(command.extras)):
        _fail(1, f"{name} cannot start: {problem}")
    if _asks_for_tls(argv):
        # So that a refused client leaves a line with the reason. Read when grpc is imported.
        os.environ["GRPC_VERBOSITY"] = "INFO"
    main = importlib.import_module(f"{command.module}.__main__").main
    main(argv, role=command.role) if command.role else main(argv)
    sys.exit(0)


def _asks_for_tls(argv: list[str]) -> bool:
    return "SHOAL_TLS_CERT" in os.environ or any(word.startswith("--tls-cert") for word in argv)


def _fail(status: int, sentence: str) -> NoReturn:
    print(f"shoal: {sentence}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
