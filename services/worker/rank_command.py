"""The command that starts this host's ranks. It starts nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from services.worker.config import WorkerConfig


def rank_command(config: WorkerConfig, module: str, logs: Path) -> list[str]:
    """torchrun, with `module` as each rank; its logs go to a directory."""
    if config.engine == "fake" and config.tp == 1:
        return [sys.executable, "-m", module]  # needs no torch, so starts at once
    return [
        *(sys.executable, "-m", "services.worker.torchrun"),
        f"--nproc-per-node={config.local_ranks}",
        f"--nnodes={config.nnodes}",
        *_rendezvous(config),
        "--max-restarts=0",
        "--monitor-interval=3",
        f"--log-dir={logs}",
        *("-m", module),
    ]


def _rendezvous(config: WorkerConfig) -> list[str]:
    """How the hosts' torchruns meet."""
    if config.nnodes == 1:
        return [
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            f"--rdzv-id=shoal-{os.getpid()}",
            "--local-addr=localhost",  # no look-up of the host's own name
        ]
    return [
        "--rdzv-backend=static",  # the hosts are numbered, so that rank 0 is where it serves
        f"--rdzv-endpoint={config.rendezvous}",
        f"--node-rank={config.node_rank}",
        "--rdzv-id=shoal",
    ]
