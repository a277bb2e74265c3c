"""From logits to tokens: edits, draws and log-probabilities, vectorised over the batch.

The order is that of the field: log-probabilities are of the raw logits; then penalties,
logit bias and bans edit them; then temperature, filters and the draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.core import Admission, IntArray, TokenLogprobs
from services.worker.engine.draw import row_keys
from services.worker.engine.filters import DrawParams, draw, draw_filtered
from services.worker.engine.slot_state import SlotState

RowIndex = npt.NDArray[np.int64]


class Sampler:
    """Samples for slots; owns their parameters."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.slots = SlotState(num_slots, vocab_size)

    def admit(self, admission: Admission) -> None:
        """Takes over a slot for a request."""
        self.slots.admit(admission)

    def sample(
        self, logits: torch.Tensor, slots: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, dict[int, TokenLogprobs]]:
        """Chooses a token for each row, and counts it.

        `logits` [rows, vocab], float32, may be overwritten; `positions` [rows] are the
        indices of the tokens among the outputs. Returns the ids [rows], int64, and the
        log-probabilities of the rows that ask for them.
        """
        state = self.slots
        reported = np.flatnonzero(state.wants_logprobs[slots])
        raw = logits[torch.from_numpy(reported)] if len(reported) else None
        self._edit(logits, slots, positions)
        tokens = self._choose(logits, slots, positions)
        penalized = np.flatnonzero(state.penalized[slots])
        if len(penalized):
            state.penalties.count(slots[penalized], tokens[torch.from_numpy(penalized)])
        if raw is None:
            return tokens, {}
        counts = [state.admissions[slot].sampling.logprobs or 0 for slot in slots[reported]]
        chosen = tokens[torch.from_numpy(reported)]
        return tokens, dict(
            zip(reported.tolist(), report_logprobs(raw, chosen, counts), strict=True)
        )

    def _edit(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> None:
        """Applies penalties, logit bias and bans, in place."""
        state = self.slots
        rows = np.flatnonzero(state.penalized[slots])
        if len(rows):
            index = torch.from_numpy(rows)
            params = self._penalty_params(slots[rows])
            logits[index] = state.penalties.apply(logits[index], slots[rows], params)
        for row in np.flatnonzero(state.biased[slots]).tolist():
            ids, values = state.bias[int(slots[row])]
            logits[row].index_add_(0, ids, values)
        for row in np.flatnonzero(positions < state.min_tokens[slots]).tolist():
            logits[row].index_fill_(0, state.banned[int(slots[row])], float("-inf"))

    def _penalty_params(self, slots: IntArray) -> npt.NDArray[np.float32]:
        sampling = [self.slots.admissions[slot].sampling for slot in slots.tolist()]
        return np.array(
            [(s.presence_penalty, s.frequency_penalty, s.repetition_penalty) for s in sampling],
            dtype=np.float32,
        )

    def _choose(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> torch.Tensor:
        greedy, filtered = self.slots.greedy[slots], self.slots.filtered[slots]
        if greedy.all():
            return logits.argmax(dim=1)
        tokens = torch.empty(len(slots), dtype=torch.int64)
        for rows, choose in (
            (np.flatnonzero(~greedy & ~filtered), draw),
            (np.flatnonzero(~greedy & filtered), draw_filtered),
        ):
            if len(rows):
                index = torch.from_numpy(rows)
                params = self._draw_params(slots[rows], positions[rows])
                tokens[index] = choose(logits[index], params)
        rows = np.flatnonzero(greedy)
        if len(rows):
            index = torch.from_numpy(rows)
            tokens[index] = logits[index].argmax(dim=1)
        return tokens

    def _draw_params(self, slots: IntArray, positions: IntArray) -> DrawParams:
        state = self.slots
        low, high = row_keys(state.seeds[slots], positions.astype(np.uint64))

        def column(values: npt.NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(values[slots])[:, None]

        return DrawParams(
            temperature=column(state.temperature),
            top_k=column(state.top_k),
            top_p=column(state.top_p),
            log_min_p=column(state.log_min_p),
            key_low=low,
            key_high=high,
        )


def report_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, counts: Sequence[int]
) -> list[TokenLogprobs]:
    """The log-probabilities of the chosen ids and of the likeliest `counts[row]` ids.

    logits: [rows, vocab]; chosen: [rows]
    """
    total = logits.logsumexp(dim=1, keepdim=True)
    picked = (logits.gather(1, chosen[:, None]) - total)[:, 0].tolist()
    most = min(max(counts, default=0), logits.shape[1])
    top, top_ids = logits.topk(most, dim=1)
    values, ids = (top - total).tolist(), top_ids.tolist()
    return [
        TokenLogprobs(token, picked[row], ids[row][:count], values[row][:count])
        for row, (token, count) in enumerate(zip(chosen.tolist(), counts, strict=True))
    ]
