"""From logits to tokens: edits, draws and log-probabilities, vectorised over the batch.

The order is that of the field: log-probabilities are of the raw logits; then penalties,
logit bias, bans and the masks of grammars edit them; then temperature, filters and the draw.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from services.worker.core import Admission, BoolArray, IntArray
from services.worker.engine.draw import row_keys
from services.worker.engine.filters import CANDIDATES, DrawParams, draw, draw_filtered, draw_top_k
from services.worker.engine.logprobs import LogprobReport
from services.worker.engine.masking import SampleMasks
from services.worker.engine.slot_state import SlotState
from services.worker.engine.thresholds import draw_thresholded
from services.worker.layers.transfer import to_device
from services.worker.native import structures
from services.worker.native.kernels import Kernels

RowIndex = npt.NDArray[np.int64]
SampledLogprobs = tuple[RowIndex, LogprobReport]  # the rows that are reported, and their report


CPU = torch.device("cpu")


class Sampler:
    """Samples for slots on a device; owns their parameters.

    On CUDA nothing here waits for the device: which rows need what is known on the host. On the
    CPU native kernels penalise and draw where there are any.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        *,
        device: torch.device = CPU,
        alone: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        self.slots = SlotState(num_slots, vocab_size, device)
        self.alone = alone  # rows are computed one by one, so that none depends on another
        self._device = device
        self._kernels = kernels  # torch penalises and draws without

    def admit(self, admission: Admission) -> None:
        """Takes over a slot for a request."""
        self.slots.admit(admission)

    def sample(
        self,
        logits: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
        masks: SampleMasks | None = None,
    ) -> tuple[torch.Tensor, SampledLogprobs | None]:
        """Chooses a token for each row, and counts it.

        `logits` [rows, vocab], float32, may be overwritten; `positions` [rows] are the
        indices of the tokens among the outputs; `masks` those of rows with a grammar, which
        already ban what min_tokens does. Returns the ids [rows], int64, and the
        log-probabilities of the rows that ask for them.
        """
        state = self.slots
        reported = np.flatnonzero(state.wants_logprobs[slots])
        if not len(reported):
            return self._sample(logits, slots, positions, masks), None
        index = self._on_device(reported)
        raw = logits[index]
        tokens = self._sample(logits, slots, positions, masks)
        counts = [state.admissions[slot].sampling.logprobs or 0 for slot in slots[reported]]
        return tokens, (reported, LogprobReport.of(raw, tokens[index], counts, alone=self.alone))

    def _sample(
        self,
        logits: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
        masks: SampleMasks | None,
    ) -> torch.Tensor:
        """The ids, [rows]"""
        if self.alone and self._kernels is None and len(slots) > 1:
            # Each row on a copy of its own, as torch's sums and logarithms may depend on where
            # in a tensor a number stands.
            choices = []
            for row in range(len(slots)):
                one = slice(row, row + 1)
                mask = masks.of_row(row) if masks is not None else None
                choices.append(self._sample(logits[one].clone(), slots[one], positions[one], mask))
            return torch.cat(choices)
        self._edit(logits, slots, positions, masks)
        tokens = self._choose(logits, slots, positions)
        penalized = np.flatnonzero(self.slots.penalized[slots])
        if len(penalized):
            index = self._on_device(penalized)
            self.slots.penalties.count(slots[penalized], tokens[index])
        return tokens

    def _edit(
        self,
        logits: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
        masks: SampleMasks | None,
    ) -> None:
        """Applies penalties, logit bias, bans and masks, in place."""
        state = self.slots
        rows = np.flatnonzero(state.penalized[slots])
        if len(rows):
            self._penalize(logits, rows, slots[rows])
        for row in np.flatnonzero(state.biased[slots]).tolist():
            ids, values = state.bias[int(slots[row])]
            logits[row].index_add_(0, ids, values)
        early = positions < state.min_tokens[slots]
        if masks is not None:
            masks.apply(logits)
            early[masks.rows] = False  # what they leave is never empty; more bans could make it so
        for row in np.flatnonzero(early).tolist():
            logits[row].index_fill_(0, state.banned[int(slots[row])], float("-inf"))

    def _penalize(self, logits: torch.Tensor, rows: RowIndex, slots: IntArray) -> None:
        params, penalties = self._penalty_params(slots), self.slots.penalties
        if self._kernels is not None:
            penalties.apply_natively(self._kernels, logits, rows, slots, params)
        else:
            index = self._on_device(rows)
            logits[index] = penalties.apply(logits[index], slots, params)

    def _penalty_params(self, slots: IntArray) -> npt.NDArray[np.float32]:
        sampling = [self.slots.admissions[slot].sampling for slot in slots.tolist()]
        return np.array(
            [(s.presence_penalty, s.frequency_penalty, s.repetition_penalty) for s in sampling],
            dtype=np.float32,
        )

    def _choose(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> torch.Tensor:
        if self._kernels is not None:
            return self._kernels.choose(logits, self._native_draws(slots, positions))
        greedy, filtered = self.slots.greedy[slots], self.slots.filtered[slots]
        if greedy.all():
            return logits.argmax(dim=1)
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        for rows, choose in self._draws(~greedy, filtered, self.slots.top_k[slots]):
            if len(rows):
                index = self._on_device(rows)
                params = self._draw_params(slots[rows], positions[rows])
                tokens[index] = choose(logits[index], params)
        rows = np.flatnonzero(greedy)
        if len(rows):
            index = self._on_device(rows)
            tokens[index] = logits[index].argmax(dim=1)
        return tokens

    def _draws(
        self, drawn: BoolArray, filtered: BoolArray, top_k: RowIndex
    ) -> list[tuple[RowIndex, Callable[[torch.Tensor, DrawParams], torch.Tensor]]]:
        """The rows of each kind of draw."""
        plain = (np.flatnonzero(drawn & ~filtered), draw)
        if self._device.type == "cpu":
            return [plain, (np.flatnonzero(drawn & filtered), draw_filtered)]
        few = top_k <= CANDIDATES
        return [
            plain,
            (np.flatnonzero(drawn & filtered & few), draw_top_k),
            (np.flatnonzero(drawn & filtered & ~few), draw_thresholded),
        ]

    def _native_draws(self, slots: IntArray, positions: IntArray) -> npt.NDArray[np.void]:
        state = self.slots
        draws = np.empty(len(slots), structures.DRAW)
        draws["temperature"] = np.where(state.greedy[slots], 0.0, state.temperature[slots])
        for name in ("top_p", "log_min_p", "top_k"):
            draws[name] = getattr(state, name)[slots]
        keys = row_keys(state.seeds[slots], positions.astype(np.uint64))
        draws["key_low"], draws["key_high"] = keys
        return draws

    def _draw_params(self, slots: IntArray, positions: IntArray) -> DrawParams:
        state = self.slots
        low, high = row_keys(state.seeds[slots], positions.astype(np.uint64))

        def column(values: npt.NDArray[np.generic]) -> torch.Tensor:
            return self._on_device(values[slots])[:, None]

        return DrawParams(
            temperature=column(state.temperature),
            top_k=column(state.top_k),
            top_p=column(state.top_p),
            log_min_p=column(state.log_min_p),
            key_low=self._on_device(low)[:, None],
            key_high=self._on_device(high)[:, None],
        )

    def _on_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self._device)
