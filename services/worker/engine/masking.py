"""Masks of grammars on logits: packed bits from the host, unpacked where the logits are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.core import IntArray
from services.worker.layers.transfer import to_device

_BITS = np.array([1 << bit for bit in range(8)], np.uint8)


@dataclass(frozen=True, slots=True)
class SampleMasks:
    """Which ids some of the rows that sample may take."""

    rows: npt.NDArray[np.int64]  # [masked], places among the rows that sample
    words: IntArray  # [masked, words], packed as `services.worker.core.Matcher.fill` says

    def of_row(self, row: int) -> SampleMasks | None:
        """The mask of one row, as that of row 0; None if it has none."""
        place = np.flatnonzero(self.rows == row)
        if not len(place):
            return None
        return SampleMasks(np.zeros(1, np.int64), self.words[place])

    def apply(self, logits: torch.Tensor) -> None:
        """Gives every id that a mask forbids the logit -inf; logits: [rows, vocab]"""
        rows = to_device(self.rows, logits.device)
        words = to_device(self.words.view(np.uint8), logits.device)
        bits = words[:, :, None] & to_device(_BITS, logits.device)  # [masked, bytes, 8]
        forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0  # [masked, vocab]
        logits[rows] = logits[rows].masked_fill(forbidden, float("-inf"))
