"""From rows that the scheduler chose to the arrays that an engine reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.core import Admission, Batch, IntArray, PendingStep, TokenMasks
from services.worker.scheduler.masks import open_masks
from services.worker.scheduler.request import Request
from services.worker.scheduler.slots import SlotTables

LAST_ID = -1  # the id most recently sampled for the slot, which the host may not know yet


@dataclass(frozen=True, slots=True)
class Row:
    """A request's share of a batch: its next `length` positions."""

    request: Request
    length: int


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
    pending: PendingStep
    follows_work: bool
    masks: TokenMasks | None = None


def build_batch(
    number: int,
    rows: Sequence[Row],
    admissions: Sequence[Admission],
    slots: SlotTables,
    vocab_size: int,
) -> Batch:
    """The batch of step `number`, its rows in the order given. Changes no request."""
    requests = [row.request for row in rows]
    lengths = [row.length for row in rows]
    start = [request.num_computed for request in requests]
    sample = [
        request.num_computed + length == len(request.prompt_ids) + request.num_sampled
        and request.num_sampled < request.sampling.max_tokens
        for request, length in zip(requests, lengths, strict=True)
    ]
    slot_ids = np.array([request.slot for request in requests], np.int32)
    assert all(request.table is not None for request in requests)
    width = max(len(request.table.pages) for request in requests if request.table is not None)
    return Batch(
        step=number,
        slots=slot_ids,
        start=np.array(start, np.int32),
        query_lens=np.array(lengths, np.int32),
        input_ids=_input_ids(rows),
        page_tables=slots.rows(slot_ids, width),
        sample=np.array(sample, np.bool_),
        output_positions=np.array([request.num_sampled for request in requests], np.int32),
        admissions=tuple(admissions),
        masks=open_masks(requests, sample, vocab_size),
    )


def _input_ids(rows: Sequence[Row]) -> IntArray:
    """The ids of all rows, one after the other; # [tokens]"""
    ids = np.full(sum(row.length for row in rows), LAST_ID, np.int32)
    offset = 0
    for row in rows:
        request = row.request
        if request.num_computed < len(request.prefill_ids):
            end = request.num_computed + row.length
            ids[offset : offset + row.length] = request.prefill_ids[request.num_computed : end]
        offset += row.length
    return ids
