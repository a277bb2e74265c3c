"""Attention on a CPU by Shoal's own kernels, which read pages in place."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.attention.base import AttentionMetadata
from services.worker.attention.pool import KvPool
from services.worker.native.kernels import Kernels, PagedRows


class NativeBackend:
    """Paged attention in float32 for the head sizes that have a kernel.

    With `uniform` a token's result is the same bits whether it is decoded or prefilled, in
    whatever chunk and company.
    """

    def __init__(self, pool: KvPool, kernels: Kernels, *, uniform: bool = False) -> None:
        self._pool = pool
        self._kernels = kernels
        self._uniform = uniform

    def plan(self, metadata: AttentionMetadata) -> NativePlan:
        return NativePlan(self._pool, self._kernels, metadata, uniform=self._uniform)


class NativePlan:
    """One step of `NativeBackend`; `rows` is for kernels that do more than attention."""

    def __init__(
        self, pool: KvPool, kernels: Kernels, metadata: AttentionMetadata, *, uniform: bool
    ) -> None:
        self._kernels = kernels
        in_table = metadata.positions // pool.page_size
        self.rows = PagedRows(
            pool.k,
            pool.v,
            page_tables=_int32(metadata.page_tables),
            starts=_int32(metadata.start),
            query_lens=_int32(metadata.query_lens),
            pages=_int32(metadata.page_tables[metadata.token_rows, in_table]),
            slots=_int32(metadata.positions % pool.page_size),
            scale=pool.k.shape[-1] ** -0.5,
            uniform=uniform,
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        self._kernels.kv_write(k, v, self.rows, layer)
        return self._kernels.paged_attention(q.contiguous(), self.rows, layer)


def _int32(array: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
