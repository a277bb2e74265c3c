"""The index arithmetic of FlashInfer's paged kernels: from a batch's metadata to CSR arrays.

FlashInfer reads page tables as a block-sparse matrix in CSR form: row r's pages are
`kv_indices[kv_indptr[r] : kv_indptr[r + 1]]`, full but for the last, which holds
`last_page_len[r]` tokens, 1 to page_size. Queries are ragged: row r's are
`qo_indptr[r] .. qo_indptr[r + 1] - 1`. All arrays are int32. Source of the rules:
FlashInfer's documentation, docs/tutorials/kv_layout.rst.

Pure: numpy in, numpy out. What is done with the arrays it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.attention.base import AttentionMetadata
from services.worker.core import IntArray

# Group sizes below this are as quick without tensor cores; 1, 2 and 3 are also among those that
# the kernel without them is compiled for (1, 2, 3, 4, 6, 8, 16).
_TENSOR_CORE_GROUP = 4


def use_tensor_cores(num_heads: int, num_kv_heads: int) -> bool:
    """Whether decode runs on tensor cores: where query heads share a KV head by four or more.

    A group's queries then fill the rows of a matrix product over the keys that they share;
    FlashInfer's documentation says "faster for large group size".
    """
    return num_heads // num_kv_heads >= _TENSOR_CORE_GROUP


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Some rows of a batch, next to one another, as FlashInfer's `plan` takes them."""

    qo_indptr: IntArray  # [rows + 1]
    kv_indptr: IntArray  # [rows + 1], in pages
    kv_indices: IntArray  # [pages of all rows]
    last_page_len: IntArray  # [rows]
    kv_lens: IntArray  # [rows]

    @classmethod
    def of(cls, metadata: AttentionMetadata, rows: slice, page_size: int) -> PagedRows:
        """The rows of a batch that a slice names."""
        kv_lens = np.asarray(metadata.kv_lens[rows], np.int32)
        pages = -(-kv_lens // page_size)  # [rows]
        tables = metadata.page_tables[rows]
        used = np.arange(tables.shape[1]) < pages[:, None]
        return cls(
            qo_indptr=_indptr(metadata.query_lens[rows]),
            kv_indptr=_indptr(pages),
            kv_indices=np.asarray(tables[used], np.int32),
            last_page_len=np.asarray(kv_lens - (pages - 1) * page_size, np.int32),
            kv_lens=kv_lens,
        )

    @property
    def num_rows(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.qo_indptr[-1])


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step: the whole batch for the writing of K and V, and its two kinds of rows.

    The rows before the first of several tokens are decoded; the others, whatever their
    length, are prefilled. The scheduler puts decode rows first, so that each kind is one
    range of the batch's tokens and nothing is gathered.
    """

    whole: PagedRows
    decode: PagedRows
    prefill: PagedRows
    token_rows: IntArray  # [tokens]
    positions: IntArray  # [tokens]

    @classmethod
    def of(cls, metadata: AttentionMetadata, page_size: int) -> StepPlan:
        longer = np.flatnonzero(metadata.query_lens > 1)
        count = int(longer[0]) if len(longer) else len(metadata.query_lens)
        return cls(
            whole=PagedRows.of(metadata, slice(None), page_size),
            decode=PagedRows.of(metadata, slice(0, count), page_size),
            prefill=PagedRows.of(metadata, slice(count, None), page_size),
            token_rows=np.asarray(metadata.token_rows, np.int32),
            positions=np.asarray(metadata.positions, np.int32),
        )


def _indptr(lengths: IntArray) -> IntArray:
    """[rows] -> [rows + 1]: where each row begins, and the end"""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
