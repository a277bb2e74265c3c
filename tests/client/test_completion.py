"""`shoal completion`: a shell completes every command and flag with what it prints."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from services.client.completion.__main__ import main, script
from services.commands import COMMANDS


def test_bash_completes_commands_and_flags() -> None:
    def complete(*words: str) -> set[str]:
        count = len(words) - 1
        code = (
            f"{script('bash')}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={count}\n"
            "COMPREPLY=(); _shtab_shoal; printf '%s\\n' \"${COMPREPLY[@]}\"\n"
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=30, check=True
        )
        return {line.strip() for line in done.stdout.splitlines()}

    assert complete("shoal", "de") == {"detokenizer"}
    assert {"plan"} <= complete("shoal", "pl")
    assert "--max-queue" in complete("shoal", "serve", "--max-q")
    assert complete("shoal", "plan", "--gpu", "h") == {"h100", "h200"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_there(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([shell])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert all(name in text for name in COMMANDS)
    if path := shutil.which(shell):
        subprocess.run([path, "-n"], input=text, text=True, check=True, timeout=30)


def test_the_flag_names_the_shell_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--shell", "zsh"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("#compdef shoal")


def test_an_unknown_shell_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["tcsh"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "shoal completion: argument --shell: invalid choice: 'tcsh' (choose from"
    )
    assert all(shell in line for shell in ("bash", "zsh", "fish"))
