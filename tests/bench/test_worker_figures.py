"""The benchmarks of the worker's bookkeeping and of int8's price, in their smallest forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bookkeeping, perplexity
from bench.engine_load import scheduler_seconds
from bench.figures import OWN, Rounds
from services.worker.native.kernels import Kernels


def test_every_size_is_measured() -> None:
    rounds = Rounds()
    config = bookkeeping.BenchConfig(rounds=2, steps=3, largest=10)
    bookkeeping.measure(config, rounds)
    assert [x for x, *_ in rounds.curve(OWN, bookkeeping.STEP)] == [1, 4]
    assert [x for x, *_ in rounds.curve(OWN, bookkeeping.MATCH)] == [10]
    assert all(len(row[OWN]) == 2 for row in rounds.as_json().values())


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


def test_a_step_of_more_requests_than_a_chunk_has_tokens_is_measured() -> None:
    assert scheduler_seconds(520, steps=2) > 0
