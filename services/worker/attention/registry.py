"""From the name of an attention backend to the backend."""

from __future__ import annotations

from services.common.errors import StartupError
from services.worker.attention.base import AttentionBackend
from services.worker.attention.cpu import CpuBackend
from services.worker.attention.pool import KvPool
from services.worker.attention.torch_reference import TorchReferenceBackend


def check_backend(name: str) -> None:
    """Raises StartupError if the backend cannot be had, before anything is loaded."""
    if name not in ("auto", "cpu", "torch_reference"):
        raise StartupError(
            f"--attention-backend {name} is not in this version, which computes on CPUs;"
            " choose cpu or torch_reference"
        )


def create_backend(name: str, pool: KvPool) -> AttentionBackend:
    """The backend over a pool; auto is cpu."""
    check_backend(name)
    return TorchReferenceBackend(pool) if name == "torch_reference" else CpuBackend(pool)
