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
    left = ("worker-12.sock", "tokenizer-0.sock", "detokenizer-0.admin.sock", "gateway.admin.sock")
    foreign = ("postgres.sock", "worker.sock", "my-worker-0.sock")
    for name in (*left, "gateway-1.admin.sock", *foreign):
        with _listener(tmp_path / name):
            pass
    for name in ("notes.txt", "worker-3.sock"):
        (tmp_path / name).touch()
    own = tmp_path / "worker-0.sock"
    # One was killed a moment ago and is not gone yet; the other was started by somebody else.
    with _listener(own), _listener(tmp_path / "worker-1.sock"):
        directory.close([own])
    stays = {"lock", "notes.txt", "worker-1.sock", "worker-3.sock", *foreign}
    assert {path.name for path in tmp_path.iterdir()} == stays


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    return listener


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
