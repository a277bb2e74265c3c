"""Root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from services.worker.layers.loadable import Loadable, Shard, empty_parameter
from services.worker.native.kernels import Kernels


class RmsNorm(Loadable):
    """x / rms(x) * weight over the last axis, in float32 inside."""

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self._name = name
        self._size = size
        self._eps = eps
        self.weight = empty_parameter(size, dtype=dtype)
        self.kernels: Kernels | None = None  # torch computes without

    def shards(self) -> Iterator[Shard]:
        yield Shard(f"{self._name}.weight", (self._size,), "weight", 0, self._size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] -> the same shape"""
        if self.kernels is not None:
            return self.kernels.rms_norm(x, self.weight, self._eps)
        return F.rms_norm(x, (self._size,), self.weight, self._eps)
