"""What the engine keeps for each slot: sampling parameters, penalty counts, bans.

Host arrays say which rows need what, so that a feature nobody uses costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.core import Admission, IntArray
from services.worker.layers.transfer import to_device
from services.worker.native import structures
from services.worker.native.kernels import Kernels

_SEED_MASK = (1 << 64) - 1


class SlotState:
    """Arrays indexed by slot, written at admission."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.greedy = np.ones(num_slots, dtype=np.bool_)
        self.filtered = np.zeros(num_slots, dtype=np.bool_)
        self.penalized = np.zeros(num_slots, dtype=np.bool_)
        self.biased = np.zeros(num_slots, dtype=np.bool_)
        self.wants_logprobs = np.zeros(num_slots, dtype=np.bool_)
        self.wants_prompt_logprobs = np.zeros(num_slots, dtype=np.bool_)
        self.min_tokens = np.zeros(num_slots, dtype=np.int32)
        self.seeds = np.zeros(num_slots, dtype=np.uint64)
        self.temperature = np.ones(num_slots, dtype=np.float32)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.top_p = np.ones(num_slots, dtype=np.float32)
        self.log_min_p = np.zeros(num_slots, dtype=np.float32)
        self.admissions: dict[int, Admission] = {}
        self.banned: dict[int, torch.Tensor] = {}
        self.bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.penalties = PenaltyCounts(vocab_size, device)

    def admit(self, admission: Admission) -> None:
        """Takes over a slot for a request."""
        slot, sampling = admission.slot, admission.sampling
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size
        min_p_off = sampling.min_p <= 0
        self.admissions[slot] = admission
        self.greedy[slot] = sampling.greedy
        self.filtered[slot] = top_k < self._vocab_size or sampling.top_p < 1 or not min_p_off
        self.penalized[slot] = sampling.penalized
        self.wants_logprobs[slot] = sampling.logprobs is not None
        self.wants_prompt_logprobs[slot] = sampling.prompt_logprobs is not None
        self.seeds[slot] = sampling.seed & _SEED_MASK
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = top_k
        self.top_p[slot] = sampling.top_p
        self.log_min_p[slot] = -np.inf if min_p_off else np.log(sampling.min_p)
        self._admit_edits(admission)
        self.penalties.drop(slot)
        if sampling.penalized:
            self.penalties.admit(admission)

    def _admit_edits(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        banned = self._known(admission.banned_ids)
        self.min_tokens[slot] = sampling.min_tokens if banned else 0
        self.banned[slot] = to_device(np.array(banned, np.int64), self._device)
        # An id between the tokenizer's and the model's size is harmless; one beyond has no effect.
        ids = self._known(tuple(sampling.logit_bias))
        self.biased[slot] = bool(ids)
        values = [sampling.logit_bias[i] for i in ids]
        self.bias[slot] = (
            to_device(np.array(ids, np.int64), self._device),
            to_device(np.array(values, np.float32), self._device),
        )

    def _known(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if 0 <= i < self._vocab_size]


class PenaltyCounts:
    """Outputs counted and prompt ids marked, for slots that use penalties only.

    Rows of [rows, vocab] tensors that double when they run out; a slot's row is free
    again when the slot's next holder is admitted.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._outputs = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._one = torch.ones((), dtype=torch.int32, device=device)

    def drop(self, slot: int) -> None:
        """Frees a slot's row, if it has one."""
        if (row := self._rows.pop(slot, None)) is not None:
            self._free.append(row)

    def admit(self, admission: Admission) -> None:
        """Counts a request's ids so far."""
        if not self._free:
            self._grow()
        row = self._rows[admission.slot] = self._free.pop()
        outputs = np.bincount(admission.output_ids, minlength=self._vocab_size)
        self._outputs[row] = to_device(outputs[: self._vocab_size], self._device)
        self._in_prompt[row] = False
        prompt_ids = to_device(admission.prompt_ids.astype(np.int64), self._device)
        self._in_prompt[row].index_fill_(0, prompt_ids, True)

    def count(self, slots: IntArray, token_ids: torch.Tensor) -> None:
        """Adds one sampled token to each of some penalised slots; token_ids: [slots]"""
        rows = self._index(slots)
        self._outputs.index_put_((rows, token_ids), self._one, accumulate=True)

    def apply(
        self, logits: torch.Tensor, slots: IntArray, params: npt.NDArray[np.float32]
    ) -> torch.Tensor:
        """Penalises the logits [slots, vocab] of penalised slots.

        `params` are [slots, 3]: presence, frequency (of outputs), repetition (of prompt
        and outputs; Keskar et al., arXiv 1909.05858).
        """
        rows = self._index(slots)
        counts = self._outputs[rows]
        presence, frequency, repetition = to_device(params, self._device)[:, :, None].unbind(1)
        seen = counts > 0
        scale = torch.where(seen | self._in_prompt[rows], repetition, 1.0)
        logits = torch.where(logits > 0, logits / scale, logits * scale)
        edited: torch.Tensor = logits - frequency * counts - presence * seen
        return edited

    def apply_natively(
        self,
        kernels: Kernels,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        slots: IntArray,
        params: npt.NDArray[np.float32],
    ) -> None:
        """`apply` to `rows` of logits [rows of the batch, vocab], in place."""
        penalties = np.empty(len(rows), structures.PENALTY)
        penalties["row"], penalties["counts_row"] = rows, self._rows_of(slots)
        for column, name in enumerate(("presence", "frequency", "repetition")):
            penalties[name] = params[:, column]
        kernels.penalize(logits, self._outputs, self._in_prompt, penalties)

    def _index(self, slots: IntArray) -> torch.Tensor:
        return to_device(self._rows_of(slots), self._device)

    def _rows_of(self, slots: IntArray) -> npt.NDArray[np.int64]:
        return np.array([self._rows[slot] for slot in slots.tolist()], np.int64)

    def _grow(self) -> None:
        size = len(self._outputs)
        more = max(size, 4)
        self._outputs = torch.cat((self._outputs, self._outputs.new_zeros(more, self._vocab_size)))
        self._in_prompt = torch.cat(
            (self._in_prompt, self._in_prompt.new_zeros(more, self._vocab_size))
        )
        self._free.extend(range(size, size + more))
