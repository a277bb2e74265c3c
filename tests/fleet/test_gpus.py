"""How the workers of a fleet share a machine's GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.fleet.config import FleetConfig
from services.fleet.gpus import deal, visible_gpus
from services.fleet.plan import plan_fleet


def test_gpus_are_those_of_the_driver_or_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "2", "10"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1f")
    assert visible_gpus(tmp_path) == ["3", "GPU-1f"]


def test_each_worker_gets_its_own_where_there_are_enough() -> None:
    assert deal(["0", "1", "2", "3"], 2, 2) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert deal(["0", "1"], 2, 2) == [{}, {}]  # too few: each says what it lacks
    assert deal(["0", "1"], 1, 1) == [{}]


def test_the_plan_tells_the_workers_alone(tmp_path: Path) -> None:
    specs = plan_fleet(FleetConfig(workers=2), tmp_path, ["0", "1"])
    told = {spec.name: dict(spec.environment) for spec in specs if spec.environment}
    assert told == {
        "worker-0": {"CUDA_VISIBLE_DEVICES": "0"},
        "worker-1": {"CUDA_VISIBLE_DEVICES": "1"},
    }
