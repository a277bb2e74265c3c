"""The sparse feed-forward of a mixture of experts (Qwen3-MoE)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from services.worker.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from services.worker.layers.parallel import Parallel
from services.worker.models.config import MoeConfig


class SparseMlp(nn.Module):
    """Each token goes through its best experts, weighted by the router's softmax.

    Every rank holds its part of every expert; one sum over the ranks at the end.
    """

    def __init__(
        self, name: str, hidden: int, config: MoeConfig, dtype: torch.dtype, parallel: Parallel
    ) -> None:
        super().__init__()
        self._config = config
        self._parallel = parallel
        count = config.num_experts
        self.router = ColumnParallelLinear(
            hidden, [Part(f"{name}.gate", count, 0, count)], bias=False, dtype=dtype
        )
        self.experts = nn.ModuleList(
            Expert(f"{name}.experts.{i}", hidden, config.intermediate_size, dtype, parallel)
            for i in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] -> the same"""
        scores = self.router(x).float().softmax(dim=-1)
        weights, chosen = scores.topk(self._config.experts_per_token, dim=-1)
        if self._config.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert, tokens, slots in _by_expert(chosen):
            y = self.experts[expert](x[tokens]) * weights[tokens, slots, None].to(x.dtype)
            out.index_add_(0, tokens, y)
        return self._parallel.all_reduce(out)


class Expert(nn.Module):
    """One expert's down(silu(gate(x)) * up(x)), this rank's part of the sum."""

    def __init__(
        self, name: str, hidden: int, size: int, dtype: torch.dtype, parallel: Parallel
    ) -> None:
        super().__init__()
        span = parallel.span(size, "feed-forward channels of an expert")
        self.gate_up = ColumnParallelLinear(
            hidden,
            [Part(f"{name}.gate_proj", size, *span), Part(f"{name}.up_proj", size, *span)],
            bias=False,
            dtype=dtype,
        )
        self.down = RowParallelLinear(
            f"{name}.down_proj",
            size,
            hidden,
            bias=False,
            dtype=dtype,
            parallel=parallel,
            reduce=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] -> the same"""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down(F.silu(gate) * up)
        return out


def _by_expert(chosen: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """chosen: [tokens, experts_per_token] -> (expert, its tokens, their places in `chosen`)."""
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        yield expert, tokens, slots
