"""What attention is asked: batch metadata planned once a step, then a call for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from services.worker.core import Batch, IntArray


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a batch stand, on the host.

    Row r's tokens are offsets[r] .. offsets[r + 1] - 1 of the batch, at positions
    start[r] onwards; it attends to the `kv_lens[r]` tokens in its pages.
    """

    start: IntArray  # [rows]
    query_lens: IntArray  # [rows]
    kv_lens: IntArray  # [rows]
    offsets: IntArray  # [rows + 1]
    page_tables: IntArray  # [rows, pages]
    token_rows: IntArray  # [tokens]
    positions: IntArray  # [tokens]

    @classmethod
    def of(cls, batch: Batch) -> AttentionMetadata:
        offsets = np.concatenate(([0], np.cumsum(batch.query_lens))).astype(np.int32)
        rows = np.repeat(np.arange(batch.num_rows, dtype=np.int32), batch.query_lens)
        within = np.arange(offsets[-1], dtype=np.int32) - offsets[rows]
        return cls(
            start=batch.start,
            query_lens=batch.query_lens,
            kv_lens=batch.start + batch.query_lens,
            offsets=offsets,
            page_tables=batch.page_tables,
            token_rows=rows,
            positions=(batch.start[rows] + within).astype(np.int32),
        )

    def cells(self, page_size: int) -> torch.Tensor:
        """Where each token's K and V go: page * page_size + offset in the page, [tokens]"""
        pages = self.page_tables[self.token_rows, self.positions // page_size].astype(np.int64)
        return torch.from_numpy(pages * page_size + self.positions % page_size)


class AttentionPlan(Protocol):
    """A step's attention, made ready."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Writes K and V into the pool, then attends.

        q: [tokens, heads, head_dim], k and v: [tokens, kv_heads, head_dim]
        -> [tokens, heads, head_dim]
        """
        ...


class AttentionBackend(Protocol):
    """A kind of attention kernels over one KV pool."""

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Prepares a step; called once, whatever the number of layers."""
        ...


class GraphPlan(AttentionPlan, Protocol):
    """A plan over fixed buffers: captured once, updated before each replay."""

    @property
    def positions(self) -> torch.Tensor:
        """The rows' positions, [rows]; `update` writes them."""
        ...

    def update(self, metadata: AttentionMetadata) -> None:
        """Brings the metadata of a decode batch of the plan's size into the buffers."""
        ...


class GraphBackend(AttentionBackend, Protocol):
    """A backend whose decode can be captured."""

    def graph_plans(self, sizes: Sequence[int], context: int) -> Mapping[int, GraphPlan]:
        """A plan for decode batches of each size, for requests of up to `context` tokens."""
        ...
