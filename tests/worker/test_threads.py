"""How many threads a rank computes with."""

from __future__ import annotations

import pytest

from services.common.cores import available_cores
from services.worker.config import WorkerConfig, num_threads


def test_threads_come_from_the_flag_then_the_environment_then_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert num_threads(WorkerConfig(num_threads=5)) == 5
    assert num_threads(WorkerConfig()) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert num_threads(WorkerConfig(tp=1 << 20)) == 1
    assert num_threads(WorkerConfig()) == available_cores()


def test_torch_computes_with_the_number_that_the_agent_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from services.worker.engine.torch_engine import set_threads

    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    try:
        set_threads(WorkerConfig())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
