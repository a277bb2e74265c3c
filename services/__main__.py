"""The `shoal` command: picks a service and hands it the rest of the command line.

Services are imported only when they are chosen, so that `shoal --help` is quick and
a gateway never loads torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from services import __version__
from services.commands import COMMANDS, GROUPS, Command
from services.common import standard_streams

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command; exits 2 after one sentence if the command line is wrong, 130 at Ctrl-C."""
    standard_streams.secure()
    try:
        _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # while it imports: once it runs, a command sees to it itself
        sys.exit(_INTERRUPTED)


def _main(words: list[str]) -> NoReturn:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        sys.exit(0 if words else 2)
    name, *rest = words
    if name in ("-V", "--version", "version"):
        print(f"shoal {__version__}")
        sys.exit(0)
    command = COMMANDS.get(name)
    if command is None:
        from services.common.config import nearest

        meant = nearest(name, COMMANDS) or f"; choose from {', '.join(COMMANDS)}"
        _fail(2, f"there is no command {name!r}{meant}")
    _run(name, command, rest)


def help_text() -> str:
    """What `shoal --help` prints."""
    lines = ["usage: shoal COMMAND [flags]", ""]
    for title, names in GROUPS.items():
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
