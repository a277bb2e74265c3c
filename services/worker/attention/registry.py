"""From the name of an attention backend to the backend, over a pool laid out for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from services.common.errors import StartupError
from services.worker.attention.base import AttentionBackend
from services.worker.attention.cpu import CpuBackend
from services.worker.attention.native import NativeBackend
from services.worker.attention.pool import KvPool
from services.worker.attention.torch_reference import TorchReferenceBackend
from services.worker.native.kernels import HEAD_DIMS, Kernels

log = logging.getLogger(__name__)


def create_backend(
    name: str,
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    deterministic: bool = False,
) -> AttentionBackend:
    """The backend over a new pool; auto is cpu, by native kernels where they can be had.

    Raises StartupError if it cannot be `deterministic`: only the native kernels can.
    """
    kernels = _kernels(head_dim, dtype) if name != "torch_reference" else None
    if deterministic and kernels is None:
        raise StartupError(
            "--deterministic needs the native kernels: --attention-backend cpu, --dtype float32,"
            f" a C++ compiler, and a head size of {_listed(HEAD_DIMS)} (the model's is {head_dim})"
        )
    pool = KvPool.allocate(
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        head_major=kernels is not None,
    )
    if name == "torch_reference":
        return TorchReferenceBackend(pool)
    if kernels is None:
        return CpuBackend(pool)
    return NativeBackend(pool, kernels, uniform=deterministic)


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


def _kernels(head_dim: int, dtype: torch.dtype) -> Kernels | None:
    if dtype != torch.float32 or head_dim not in HEAD_DIMS:
        log.info("attention by torch: no native kernel for %s, head size %d", dtype, head_dim)
        return None
    kernels = Kernels.load()
    if kernels is None:
        log.info("attention by torch: no C++ compiler to build the native kernels with")
    return kernels
