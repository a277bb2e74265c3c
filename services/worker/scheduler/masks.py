"""The masks of a batch's rows that sample under a grammar: made at launch, filled later.

Whether a row has a grammar is known when its batch is built; what it may sample, when the
batch before has been processed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from services.common.errors import InvalidRequest
from services.worker.core import BoolArray, IntArray, TokenMasks
from services.worker.scheduler.request import Request, State


def open_masks(
    requests: Sequence[Request], sample: BoolArray | Sequence[bool], vocab_size: int
) -> TokenMasks | None:
    """Masks to be filled for the rows that sample under a grammar; None if no row does."""
    rows = [
        row for row, request in enumerate(requests) if request.matcher is not None and sample[row]
    ]
    return TokenMasks(rows, vocab_size) if rows else None


def fill_masks(
    masks: TokenMasks, requests: Sequence[Request]
) -> list[tuple[Request, InvalidRequest]]:
    """Fills the masks in; returns the requests whose grammar can be followed no further.

    `requests` are the batch's, one a row. Of one that has ended meanwhile the row is left
    open: what it samples is dropped.
    """
    failed = []
    for index, row in enumerate(masks.rows.tolist()):
        request, mask = requests[row], masks.words[index]
        if request.state is State.ENDED:
            continue
        assert request.matcher is not None
        try:
            request.matcher.fill(mask)
        except InvalidRequest as error:
            mask[:] = -1
            failed.append((request, error))
            continue
        if len(request.output_ids) < request.min_tokens:
            _ban(mask, request.stop_ids)
    return failed


def _ban(mask: IntArray, token_ids: Iterable[int]) -> None:
    """Forbids ids, unless nothing would be left: what the grammar demands goes before."""
    rest = mask.copy()
    for token_id in token_ids:
        if token_id < 32 * len(mask):
            rest.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if rest.any():
        mask[:] = rest
