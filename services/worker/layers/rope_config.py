"""What a checkpoint says of its rotary position embedding. Who turns vectors by it is `rope`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: tuple[str, ...] = get_args(RopeType)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The numbers of a checkpoint's rope section; unused ones keep their defaults."""

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()  # a GGUF file's own scaling, [head_dim / 2]
