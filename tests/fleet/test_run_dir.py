"""The directories of fleets: which of them go, and which stay."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

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
