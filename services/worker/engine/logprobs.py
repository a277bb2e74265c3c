"""Log-probabilities of tokens: computed on the device, read when the step's result is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from services.worker.core import TokenLogprobs
from services.worker.layers.transfer import to_host


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """What some rows ask to be told; rows of tensors, not yet Python's numbers."""

    token_ids: torch.Tensor  # [rows], int64
    logprobs: torch.Tensor  # [rows]
    top_ids: torch.Tensor  # [rows, the most that one asks for]
    top_logprobs: torch.Tensor  # the same
    counts: Sequence[int]  # of alternatives, by row

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        counts: Sequence[int],
        *,
        alone: bool = False,
    ) -> LogprobReport:
        """The log-probabilities of the chosen ids and of the likeliest `counts[row]` ids.

        With `alone` each row is computed on a copy of its own, so that its bits depend on no
        other. logits: [rows, vocab], raw; chosen: [rows]
        """
        most = min(max(counts, default=0), logits.shape[1])
        if not alone or len(counts) < 2:
            return cls(chosen, *_logprobs(logits, chosen, most), counts)
        rows = [
            _logprobs(row.clone()[None], one[None], most)
            for row, one in zip(logits, chosen, strict=True)
        ]
        picked, top_ids, top = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return cls(chosen, picked, top_ids, top, counts)

    def to_host(self) -> LogprobReport:
        """The same on the host, whole when the current stream has come so far."""
        return replace(
            self,
            token_ids=to_host(self.token_ids),
            logprobs=to_host(self.logprobs),
            top_ids=to_host(self.top_ids),
            top_logprobs=to_host(self.top_logprobs),
        )

    def entries(self) -> list[TokenLogprobs]:
        """One entry a row; of a report on the host."""
        ids, values = self.top_ids.tolist(), self.top_logprobs.tolist()
        chosen = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.counts, strict=True)
        return [
            TokenLogprobs(token, logprob, ids[row][:count], values[row][:count])
            for row, (token, logprob, count) in enumerate(chosen)
        ]


def _logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the chosen ids, [rows]; the likeliest ids and theirs, [rows, most] each."""
    total = logits.logsumexp(dim=1, keepdim=True)
    top, top_ids = logits.topk(most, dim=1)
    picked = (logits.gather(1, chosen[:, None]) - total)[:, 0]
    return picked, top_ids, top - total
