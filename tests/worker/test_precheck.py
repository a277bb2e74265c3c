"""What the agent refuses before it starts a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.precheck import check


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            WorkerConfig(tp=7),
            "the model has 9 attention heads, which cannot be divided over --tp 7",
        ),
        (WorkerConfig(model="byte"), "run it with --engine fake"),
        (WorkerConfig(model="/nonesuch"), "model /nonesuch does not exist"),
        (WorkerConfig(model="/etc"), "model directory /etc has no config.json"),
    ],
)
def test_refused(config: WorkerConfig, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        check(config)


def test_weights_that_no_memory_holds_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        StartupError, match=r"0\.61 GiB in float32, .* 0\.25 GiB: .* --quantization int8"
    ):
        check(WorkerConfig(), memory=1 << 28, devices=tmp_path)
    check(WorkerConfig(), memory=1 << 30, devices=tmp_path)
    check(WorkerConfig(device="cuda"), memory=1 << 28, devices=tmp_path)  # as on WSL
    (tmp_path / "nvidia0").touch()  # a GPU's memory is not this machine's
    check(WorkerConfig(), memory=1 << 28, devices=tmp_path)


@pytest.mark.parametrize(
    "config", [WorkerConfig(), WorkerConfig(engine="fake", model="byte"), WorkerConfig(model="a/b")]
)
def test_what_may_work_is_left_to_the_ranks(config: WorkerConfig) -> None:
    check(config)
