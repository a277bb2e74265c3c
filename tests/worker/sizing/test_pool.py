"""The number of KV pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.sizing.pool import (
    CudaMemory,
    check_balance,
    cuda_pages,
    graph_bytes,
    memory_limit,
    num_pages,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("config", "memory", "expected"),
    [
        (WorkerConfig(), 64 * GIB, 4 * GIB // (16 << 10)),
        (WorkerConfig(), 8 * GIB, 2 * GIB // (16 << 10)),
        (WorkerConfig(tp=2), 8 * GIB, GIB // (16 << 10)),
        (WorkerConfig(max_running_requests=2), 64 * GIB, 2 * 7),  # all that slots can use
        (WorkerConfig(num_pages=9), 0, 9),
    ],
)
def test_num_pages(config: WorkerConfig, memory: int, expected: int) -> None:
    context = 100 if config.max_running_requests == 2 else 1 << 20
    assert num_pages(config, context, 1 << 10, memory) == expected


def test_no_room_for_a_page_is_refused() -> None:
    with pytest.raises(StartupError, match="no KV page fits"):
        num_pages(WorkerConfig(), 100, 1 << 10, 16 << 10)


def test_memory_limit_is_the_cgroups(tmp_path: Path) -> None:
    limited, unlimited = tmp_path / "limited", tmp_path / "unlimited"
    limited.write_text("1048576\n")
    unlimited.write_text("max\n")
    assert memory_limit([str(limited)]) == 1048576
    assert memory_limit([str(unlimited), str(tmp_path / "absent")]) > 1048576


MEMORY = CudaMemory(free_before=80 * GIB, weights=16 * GIB, activations=2 * GIB, graphs=GIB)


@pytest.mark.parametrize(
    ("config", "context", "expected"),
    [
        (WorkerConfig(memory_ratio=0.9), 1 << 20, 53 * GIB // (128 << 14)),
        (WorkerConfig(memory_ratio=0.5), 1 << 20, 21 * GIB // (128 << 14)),
        (WorkerConfig(max_running_requests=2), 100, 2 * 7),  # all that slots can use
    ],
)
def test_pages_on_a_gpu(config: WorkerConfig, context: int, expected: int) -> None:
    assert cuda_pages(config, context, 128 << 10, MEMORY) == expected


def test_a_gpu_without_room_for_kv_is_refused_with_every_number() -> None:
    with pytest.raises(StartupError, match=r"0\.2 .* 80\.00 GiB.* 16\.00 GiB.* 2\.00.* 1\.00 GiB"):
        cuda_pages(WorkerConfig(memory_ratio=0.2), 100, 128 << 10, MEMORY)


def test_graphs_beyond_the_largest_cost_what_the_second_does() -> None:
    assert graph_bytes(100, 5, 20) == 195
    assert graph_bytes(100, 0, 1) == 100
    assert graph_bytes(100, -3, 20) == 100  # memory came back meanwhile


def test_gpus_that_differ_by_more_than_2_gib_are_refused() -> None:
    check_balance(70 * GIB, 72 * GIB)
    with pytest.raises(StartupError, match=r"69\.00 GiB to 72\.00 GiB"):
        check_balance(69 * GIB, 72 * GIB)
