"""The engine's shares of its limits, in their smallest form, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bars, roofline
from bench.figures import Rounds
from services.worker.native.kernels import Kernels
from tests.worker.models.checkpoints import save_tiny


@pytest.mark.skipif(Kernels.load() is None, reason="no C++ compiler")
def test_every_share_is_of_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "model")
    roofline.main(
        [
            f"--model={tmp_path / 'model'}",
            *("--rounds=3", "--prompt=32", "--rows=2", "--context=64", "--num-threads=1"),
            f"--json={tmp_path / 'out.json'}",
        ]
    )
    rounds = json.loads((tmp_path / "out.json").read_text())["rounds"]
    assert list(rounds) == list(bars.LIMIT_BARS)
    for name, row in rounds.items():
        assert {len(times) for times in row.values()} == {3}
        assert set(row) == {"shoal", *(("sum",) if name == "attention" else ("plain", "packed"))}
    assert "| attention, at least 0.5 of the limit |" in capsys.readouterr().out


def test_a_share_is_of_the_best_limit() -> None:
    rounds = Rounds()
    for own, slow, fast in ((10.0, 30.0, 8.0), (20.0, 1.0, 18.0), (10.0, 30.0, 7.0)):
        rounds.add("shoal", "decode", own)
        rounds.add("plain", "decode", slow)
        rounds.add("packed", "decode", fast)
    assert bars.shares(rounds) == {"decode": 0.8}
    assert bars.limit_table(rounds).splitlines()[2:] == [
        "| decode, at least 0.85 of the limit | 0.8, **not met** |"
    ]
