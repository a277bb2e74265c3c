"""All layers of a dense decoder as one native call.

A layer makes about thirty calls of torch and ctypes otherwise, which at few rows take longer
than a product in eight bits. The sums are the same as layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.layers.linear import Linear
from services.worker.layers.norm import RmsNorm
from services.worker.native import structures
from services.worker.native.kernels import Kernels, PagedRows


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a dense layer is made of."""

    input_norm: RmsNorm
    qkv: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    output: Linear
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear

    @property
    def packed(self) -> bool:
        """Whether every product is one of the kernels'."""
        linears = (self.qkv, self.output, self.gate_up, self.down)
        return all(linear.packed is not None for linear in linears)

    def structure(self) -> structures.Layer:
        """Pointers into the weights, which must outlive it."""
        return structures.Layer(
            _norm(self.input_norm),
            _norm(self.q_norm),
            _norm(self.k_norm),
            _norm(self.post_norm),
            _weight(self.qkv),
            _weight(self.output),
            _weight(self.gate_up),
            _weight(self.down),
        )


class FusedLayers:
    """Filled and packed layers, ready to run."""

    def __init__(
        self, kernels: Kernels, layers: Sequence[LayerParts], num_heads: int, eps: float
    ) -> None:
        self._kernels = kernels
        self._layers = layers  # keeps the weights that the structures point to
        self._structures = (structures.Layer * len(layers))(*(one.structure() for one in layers))
        self._num_heads = num_heads
        self._eps = eps

    def run(
        self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], rows: PagedRows
    ) -> None:
        """Writes each layer's K and V, attends, and leaves the last hidden states in place.

        hidden: [tokens, hidden]; angles: cosines and sines, [tokens, 1, head_dim / 2] each.
        """
        self._kernels.layers(hidden, self._structures, angles, rows, self._num_heads, self._eps)


def _norm(norm: RmsNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _weight(linear: Linear) -> structures.Weight:
    assert linear.packed is not None
    return linear.packed.structure()
