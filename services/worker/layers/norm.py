"""Root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from services.worker.layers.loadable import Loadable, Shard, empty_parameter


class RmsNorm(Loadable):
    """x / rms(x) * weight over the last axis, in float32 inside."""

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self._name = name
        self._size = size
        self._eps = eps
        self.weight = empty_parameter(size, dtype=dtype)

    def shards(self) -> Iterator[Shard]:
        yield Shard(f"{self._name}.weight", (self._size,), "weight", 0, self._size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] -> the same shape"""
        return F.rms_norm(x, (self._size,), self.weight, self._eps)
