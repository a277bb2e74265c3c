"""Linear layers cut over tensor-parallel ranks, with weights packed for the CPU.

On a CPU the weight is reordered once: into the layout of Shoal's own kernels where the
model was given them, in float32 or eight bits; else into oneDNN's, which is 1.3 times
quicker than the plain layout at one row and twice as quick at eight (two AVX2 cores,
float32). A row's result does not depend on its neighbours with Shoal's kernels; with
oneDNN's that is not promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.common.errors import StartupError
from services.worker.layers.loadable import Loadable, Shard, empty_parameter
from services.worker.layers.parallel import Parallel
from services.worker.native.kernels import Kernels
from services.worker.native.packing import GROUP, PackedWeight, pack_float32, pack_int8


class Linear(Loadable):
    """y = x W^T + b over this rank's part; subclasses say which part."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(out_size, in_size, dtype=dtype)
        self.bias = empty_parameter(out_size, dtype=dtype) if bias else None
        self.kernels: Kernels | None = None  # set before `prepare` to compute with them
        self.int8 = False  # with kernels: the weight in eight bits; set before `prepare`
        self.packed: PackedWeight | None = None  # for the kernels, once prepared
        self._reordered: torch.Tensor | None = None  # for oneDNN, once prepared

    def prepare(self) -> None:
        """Packs the weight and drops the plain copy."""
        weight = self.weight
        if self.kernels is not None:
            self.packed = self._pack(weight.data)
            self.weight = empty_parameter(0, 0, dtype=weight.dtype)
        elif weight.device.type == "cpu" and _packable(weight.dtype):
            self._reordered = torch.ops.mkldnn._reorder_linear_weight(weight.data, None)
            self.weight = empty_parameter(0, 0, dtype=weight.dtype)

    def _pack(self, weight: torch.Tensor) -> PackedWeight:
        bias = None if self.bias is None else self.bias.data
        if not self.int8:
            return pack_float32(weight, bias)
        if weight.shape[1] % GROUP:
            raise StartupError(
                f"--quantization int8 takes inputs in groups of {GROUP}, but a layer of this model"
                f" (or a rank's part of it) has {weight.shape[1]}"
            )
        return pack_int8(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, in] -> [tokens, out]"""
        if self.packed is not None and self.kernels is not None:
            return self.kernels.linear(x, self.packed)
        if self._reordered is None:
            return F.linear(x, self.weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._reordered, self.bias, "none", [], ""
        )
        return y


def _packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes this type quickly on this processor."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor of a fused projection: rows start..start+length are this rank's."""

    name: str
    rows: int
    start: int
    length: int


class ColumnParallelLinear(Linear):
    """Several projections of the same input as one product, cut along the output."""

    def __init__(
        self, in_size: int, parts: Sequence[Part], *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(in_size, sum(part.length for part in parts), bias=bias, dtype=dtype)
        self._in_size = in_size
        self._parts = tuple(parts)

    def shards(self) -> Iterator[Shard]:
        offset = 0
        for part in self._parts:
            shape = (part.rows, self._in_size)
            where = {"start": part.start, "length": part.length, "offset": offset}
            yield Shard(f"{part.name}.weight", shape, "weight", **where)
            if self.bias is not None:
                yield Shard(f"{part.name}.bias", (part.rows,), "bias", **where)
            offset += part.length


class RowParallelLinear(Linear):
    """A projection cut along its input; the ranks' partial results are summed."""

    def __init__(
        self,
        name: str,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        parallel: Parallel,
        reduce: bool = True,
    ) -> None:
        self._start, self._length = parallel.span(in_size, f"inputs of {name.rpartition('.')[2]}")
        super().__init__(self._length, out_size, bias=bias, dtype=dtype)
        self._name = name
        self._shape = (out_size, in_size)
        self._parallel = parallel
        self._reduce = reduce

    def shards(self) -> Iterator[Shard]:
        yield Shard(
            f"{self._name}.weight", self._shape, "weight", self._start, self._length, axis=1
        )
        if self.bias is not None:
            rows = self._shape[0]
            yield Shard(f"{self._name}.bias", (rows,), "bias", 0, rows)

    def prepare(self) -> None:
        super().prepare()
        if self.bias is not None and self._parallel.rank > 0:
            self.bias.zero_()  # the sum over the ranks must hold it once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, this rank's inputs] -> [tokens, out], whole on every rank."""
        y = super().forward(x)
        return self._parallel.all_reduce(y) if self._reduce else y
