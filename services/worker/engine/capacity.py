"""How many KV pages there are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from services.common.errors import StartupError
from services.worker.config import WorkerConfig

_CPU_LIMIT = 4 << 30
_CGROUP_FILES = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def memory_limit(files: Sequence[str] = _CGROUP_FILES) -> int:
    """The bytes of memory this process may use: the cgroup's limit, or what the machine has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in files:
        path = Path(name)
        if path.exists() and (text := path.read_text().strip()).isdigit():
            return min(int(text), machine)
    return machine


def num_pages(config: WorkerConfig, context: int, bytes_per_token: int, memory: int) -> int:
    """KV pages on a CPU: those configured, or what fits a quarter of `memory`, at most 4 GiB.

    Never more than all slots at full context can use. `bytes_per_token` is one rank's;
    ranks share the memory. Raises StartupError if not one page fits.
    """
    if config.num_pages:
        return config.num_pages
    budget = min(_CPU_LIMIT, memory // 4) // config.tp
    fits = budget // (bytes_per_token * config.page_size)
    if fits < 1:
        raise StartupError(
            f"no KV page fits: a page takes {bytes_per_token * config.page_size} bytes of the"
            f" {budget} that a quarter of this machine's memory leaves"
        )
    useful = config.max_running_requests * -(-context // config.page_size)
    return min(fits, useful)
