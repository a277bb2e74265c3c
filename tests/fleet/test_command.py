"""The `shoal` command: what it prints, how it fails, what it imports."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from services import __version__
from services.__main__ import main
from services.commands import COMMANDS, GROUPS


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(argv)
    out, err = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, out, err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, "--help")
    assert (status, err) == (0, "")
    for name, command in COMMANDS.items():
        assert f"  {name} " in out
        assert command.summary in out


def test_without_a_command_the_help_is_shown_and_the_status_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run(capsys)[0] == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(capsys, "--version") == (0, f"shoal {__version__}\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, err = _run(capsys, name, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: shoal {name} [flags]")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["sreve"], "shoal: there is no command 'sreve'; did you mean serve?"),
        (["xyzzy"], "shoal: there is no command 'xyzzy'; choose from serve, chat,"),
        (["serve", "--workers", "0"], "shoal serve: --workers 0 is out of range: at least 1"),
        (["serve", "--port", "none"], "shoal serve: argument --port: 'none' is not"),
        (["chat", "--url", "here"], "shoal chat: --url 'here' does not start with http"),
    ],
)
def test_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    status, out, err = _run(capsys, *argv)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(sentence)


def test_a_missing_extra_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = lambda name: None if name == "torch" else object()  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", found)
    assert _run(capsys, "worker") == (
        1,
        "",
        "shoal: worker cannot start: torch missing; install with: pip install 'shoal[worker]'\n",
    )


def test_help_loads_no_service() -> None:
    code = (
        "import sys\n"
        "from services.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'grpc', 'torch', 'rich', 'starlette', 'httpx', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_every_command_is_in_one_group_and_knows_its_flags() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    for command in COMMANDS.values():
        assert dataclasses.fields(command.config_class())


def test_ctrl_c_while_a_command_is_imported_leaves_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert _run(capsys, "plan") == (130, "", "")
