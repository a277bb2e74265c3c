"""Attention as the formula reads: row by row, float32, explicit softmax. The oracle."""

from __future__ import annotations

import math

import numpy as np
import torch

from services.worker.attention.base import AttentionMetadata
from services.worker.attention.pool import KvPool


class TorchReferenceBackend:
    """Plain attention; slow, and right."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def plan(self, metadata: AttentionMetadata) -> TorchReferencePlan:
        return TorchReferencePlan(self._pool, metadata)


class TorchReferencePlan:
    """One step of `TorchReferenceBackend`."""

    def __init__(self, pool: KvPool, metadata: AttentionMetadata) -> None:
        self._pool = pool
        self._metadata = metadata
        self._cells = metadata.cells(pool.page_size).to(pool.k.device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        self._pool.write(layer, self._cells, k, v)
        out = torch.empty_like(q)
        offsets = self._metadata.offsets
        for row in range(len(self._metadata.start)):
            begin, end = int(offsets[row]), int(offsets[row + 1])
            out[begin:end] = self._attend(row, q[begin:end], layer).to(out.dtype)
        return out

    def _attend(self, row: int, q: torch.Tensor, layer: int) -> torch.Tensor:
        """q: [query, heads, head_dim] -> the same, float32"""
        kv_len, start = int(self._metadata.kv_lens[row]), int(self._metadata.start[row])
        device = q.device
        pages = torch.from_numpy(self._metadata.page_tables[row].astype(np.int64)).to(device)
        groups = q.shape[1] // self._pool.k.shape[3]
        keys = self._gather(self._pool.k[layer], pages, kv_len, groups)
        values = self._gather(self._pool.v[layer], pages, kv_len, groups)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) / math.sqrt(q.shape[2])
        position = torch.arange(start, kv_len, device=device)
        future = torch.arange(kv_len, device=device)[None, :] > position[:, None]  # [query, kv]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    @staticmethod
    def _gather(cells: torch.Tensor, pages: torch.Tensor, kv_len: int, groups: int) -> torch.Tensor:
        """[pages, page_size, kv_heads, head_dim] -> [kv, heads, head_dim], float32"""
        rows = cells[pages].flatten(0, 1)[:kv_len].float()
        return rows.repeat_interleave(groups, dim=1)
