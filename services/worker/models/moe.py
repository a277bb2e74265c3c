"""The sparse feed-forward of a mixture of experts (Qwen3-MoE)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from services.worker.layers.activation import SiluMul
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
        self._dtype = dtype
        self._stacked: tuple[torch.Tensor, torch.Tensor] | None = None
        count = config.num_experts
        self.router = ColumnParallelLinear(
            hidden, [Part(f"{name}.gate", count, 0, count)], bias=False, dtype=dtype
        )
        self.experts = nn.ModuleList(
            Expert(f"{name}.experts.{i}", hidden, config.intermediate_size, dtype, parallel)
            for i in range(count)
        )

    @property
    def capturable(self) -> bool:
        """Whether the experts can be computed without asking the device who chose which."""
        return self._dtype == torch.bfloat16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] -> the same"""
        scores = self.router(x).float().softmax(dim=-1)
        weights, chosen = scores.topk(self._config.experts_per_token, dim=-1)
        if self._config.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self._stacked is not None:
            out = grouped_experts(x, chosen, weights, *self._stacked)
        else:
            out = torch.zeros_like(x)
            for expert, tokens, slots in _by_expert(chosen):
                y = self.experts[expert](x[tokens]) * weights[tokens, slots, None].to(x.dtype)
                out.index_add_(0, tokens, y)
        return self._parallel.all_reduce(out)

    def stack(self) -> None:
        """Lets the filled experts be computed together, if they are `capturable`.

        Their weights become two tensors, of which the experts keep views. Called before the
        GPU's free memory is measured: what the weights lay in until now goes free.
        """
        if not self.capturable:
            return
        experts = [cast(Expert, expert) for expert in self.experts]
        gate_up = torch.stack([expert.gate_up.weight for expert in experts])
        down = torch.stack([expert.down.weight for expert in experts])
        for index, expert in enumerate(experts):
            expert.gate_up.weight.data = gate_up[index]
            expert.down.weight.data = down[index]
        self._stacked = gate_up, down


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
        self.activation = SiluMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] -> the same"""
        out: torch.Tensor = self.down(self.activation(self.gate_up(x)))
        return out


def grouped_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """All experts in two grouped products over the tokens in order of their experts.

    Nothing here waits for the device: the groups' bounds stay there. x: [tokens, hidden];
    chosen, weights: [tokens, experts_per_token]; gate_up: [experts, 2 * size, hidden];
    down: [experts, hidden, size] -> [tokens, hidden]
    """
    per_token = chosen.shape[1]
    experts, order = chosen.flatten().sort(stable=True)
    every = torch.arange(len(gate_up), device=x.device)
    ends = torch.searchsorted(experts, every, right=True).to(torch.int32)  # [experts]
    gate, up = F.grouped_mm(x[order // per_token], gate_up.transpose(1, 2), offs=ends).chunk(
        2, dim=-1
    )
    y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    # Back to the order of the tokens, so that each one's sum runs in the order of its choices.
    y = y.index_select(0, order.argsort()).view(len(x), per_token, -1)
    return (y * weights[:, :, None].to(y.dtype)).sum(dim=1)


def _by_expert(chosen: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """chosen: [tokens, experts_per_token] -> (expert, its tokens, their places in `chosen`)."""
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        yield expert, tokens, slots
