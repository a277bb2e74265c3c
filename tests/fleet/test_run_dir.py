"""The directories of fleets: which of them go, and which stay."""

from __future__ import annotations

import errno
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from services.common.errors import StartupError
from services.fleet import run_dir
from services.fleet.run_dir import RunDir


def test_what_a_killed_fleet_left_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run_dir, "_LONGEST_PARENT", 1000)
    left, notes = tmp_path / "shoal-fleet-dead", tmp_path / "shoal-notes"
    for directory in (left, notes):
        directory.mkdir()
        (directory / "lock").touch()
    living = RunDir.open("")
    next_one = RunDir.open("")
    assert {*tmp_path.iterdir()} == {notes, living.path, next_one.path}
    living.close()
    next_one.close()
    assert [*tmp_path.iterdir()] == [notes]


def test_a_fleet_takes_what_is_its_own_out_of_a_directory_that_was_given(tmp_path: Path) -> None:
    directory = RunDir.open(str(tmp_path))
    directory.write_table("http://x", "m", [])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "worker-0.admin.sock"))
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(tmp_path / "postgres.sock"))
    (tmp_path / "notes.txt").touch()
    directory.close()
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "notes.txt", "postgres.sock"}


def test_a_directory_that_went_meanwhile_is_no_fault(tmp_path: Path) -> None:
    directory = RunDir.open(str(tmp_path / "fleet"))
    shutil.rmtree(tmp_path / "fleet")
    directory.close()


def test_a_directory_that_cannot_be_locked_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run_dir, "_LONGEST_PARENT", 1000)

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(StartupError, match="temporary files: No space left on device"):
            RunDir.open("")
    assert not [*tmp_path.iterdir()]
