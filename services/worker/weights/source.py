"""A checkpoint as the loader sees it: named tensors of which any part can be read."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, whatever the file format."""

    def names(self) -> frozenset[str]:
        """Every tensor in the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's whole shape."""
        ...

    def read(self, name: str, axis: int, start: int, length: int) -> torch.Tensor:
        """The part of a tensor from `start` along `axis`."""
        ...

    def identity(self) -> bytes:
        """Bytes that differ between checkpoints: sizes and headers, not the weights themselves."""
        ...
