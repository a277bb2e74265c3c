"""The CSR arrays against worked examples from FlashInfer's own documentation (0.7.4)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.attention.base import AttentionMetadata
from services.worker.attention.flashinfer_plan import PagedRows, StepPlan, use_tensor_cores
from services.worker.core import Batch

DUMMY = 9999


def metadata_of(
    kv_lens: Sequence[int], query_lens: Sequence[int], tables: Sequence[Sequence[int]]
) -> AttentionMetadata:
    rows = len(kv_lens)
    width = max(len(table) for table in tables)
    padded = [[*table, *[DUMMY] * (width - len(table))] for table in tables]
    return AttentionMetadata.of(
        Batch(
            step=0,
            slots=np.arange(rows, dtype=np.int32),
            start=np.array(kv_lens, np.int32) - np.array(query_lens, np.int32),
            query_lens=np.array(query_lens, np.int32),
            input_ids=np.zeros(sum(query_lens), np.int32),
            page_tables=np.array(padded, np.int32),
            sample=np.ones(rows, np.bool_),
            output_positions=np.zeros(rows, np.int32),
        )
    )


def split(indices: Sequence[int], indptr: Sequence[int]) -> list[list[int]]:
    return [list(indices[a:b]) for a, b in itertools.pairwise(indptr)]


# The example of BatchPrefillWithPagedKVCacheWrapper; that of the decode wrapper has the same pages.
QO_INDPTR = [0, 33, 44, 55, 66, 77, 88, 100]
KV_INDPTR = [0, 17, 29, 44, 48, 66, 100, 128]
LAST_PAGE_LEN = [1, 7, 14, 4, 3, 1, 16]
KV_LENS = [257, 183, 238, 52, 275, 529, 448]  # page_size * (pages - 1) + last_page_len


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_the_wrappers_example(kind: str) -> None:
    query_lens = np.diff(QO_INDPTR).tolist() if kind == "prefill" else [1] * 7
    metadata = metadata_of(KV_LENS, query_lens, split(range(128), KV_INDPTR))
    step = StepPlan.of(metadata, page_size=16)
    rows = step.prefill if kind == "prefill" else step.decode
    assert rows.num_rows == 7
    assert rows.qo_indptr.tolist() == (QO_INDPTR if kind == "prefill" else list(range(8)))
    assert rows.kv_indptr.tolist() == KV_INDPTR
    assert rows.kv_indices.tolist() == list(range(128))
    assert rows.last_page_len.tolist() == LAST_PAGE_LEN
    assert (step.decode if kind == "prefill" else step.prefill).num_rows == 0


def test_the_example_of_append_paged_kv_cache() -> None:
    lengths = [45, 8, 25, 22]
    metadata = metadata_of(lengths, lengths, split(range(8), [0, 3, 4, 6, 8]))
    step = StepPlan.of(metadata, page_size=16)
    assert step.whole.qo_indptr.tolist() == [0, 45, 53, 78, 100]
    assert step.whole.kv_indptr.tolist() == [0, 3, 4, 6, 8]
    assert step.whole.last_page_len.tolist() == [13, 8, 9, 6]
    assert step.token_rows.tolist() == [0] * 45 + [1] * 8 + [2] * 25 + [3] * 22
    expected = [position for length in lengths for position in range(length)]
    assert step.positions.tolist() == expected


def test_the_example_of_get_batch_indices_positions() -> None:
    metadata = metadata_of([5] * 4, [1, 2, 3, 4], [[0], [1], [2], [3]])
    step = StepPlan.of(metadata, page_size=8)
    assert step.whole.qo_indptr.tolist() == [0, 1, 3, 6, 10]
    assert step.token_rows.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert step.positions.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4]


def test_decode_rows_come_first_and_the_rest_is_prefilled() -> None:
    """A chunk of one token after the first longer one stays among the prefill rows."""
    metadata = metadata_of([7, 4, 6, 9], [1, 1, 3, 1], [[5, 2], [7], [1, 0], [3, 4, 6]])
    step = StepPlan.of(metadata, page_size=4)
    assert step.decode.kv_lens.tolist() == [7, 4]
    assert step.decode.kv_indices.tolist() == [5, 2, 7]
    assert step.decode.last_page_len.tolist() == [3, 4]
    assert step.prefill.qo_indptr.tolist() == [0, 3, 4]
    assert step.prefill.kv_indptr.tolist() == [0, 2, 5]
    assert step.prefill.kv_indices.tolist() == [1, 0, 3, 4, 6]
    assert step.prefill.last_page_len.tolist() == [2, 1]


lengths = st.tuples(st.integers(1, 200), st.integers(1, 200)).map(lambda pair: sorted(pair))


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(lengths, min_size=1, max_size=9),
    page_size=st.sampled_from([1, 16, 32]),
    seed=st.integers(0, 1 << 20),
)
def test_the_arrays_say_where_every_token_lies(
    rows: list[tuple[int, int]], page_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    counts = [-(-kv // page_size) for _, kv in rows]
    pages = rng.permutation(sum(counts)).tolist()
    tables = split(pages, np.cumsum([0, *counts]).tolist())
    metadata = metadata_of([kv for _, kv in rows], [q for q, _ in rows], tables)
    step = StepPlan.of(metadata, page_size)
    for name in PagedRows.__slots__:
        assert getattr(step.whole, name).dtype == np.int32
    whole, (decode, prefill) = step.whole, (step.decode, step.prefill)
    assert decode.num_rows + prefill.num_rows == len(rows)
    assert decode.num_tokens + prefill.num_tokens == whole.num_tokens
    assert decode.num_tokens == decode.num_rows
    joined = [*decode.kv_indices.tolist(), *prefill.kv_indices.tolist()]
    assert joined == whole.kv_indices.tolist() == pages
    cells = []
    for row, position in zip(step.token_rows.tolist(), step.positions.tolist(), strict=True):
        page = whole.kv_indices[whole.kv_indptr[row] + position // page_size]
        cells.append(int(page) * page_size + position % page_size)
    assert cells == metadata.cells(page_size).tolist()
    sizes = np.diff(whole.kv_indptr)
    assert ((whole.last_page_len >= 1) & (whole.last_page_len <= page_size)).all()
    assert ((sizes - 1) * page_size + whole.last_page_len == whole.kv_lens).all()


def test_tensor_cores_for_groups_of_four_and_more() -> None:
    chosen = {heads: use_tensor_cores(heads, 8) for heads in (8, 16, 24, 32, 40, 56, 64)}
    assert chosen == {8: False, 16: False, 24: False, 32: True, 40: True, 56: True, 64: True}
