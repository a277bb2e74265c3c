"""Files that others replace."""

from __future__ import annotations

from pathlib import Path

from services.common.watched import WatchedFiles


def test_every_kind_of_change_is_seen_once(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    watched = WatchedFiles([str(file), ""])
    assert not watched.changed()
    file.write_text("one")
    assert watched.changed()
    assert not watched.changed()
    other.write_text("two")  # as long, and perhaps as old
    other.replace(file)
    assert watched.changed()
    file.unlink()
    assert watched.changed()
    assert not watched.changed()


def test_a_swapped_link_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes replaces a mounted secret."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tls.crt").write_text(name)
    data = tmp_path / "..data"
    data.symlink_to("old")
    watched = WatchedFiles([str(data / "tls.crt")])
    swap = tmp_path / "swap"
    swap.symlink_to("new")
    swap.replace(data)
    assert watched.changed()
