"""Tensor parallelism as the layers see it: a rank, a size, and three collectives.

It does not know how ranks find each other; see `services.worker.engine.group`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from services.worker.layers.shares import Shares


@dataclass(frozen=True, slots=True)
class Parallel(Shares):
    """One rank among `size`; alone by default, and then no process group is needed."""

    ordered: bool = False  # sums run in the order of the ranks, whatever the tensor's size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1 and self.ordered:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(parts, x)
            torch.add(parts[0], parts[1], out=x)
            for part in parts[2:]:
                x += part
        elif self.size > 1:
            dist.all_reduce(x)
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """The ranks' [rows, columns] side by side on rank 0; None on the others."""
        if self.size == 1:
            return x
        if x.is_cuda:  # to all: a gather of NCCL is point to point, which graphs bear less well
            rows, columns = x.shape
            whole = x.new_empty(self.size * rows, columns)
            dist.all_gather_into_tensor(whole, x.contiguous())
            if self.rank > 0:
                return None
            return whole.view(self.size, rows, columns).transpose(0, 1).reshape(rows, -1)
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x.contiguous(), parts, dst=0)
        return torch.cat(parts, dim=1) if parts is not None else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, in place."""
        if self.size > 1:
            dist.broadcast(x, src=0)
        return x

    def extremes(self, value: int) -> tuple[int, int]:
        """The least and the greatest of the ranks' values."""
        if self.size == 1:
            return value, value
        both = torch.tensor([value, -value], dtype=torch.int64)
        dist.all_reduce(both, op=dist.ReduceOp.MIN)
        least, negative_most = both.tolist()
        return int(least), -int(negative_most)
