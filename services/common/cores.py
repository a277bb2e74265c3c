"""How many CPU cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores of the affinity mask, cut by the cgroup's CPU quota; at least one."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    try:
        quota, _, period = cpu_max.read_text().strip().partition(" ")
    except OSError:
        return cores  # no cgroup v2
    if quota == "max":
        return cores
    return max(1, min(cores, math.ceil(int(quota) / int(period or 100_000))))
