"""How many KV pages there are. Pure arithmetic: who measures memory is not known here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.layers.shares import Shares
from services.worker.models.config import ModelConfig

_CPU_LIMIT = 4 << 30
_MAX_IMBALANCE = 2 << 30
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


def token_bytes(shape: ModelConfig, shares: Shares, itemsize: int) -> int:
    """KV bytes that one token takes on one rank, at `itemsize` bytes a number.

    Raises StartupError if the KV heads cannot be shared out.
    """
    _, kv_heads = shares.kv_span(shape.num_kv_heads)
    return 2 * shape.num_layers * kv_heads * shape.head_dim * itemsize


def num_pages(config: WorkerConfig, context: int, bytes_per_token: int, memory: int) -> int:
    """KV pages on a CPU: those configured, or what fits a quarter of `memory`, at most 4 GiB.

    Never more than all slots at full context can use. `bytes_per_token` is one rank's;
    ranks share the memory. Raises StartupError if not one page fits.
    """
    budget = min(_CPU_LIMIT, memory // 4) // config.tp
    return _pages(
        config, context, bytes_per_token, budget, "that a quarter of this machine's memory leaves"
    )


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Bytes of one GPU: what was free, and what must stay so for other things than KV."""

    free_before: int  # before the weights were loaded; the least over the ranks
    weights: int  # with the kernels' workspaces
    activations: int  # at the peak of the largest step
    graphs: int

    def kv_budget(self, ratio: float) -> int:
        """What `--memory-ratio` leaves for KV."""
        return int(self.free_before * ratio) - self.weights - self.activations - self.graphs


def cuda_pages(config: WorkerConfig, context: int, bytes_per_token: int, memory: CudaMemory) -> int:
    """KV pages on a GPU: what `--memory-ratio` leaves, by the same rules.

    Raises StartupError if not one page fits.
    """
    budget = memory.kv_budget(config.memory_ratio)
    left = (
        f"that --memory-ratio {config.memory_ratio} leaves of {gib(memory.free_before)}: weights"
        f" take {gib(memory.weights)}, activations {gib(memory.activations)}, CUDA graphs"
        f" {gib(memory.graphs)}"
    )
    return _pages(config, context, bytes_per_token, budget, left)


def graph_bytes(first: int, second: int, count: int) -> int:
    """What `count` graphs will take, from what the two largest took.

    The largest brings the memory pool that all share; the others cost as the second does.
    """
    return max(first, 0) + max(second, 0) * max(count - 1, 0)


def check_balance(least: int, most: int) -> None:
    """Raises StartupError if the ranks' GPUs differ by more than 2 GiB in free memory."""
    if most - least > _MAX_IMBALANCE:
        raise StartupError(
            f"the ranks' GPUs differ too much in free memory, {gib(least)} to {gib(most)}:"
            " something else runs on one of them"
        )


def _pages(config: WorkerConfig, context: int, bytes_per_token: int, budget: int, what: str) -> int:
    if config.num_pages:
        return config.num_pages
    page = bytes_per_token * config.page_size
    fits = budget // page
    if fits < 1:
        raise StartupError(f"no KV page fits: a page takes {page} bytes of the {budget} {what}")
    return min(fits, config.max_running_requests * -(-context // config.page_size))


def gib(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / (1 << 30):.2f} GiB"
