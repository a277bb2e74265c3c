"""The fixed device memory behind captured decode graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """Device memory whose addresses captured graphs hold; the sizes of graphs share it."""

    kv_indptr: torch.Tensor  # [rows + 1]
    kv_indices: torch.Tensor  # [rows * pages of a whole context]
    last_page_len: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    token_rows: torch.Tensor  # [rows]: 0, 1, 2, ...

    @classmethod
    def allocate(cls, num_rows: int, num_indices: int, device: torch.device) -> GraphBuffers:
        """Buffers for graphs of up to `num_rows` rows with `num_indices` pages in all."""

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            kv_indptr=zeros(num_rows + 1),
            kv_indices=zeros(num_indices),
            last_page_len=zeros(num_rows),
            positions=zeros(num_rows),
            token_rows=torch.arange(num_rows, dtype=torch.int32, device=device),
        )
