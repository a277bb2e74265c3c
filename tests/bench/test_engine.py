"""The engine's benchmark, in its smallest form, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from bench import engine
from tests.worker.models.checkpoints import save_tiny


def test_every_comparison_has_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "model")
    engine.main(
        [
            f"--model={tmp_path / 'model'}",
            *("--rounds=1", "--streams=3", "--tokens=8", "--long-prompt=100"),
            *("--shared-prefix=64", "--num-threads=1", f"--json={tmp_path / 'out.json'}"),
        ]
    )
    report = json.loads((tmp_path / "out.json").read_text())
    figures = report["figures"]
    assert set(figures["overlap and serial"]) == {"overlap", "serial"}
    prefix = figures["prompts with a shared prefix"]
    assert prefix["radix"]["prefilled tokens"] < prefix["none"]["prefilled tokens"] == 4 * 80
    assert set(figures["a long prompt beside streams"]) == set(get_args(engine.Schedule))
    assert all(value > 0 for row in figures["deterministic"].values() for value in row.values())
    assert figures["CPU of the scheduler"]["512 running"]["us a step"] > 0
    assert "sampling 32 rows" in capsys.readouterr().out
