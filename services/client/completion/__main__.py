"""Prints the completion script of a shell, made from the flags of every command.

    source <(shoal completion bash)
    shoal completion zsh > "${fpath[1]}/_shoal"
    shoal completion fish > ~/.config/fish/completions/shoal.fish

The script holds all names, so that completing starts no Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from services.client.completion.config import CompletionConfig
from services.commands import COMMANDS
from services.common.config import build_parser, parse


def main(argv: Sequence[str]) -> NoReturn:
    """Prints the script; exits 1 after one sentence without the package that makes it."""
    alone = len(argv) == 1 and not argv[0].startswith("-")
    config = parse(
        CompletionConfig,
        [f"--shell={argv[0]}"] if alone else argv,
        prog="shoal completion",
        description="Prints a script: source <(shoal completion bash), or zsh or fish.",
    )
    print(script(config.shell), end="")
    sys.exit(0)


def script(shell: str) -> str:
    """The completion script."""
    import shtab

    return shtab.complete(whole_parser(), shell=shell)


def whole_parser() -> argparse.ArgumentParser:
    """`shoal` with every command and its flags, as one parser."""
    root = argparse.ArgumentParser(prog="shoal", description="Serves large language models.")
    commands = root.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        flags = build_parser(command.config_class(), prog=f"shoal {name}", description="")
        commands.add_parser(
            name, parents=[flags], add_help=False, help=command.summary, conflict_handler="resolve"
        )
    return root


if __name__ == "__main__":
    main(sys.argv[1:])
