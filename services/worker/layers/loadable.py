"""What a layer tells the weight loader: which tensors of a checkpoint it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Shard:
    """A piece of a checkpoint tensor and the place it goes to.

    The piece is `length` from `start` along `axis` of the tensor called `source`, whose
    whole shape is `shape`; it fills rows `offset` onwards of the layer's `parameter`.
    """

    source: str
    shape: tuple[int, ...]
    parameter: str
    start: int
    length: int
    axis: int = 0
    offset: int = 0


class Loadable(nn.Module):
    """A layer that is filled from shards; built on the meta device, then materialised."""

    def shards(self) -> Iterator[Shard]:
        """The pieces that fill this layer's own parameters (not its children's)."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Called once, after the layer is filled."""


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An unfilled weight; Shoal never trains."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
