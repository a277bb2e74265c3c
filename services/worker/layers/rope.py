"""Rotary position embedding: frequencies of each scaling type, and the rotation.

default: Su et al., arXiv 2104.09864. linear: Chen et al., arXiv 2306.15595.
yarn: Peng et al., arXiv 2309.00071. llama3: the Llama 3.1 reference's rule. The pairs
rotated are (i, i + head_dim / 2), as in Hugging Face checkpoints.
"""

from __future__ import annotations

import math

import torch

from services.common.errors import StartupError
from services.worker.layers.rope_config import RopeConfig

_TABLE_BLOCK = 1024  # positions


class Rope:
    """Turns positions into angles; holds head_dim / 2 inverse frequencies.

    On a CPU it looks cosines and sines up in a table that grows by blocks, each computed
    once: a position's are the same bits in every batch, and cost a copy.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._inv_freq, self._scale = frequencies(config, head_dim)
        self._inv_freq = self._inv_freq.to(device)
        self._table: torch.Tensor | None = None  # [positions, 2, head_dim / 2]
        if device.type == "cpu":
            self._table = self._inv_freq.new_empty(0, 2, head_dim // 2)

    def angles(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [tokens] -> cosines and sines, each [tokens, 1, head_dim / 2]"""
        if self._table is None:
            both = self._compute(positions)
        else:
            both = self._look_up(self._table, positions)
        cos, sin = both.to(dtype).unbind(1)
        return cos[:, None], sin[:, None]

    def _compute(self, positions: torch.Tensor) -> torch.Tensor:
        """positions: [tokens] -> cosines, then sines, [tokens, 2, head_dim / 2]"""
        angle = positions.to(torch.float32)[:, None] * self._inv_freq
        return torch.stack((angle.cos(), angle.sin()), dim=1) * self._scale

    def _look_up(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        missing = range(len(table), int(positions.max()) + 1, _TABLE_BLOCK)
        if missing:
            blocks = [self._compute(torch.arange(at, at + _TABLE_BLOCK)) for at in missing]
            table = self._table = torch.cat((table, *blocks))
        return table.index_select(0, positions)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim], turned by the angles of its tokens."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """The inverse frequencies [head_dim / 2] and the factor on cosines and sines.

    Raises StartupError, naming the type, if it is not one of `ROPE_TYPES`.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (config.theta**exponent)
    if config.frequency_divisors:
        return plain / torch.tensor(config.frequency_divisors), 1.0
    match config.rope_type:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / config.factor, 1.0
        case "llama3":
            return _llama3(config, plain), 1.0
        case "yarn":
            return _yarn(config, plain, head_dim), _yarn_attention_factor(config)
    raise StartupError(f"RoPE type {config.rope_type!r} is not supported")


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = config.original_context * plain / (2 * math.pi)  # over the original context
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / config.factor + keep * plain


def _yarn(config: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often are kept, those that turn seldom stretched, with a ramp."""

    def dimension(turns: float) -> float:
        ratio = config.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((index - low) / span).clamp(0, 1)
    return plain / config.factor * stretch + plain * (1 - stretch)


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
