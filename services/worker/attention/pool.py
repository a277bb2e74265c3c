"""The paged KV pool: tensors only; who owns which page is the scheduler's business."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class KvPool:
    """K and V of every layer, [layers, pages + 1, page_size, kv_heads, head_dim] each.

    The last page is the dummy: page tables point there where a row has no page. The
    pool starts as zeros, since a masked cell's weight of zero times a stray NaN is NaN.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_size: int
    head_major: bool = False

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        head_major: bool = False,
        device: torch.device = CPU,
    ) -> KvPool:
        """Makes the pool; `head_major` keeps a head's cells of a page together in memory.

        That is what kernels that go head by head read fastest; the shape is the same.
        """
        if head_major:
            shape = (num_layers, num_pages + 1, num_kv_heads, page_size, head_dim)
            k, v = (_zeros(shape, dtype, device).transpose(2, 3) for _ in range(2))
            return cls(k, v, page_size, head_major)
        shape = (num_layers, num_pages + 1, page_size, num_kv_heads, head_dim)
        return cls(_zeros(shape, dtype, device), _zeros(shape, dtype, device), page_size)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer as they lie in memory: cells of a page first, or heads first."""
        k, v = self.k[layer], self.v[layer]
        return (k.transpose(1, 2), v.transpose(1, 2)) if self.head_major else (k, v)

    def write(self, layer: int, cells: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k and v [tokens, kv_heads, head_dim] at `cells` [tokens]; not if head-major."""
        self.k[layer].flatten(0, 1).index_copy_(0, cells, k)
        self.v[layer].flatten(0, 1).index_copy_(0, cells, v)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose memory is taken when first written; torch.zeros would touch all of it now."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
