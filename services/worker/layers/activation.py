"""The gated activation of the feed-forward layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from services.worker.native.kernels import Kernels


class SiluMul(nn.Module):
    """silu(gate) * up, of a projection that holds both."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Kernels | None = None  # torch computes without

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [tokens, 2 * size], gate first -> [tokens, size]"""
        if self.kernels is not None:
            return self.kernels.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
