"""CPU time of other processes: what holds on a machine that others use too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil


def of_threads(pids: Iterable[int]) -> float:
    """CPU seconds of the threads that some processes have now, to the nanosecond.

    Linux alone; times(2), and so `of_family`, counts in ticks of 10 ms.
    """
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def of_family(root: psutil.Process) -> float:
    """CPU seconds of a process and of all that it started."""
    return sum(map(of_process, [root, *root.children(recursive=True)]))


def of_process(one: psutil.Process) -> float:
    """CPU seconds of a process alone."""
    times = one.cpu_times()
    return float(times.user + times.system)
