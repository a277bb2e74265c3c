"""Attention on a CPU by Shoal's own kernels, which read pages in place."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.attention.base import AttentionMetadata
from services.worker.attention.pool import KvPool
from services.worker.native.kernels import Kernels


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
    """One step of `NativeBackend`."""

    def __init__(
        self, pool: KvPool, kernels: Kernels, metadata: AttentionMetadata, *, uniform: bool
    ) -> None:
        self._uniform = uniform
        self._pool = pool
        self._kernels = kernels
        self._tables = _int32(metadata.page_tables)  # [rows, pages]
        self._starts = _int32(metadata.start)  # [rows]
        self._query_lens = _int32(metadata.query_lens)  # [rows]
        in_table = metadata.positions // pool.page_size
        self._pages = _int32(metadata.page_tables[metadata.token_rows, in_table])  # [tokens]
        self._slots = _int32(metadata.positions % pool.page_size)  # [tokens]
        self._scale = pool.k.shape[-1] ** -0.5

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        keys, values = self._pool.k[layer], self._pool.v[layer]
        self._kernels.kv_write(keys, values, k, v, self._pages, self._slots)
        return self._kernels.paged_attention(
            q.contiguous(),
            keys,
            values,
            self._tables,
            self._starts,
            self._query_lens,
            self._scale,
            uniform=self._uniform,
        )


def _int32(array: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
