"""What cannot work is said before a rank is started: in a second, and once for all ranks.

The ranks check again what they build. Here is checked what a model's files and the flags tell
without torch; a model that is still to be downloaded is left to the ranks.
"""

from __future__ import annotations

from pathlib import Path

from services.common.model_files import find_local
from services.common.model_metadata import read_metadata
from services.worker.config import WorkerConfig
from services.worker.layers.shares import Shares
from services.worker.models import config as model_config
from services.worker.sizing import choices
from services.worker.sizing.pool import memory_limit
from services.worker.sizing.weights import host_weights, rank_weights


def check(config: WorkerConfig, *, memory: int | None = None, devices: Path = Path("/dev")) -> None:
    """Raises StartupError if the model cannot be served as configured.

    `memory` are the bytes that this machine lets a process use; found out if not given.
    """
    if config.engine == "fake":
        return
    files = find_local(config.model)
    if files is None:
        return
    shape = model_config.read(files)
    read_metadata(files)
    guessed = "cuda" if _has_gpu(devices) else "cpu"
    device = guessed if config.device == "auto" else config.device
    on_cpu = device == "cpu" or config.deterministic
    dtype = choices.dtype(config.dtype, "cpu" if on_cpu else "cuda", shape.dtype)
    shares = Shares(0, config.tp)
    if on_cpu:
        limit = memory_limit() if memory is None else memory
        host_weights(shape, shares, dtype, config.quantization, config.local_ranks, limit)
    else:  # whose memory is known to the driver alone
        rank_weights(shape, shares, choices.BYTES[dtype])


def _has_gpu(devices: Path) -> bool:
    return any(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))
