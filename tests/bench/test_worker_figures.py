"""The benchmarks of the worker's bookkeeping and of int8's price, in their smallest forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bookkeeping, perplexity
from services.worker.native.kernels import Kernels


def test_growth_prints_a_row_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    bookkeeping.main(["--rounds=1", "--steps=3", "--largest=10"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["running", "1", "4", "cached", "10"]
    assert all(float(row[1].replace(",", "")) >= 0 for row in rows[1:3])


@pytest.mark.slow
def test_int8_costs_less_than_one_per_cent(tmp_path: Path) -> None:
    if Kernels.load() is None:
        pytest.skip("no C++ compiler")
    path = tmp_path / "out.json"
    perplexity.main(["--tokens=384", "--window=128", "--num-threads=1", f"--json={path}"])
    figures = json.loads(path.read_text())["figures"]
    assert figures["none"] < 100  # it is English to the model
    assert figures["int8"] != figures["none"]
    assert abs(figures["int8 against none, %"]) < 1
