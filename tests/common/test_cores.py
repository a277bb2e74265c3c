"""How many cores a process may use."""

from __future__ import annotations

from pathlib import Path

from services.common.cores import available_cores


def test_a_cpu_quota_limits_the_cores(tmp_path: Path) -> None:
    cpu_max = tmp_path / "cpu.max"
    cpu_max.write_text("50000 100000\n")
    assert available_cores(cpu_max) == 1
    cpu_max.write_text("max 100000\n")
    without_quota = available_cores(cpu_max)
    assert without_quota == available_cores(tmp_path / "absent")
