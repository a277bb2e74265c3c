"""The sentence that a rank leaves beside the agent's socket."""

from __future__ import annotations

from pathlib import Path

from services.worker.last_words import leave_reason, read_reason


def test_the_first_rank_is_heard(tmp_path: Path) -> None:
    socket_path = str(tmp_path / "rank.sock")
    assert read_reason(socket_path) == ""
    leave_reason(socket_path, "rank 1 needs a GPU of its own")
    leave_reason(socket_path, "rank 2 needs a GPU of its own")
    assert read_reason(socket_path) == "rank 1 needs a GPU of its own"
