"""The engine's shares of its limits, in their smallest form, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import roofline
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
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert list(figures) == list(roofline.BARS)
    for row in figures.values():
        assert 0 < row["least share"] <= row["share"] <= row["most share"]
    assert "attention: aim at least 0.5" in capsys.readouterr().out
