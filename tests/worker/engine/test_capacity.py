"""The number of KV pages on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.engine.capacity import memory_limit, num_pages

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
