"""The draw of a token: top-k, top-p and min-p filters, then Gumbel noise.

A filter keeps a prefix of the ids sorted by score, so only the likeliest few hundred
are sorted; a row whose prefix may be longer is done again with more of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.engine.draw import gumbel

CANDIDATES = 512


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Parameters of the rows that are drawn, each [rows, 1]."""

    temperature: torch.Tensor  # float32
    top_k: torch.Tensor  # int64; the vocabulary's size where off
    top_p: torch.Tensor  # float32
    log_min_p: torch.Tensor  # float32; -inf where off
    key_low: torch.Tensor  # int64
    key_high: torch.Tensor  # int64

    def select(self, rows: torch.Tensor) -> DrawParams:
        """The parameters of some rows."""
        return DrawParams(*(getattr(self, name)[rows] for name in self.__slots__))


def draw(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Draws from the whole distribution.

    logits: [rows, vocab], float32 -> token ids [rows], int64
    """
    ids = torch.arange(logits.shape[1], device=logits.device)[None, :]
    noise = gumbel(params.key_low, params.key_high, ids)
    return noise.addcdiv_(logits, params.temperature).argmax(dim=1)


def draw_top_k(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """`draw_filtered` for rows whose top-k is at most `CANDIDATES`; never waits for the device."""
    return _draw_candidates(logits, params, CANDIDATES)[0]


def draw_filtered(
    logits: torch.Tensor, params: DrawParams, candidates: int = CANDIDATES
) -> torch.Tensor:
    """Draws from what the filters leave: top-k first, then top-p of the rest, then min-p.

    logits: [rows, vocab], float32 -> token ids [rows], int64
    """
    tokens, unsure = _draw_candidates(logits, params, candidates)
    if candidates < logits.shape[1] and unsure.any():
        # Every candidate was kept, so there may be more.
        rows = unsure.nonzero()[:, 0]
        tokens[rows] = draw_filtered(logits[rows], params.select(rows), candidates * 8)
    return tokens


def _draw_candidates(
    logits: torch.Tensor, params: DrawParams, candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among the likeliest; the token ids [rows], and where the filters keep even the last."""
    count = min(candidates, logits.shape[1])
    scores, ids = (logits / params.temperature).topk(count, dim=1)  # [rows, candidates]
    kept = _kept(scores, logits, params)
    noisy = gumbel(params.key_low, params.key_high, ids).add_(scores)
    best = noisy.masked_fill_(~kept, float("-inf")).argmax(dim=1, keepdim=True)
    return ids.gather(1, best)[:, 0], kept[:, -1]


def _kept(scores: torch.Tensor, logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Which of the sorted candidates pass; scores: [rows, candidates] -> bool, the same."""
    rank = torch.arange(scores.shape[1], device=scores.device)[None, :]
    in_top_k = rank < params.top_k
    # The mass that top-p counts: of the top k where there is a k, else of all.
    limited = scores.masked_fill(~in_top_k, float("-inf")).logsumexp(1, keepdim=True)
    whole = (logits / params.temperature).logsumexp(1, keepdim=True)
    total = torch.where(params.top_k <= scores.shape[1], limited, whole)
    probs = (scores - total).exp()
    mass_before = probs.cumsum(1) - probs
    in_top_p = (mass_before < params.top_p) | (params.top_p >= 1)
    in_min_p = scores >= scores[:, :1] + params.log_min_p
    kept = in_top_k & in_top_p & in_min_p
    kept[:, 0] = True
    return kept
