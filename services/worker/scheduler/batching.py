"""From rows that the scheduler chose to the arrays that an engine reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.core import Admission, Batch, IntArray, PendingStep, TokenMasks
from services.worker.scheduler.masks import open_masks
from services.worker.scheduler.pace import REREAD
from services.worker.scheduler.request import Request
from services.worker.scheduler.slots import SlotTables

LAST_ID = -1  # the id most recently sampled for the slot, which the host may not know yet


@dataclass(frozen=True, slots=True)
class Rows:
    """The requests of a batch in its order, and how many of its next positions each computes.

    The first `num_decode` decode: they compute one position and sample the next. The others
    are chunks of prompts. Plain lists, since at hundreds of rows objects cost more than all else.
    """

    requests: list[Request]
    lengths: list[int]
    num_decode: int

    @property
    def num_prefill_tokens(self) -> int:
        return sum(self.lengths[self.num_decode :])


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched batch. `ends[r]` is the position after row r's last; `sampled[r]` whether
    the row answers with a token. `follows_work` if the engine was not idle by right before."""

    number: int
    requests: Sequence[Request]
    ends: Sequence[int]
    sampled: Sequence[bool]
    num_tokens: int
    num_prefill_tokens: int
    prefill_position: float  # the mean of these tokens' positions
    pending: PendingStep
    follows_work: bool
    masks: TokenMasks | None = None


def mean_position(ends: Sequence[int], rows: Rows) -> float:
    """Of the tokens of all chunks, what each chunk fetches counted as `REREAD` more of them; 0
    without any. ends: the position after each row's last."""
    chunks = list(zip(ends[rows.num_decode :], rows.lengths[rows.num_decode :], strict=True))
    total = sum((length + REREAD) * (end - 0.5 * length) for end, length in chunks)
    return total / max(rows.num_prefill_tokens, 1)


def build_batch(
    number: int,
    rows: Rows,
    admissions: Sequence[Admission],
    slots: SlotTables,
    vocab_size: int,
) -> Batch:
    """The batch of step `number`. Changes no request."""
    requests = rows.requests
    sample = [True] * rows.num_decode
    for request, length in _chunks(rows):
        end = request.num_computed + length
        known = len(request.prompt_ids) + request.num_sampled
        sample.append(end == known and request.num_sampled < request.sampling.max_tokens)
    slot_ids = np.array([request.slot for request in requests], np.int32)
    width = max(request.num_pages for request in requests)
    return Batch(
        step=number,
        slots=slot_ids,
        start=np.array([request.num_computed for request in requests], np.int32),
        query_lens=np.array(rows.lengths, np.int32),
        input_ids=_input_ids(rows),
        page_tables=slots.rows(slot_ids, width),
        sample=np.array(sample, np.bool_),
        output_positions=np.array([request.num_sampled for request in requests], np.int32),
        admissions=tuple(admissions),
        masks=open_masks(requests, sample, vocab_size),
    )


def _input_ids(rows: Rows) -> IntArray:
    """The ids of all rows, one after the other; # [tokens]"""
    parts = [np.full(rows.num_decode, LAST_ID, np.int32)]
    for request, length in _chunks(rows):
        parts.append(request.prefill_ids[request.num_computed : request.num_computed + length])
    return np.concatenate(parts)


def _chunks(rows: Rows) -> Iterator[tuple[Request, int]]:
    """The rows that are chunks of prompts, each with its length."""
    return zip(rows.requests[rows.num_decode :], rows.lengths[rows.num_decode :], strict=True)
