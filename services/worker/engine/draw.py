"""Random numbers that depend on nothing but (seed, output position, token id).

A sampled token is the argmax of logit / temperature + Gumbel noise, and the noise of a
token is a hash of its coordinates: neighbours in the batch, batch order, preemption
and resume cannot change a draw. The hash is a 32-bit finaliser of the multiply and
xor-shift kind (constants by T. Ettinger, "Hash Function Prospector" #19), applied
twice; the row's key is SplitMix64 (Steele et al., 2014) of seed and position. On a CPU
native/sampling.h computes the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_MASK = 0xFFFFFFFF
_SPREAD = 0x1E3779B1  # odd, below 2^31: products with a token id stay inside int64


def row_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The two 32-bit halves of each row's key, each [rows]."""
    keys = _splitmix64(_splitmix64(seeds) + positions)
    return (keys & np.uint64(_MASK)).astype(np.int64), (keys >> np.uint64(32)).astype(np.int64)


def gumbel(low: torch.Tensor, high: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32.

    low, high: [rows, 1]; token_ids: [rows, ids] or [1, ids] -> [rows, ids]
    """
    mixed = _finalize((token_ids * _SPREAD & _MASK) ^ low)
    mixed = _finalize(mixed.bitwise_xor_(high))
    # The tail that wins draws is at small v, where float32 keeps all 32 bits apart.
    v = mixed.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def _finalize(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit values, in place; int64 never overflows as constants are < 2^31."""
    x.bitwise_xor_(x >> 16).mul_(0x21F0AAAD).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15).mul_(0x735A2D97).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 15)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
