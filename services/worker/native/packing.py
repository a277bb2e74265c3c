"""Weights as the kernels read them, in float32 or in eight bits.

Eight bits: an output's inputs go in groups of 32, each with a scale and a minimum, and a weight
is minimum + scale * q. q has 121 levels, which hold those of four-bit blocks (15 * 8 + 1), so a
GGUF file's Q4_0 or Q4_1 weights lose nothing; where all of a weight's groups are such blocks, q
is the block's own number, and the kernel may add up in 16 bits for longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.native import structures

PANEL = 16  # outputs that a linear kernel computes together, as in linear.h
GROUP = 32  # inputs that share a scale, as in int8.h
_QUAD = 4
_LEVELS = 120
_NARROW_LEVELS = 15


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in], and its bias, laid out for `Kernels.linear`."""

    data: (
        Tensor  # float32 [panels, in, PANEL] or uint8 [panels, in / 4, PANEL, 4], zeros at the end
    )
    scales: Tensor | None  # with eight bits: [panels, groups, 2, PANEL], scales and then minima
    bias: Tensor | None  # [out]
    in_size: int
    out_size: int
    narrow: bool = False  # no integer is above 15

    def structure(self) -> structures.Weight:
        """The same for C; it points into the tensors, which must outlive it."""
        return structures.Weight(
            self.data.data_ptr(),
            _pointer(self.scales),
            _pointer(self.bias),
            self.in_size,
            self.out_size,
            self.narrow,
        )


def pack_float32(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Packs a weight [out, in] as it is."""
    out_size, in_size = weight.shape
    data = _panels(weight).transpose(1, 2).contiguous()
    return PackedWeight(data, None, bias, in_size, out_size)


def pack_int8(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Packs a weight [out, in], float32, in eight bits; `in` must be a multiple of GROUP."""
    out_size, in_size = weight.shape
    assert in_size % GROUP == 0
    groups = _panels(weight).view(-1, PANEL, in_size // GROUP, GROUP)
    numbers, scale, minimum = _quantize(groups, _NARROW_LEVELS)
    step_error = (minimum + scale * numbers - groups).abs_() / scale.clamp(min=1e-30)
    narrow = bool((step_error <= 1e-3).all())
    if not narrow:
        numbers, scale, minimum = _quantize(groups, _LEVELS)
    data = numbers.to(torch.uint8).view(-1, PANEL, in_size // _QUAD, _QUAD)
    scales = torch.stack((scale[..., 0], minimum[..., 0]), dim=1)  # [panels, 2, PANEL, groups]
    return PackedWeight(
        data.transpose(1, 2).contiguous(),
        scales.permute(0, 3, 1, 2).contiguous(),
        bias,
        in_size,
        out_size,
        narrow,
    )


def _quantize(groups: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """groups: [..., GROUP] -> integers 0 .. levels, and scales and minima, [..., 1] each."""
    minimum = groups.amin(-1, keepdim=True)
    scale = (groups.amax(-1, keepdim=True) - minimum) / levels
    numbers = ((groups - minimum) / scale.clamp(min=1e-30)).round_().clamp_(0, levels)
    return numbers, scale, minimum


def _panels(weight: Tensor) -> Tensor:
    """[out, in] -> [panels, PANEL, in], zeros after the last output."""
    out_size, in_size = weight.shape
    panels = -(-out_size // PANEL)
    padded = weight.new_zeros(panels * PANEL, in_size)
    padded[:out_size] = weight
    return padded.view(panels, PANEL, in_size)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
