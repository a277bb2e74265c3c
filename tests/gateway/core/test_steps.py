"""What a step frame says of each request: rows of one token, of several, merged and empty ones."""

from __future__ import annotations

import pytest

from protos import worker_pb2
from services.gateway.peers.steps import rows_of


@pytest.mark.parametrize(
    ("handles", "counts", "token_ids", "rows"),
    [
        ([], [], [], {}),
        ([7, 9], [1, 1], [70, 90], {7: [70], 9: [90]}),
        ([7, 9], [2, 1], [70, 71, 90], {7: [70, 71], 9: [90]}),
        ([7, 9, 7], [1, 1, 1], [70, 90, 71], {7: [70, 71], 9: [90]}),  # two steps in one frame
        ([7, 9], [2, 0], [70, 71], {7: [70, 71], 9: []}),  # as many tokens as rows
    ],
)
def test_each_request_gets_its_own_tokens_in_order(
    handles: list[int], counts: list[int], token_ids: list[int], rows: dict[int, list[int]]
) -> None:
    step = worker_pb2.StepFrame(handles=handles, counts=counts, token_ids=token_ids)
    assert rows_of(step) == rows


@pytest.mark.parametrize("counts", [[1], [1, 1, 0]])
def test_a_frame_whose_lists_do_not_fit_is_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="zip"):
        rows_of(worker_pb2.StepFrame(handles=[1, 2], counts=counts, token_ids=[7, 8]))
