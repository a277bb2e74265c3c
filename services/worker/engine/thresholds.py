"""The filtered draw without a sort, and without the host ever waiting for the device.

A filter keeps the ids whose score is at least some threshold; the threshold of top-k and
top-p is found by bisection over the bit patterns of float32, which are in the order of
the numbers. That is exact after 32 halvings, each one pass over the scores. Ids that tie
at the threshold are all kept.
"""

from __future__ import annotations

import torch

from services.worker.engine.draw import gumbel
from services.worker.engine.filters import DrawParams

_LOWEST, _HIGHEST = -(1 << 31), (1 << 31) - 1


def draw_thresholded(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Draws from what the filters leave: top-k first, then top-p of the rest, then min-p.

    logits: [rows, vocab], float32 -> token ids [rows], int64
    """
    scores = logits / params.temperature
    kept = kept_by_filters(scores, params)
    ids = torch.arange(logits.shape[1], device=logits.device)[None, :]
    noisy = gumbel(params.key_low, params.key_high, ids).add_(scores)
    return noisy.masked_fill_(~kept, float("-inf")).argmax(dim=1)


def kept_by_filters(scores: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Which ids pass; scores: [rows, vocab] -> bool, the same"""
    keys = ordered_bits(scores)
    ones = torch.ones((), device=scores.device).expand_as(scores)
    kept = keys >= _threshold(keys, ones, params.top_k.to(torch.float32))
    probs = scores.masked_fill(~kept, float("-inf")).softmax(dim=1)
    # Summed as the bisection sums, so that the whole always reaches its share.
    target = probs.sum(1, keepdim=True) * params.top_p
    kept &= (keys >= _threshold(keys, probs, target)) | (params.top_p >= 1)
    return kept & (scores >= scores.amax(1, keepdim=True) + params.log_min_p)


def ordered_bits(x: torch.Tensor) -> torch.Tensor:
    """float32 -> int32 that compares as the floats do."""
    bits = x.view(torch.int32)
    return bits ^ ((bits >> 31) & _HIGHEST)


def _threshold(keys: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The greatest key at which the weights of the keys from there up reach the target.

    keys, weights: [rows, ids]; target: [rows, 1] -> int32, [rows, 1]
    """
    low = torch.full_like(target, _LOWEST, dtype=torch.int64)  # there the target is reached
    high = torch.full_like(target, _HIGHEST + 1, dtype=torch.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        reached = torch.where(keys >= middle.to(torch.int32), weights, 0).sum(1, keepdim=True)
        enough = reached >= target
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    return low.to(torch.int32)
