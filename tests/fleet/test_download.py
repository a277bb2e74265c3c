"""`shoal download`: what it leaves in the cache, and that reading it needs no write."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.model_files import resolve
from services.fleet.download.__main__ import DownloadConfig, main

COMMIT = "0" * 40


def _cached(home: Path) -> Path:
    """A hub cache as the hub's own client leaves it, with one model."""
    model = home / "hub" / "models--org--tiny"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def _run(*argv: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_mark_comes_after_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    asked: list[str] = []

    def download(model: str, **_: object) -> str:
        asked.append(model)
        assert not mark.exists()
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert _run("--model=org/tiny", f"--mark={mark}") == 0
    assert mark.exists()
    assert asked == ["org/tiny"]
    assert f"org/tiny is at {snapshot}" in capsys.readouterr().out


def test_what_cannot_be_had_is_one_sentence_and_leaves_no_mark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "mark"
    assert _run("--model=nobody/no-such-model", f"--mark={mark}") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not mark.exists()
    with pytest.raises(ValueError, match="--model must name"):
        DownloadConfig()


def test_a_cache_that_cannot_be_written_is_enough_without_a_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = _cached(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        "huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub")
    )
    monkeypatch.chdir(tmp_path)
    assert resolve("org/tiny").path.resolve() == snapshot.resolve()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
