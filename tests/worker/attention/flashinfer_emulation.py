"""FlashInfer's documented semantics of paged attention, in plain torch, with its checks.

It stands in for the package `flashinfer` where there is no GPU: the same names, arguments
and rules (docs/tutorials/kv_layout.rst and the docstrings of the wrappers, 0.7.4), read
through CSR arrays and 4-D pages alone. A wrapper in CUDA-graph mode reads its fixed
buffers, as a captured graph would.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Pages = tuple[torch.Tensor, torch.Tensor]


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert layout in ("NHD", "HND")
        assert backend == "fa2"
        self._layout = layout
        self._planned: dict[str, Any] = {}

    def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        assert floats.dtype == ints.dtype == torch.uint8

    def _check(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        seq_lens: torch.Tensor,
    ) -> None:
        for array in (indptr, indices, last_page_len, seq_lens):
            assert array.dtype == torch.int32, "int64 index arrays cause indexing errors"
            assert array.ndim == 1
        assert int(indptr[0]) == 0
        assert len(indices) == int(indptr[-1])
        assert len(indptr) == len(last_page_len) + 1
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        assert seq_lens.tolist() == _seq_lens(indptr, last_page_len, page_size).tolist()

    def _options(self, options: dict[str, Any], head_dim: int) -> None:
        assert options["pos_encoding_mode"] == "NONE"
        assert options["q_data_type"] == options["kv_data_type"]
        assert math.isclose(options["sm_scale"], head_dim**-0.5)
        self._planned = options


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._tensor_cores = use_tensor_cores
        self._fixed: tuple[torch.Tensor, ...] = ()
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self._fixed = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )
        self._arrays: tuple[torch.Tensor, ...] = ()

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        seq_lens: torch.Tensor,
        **options: Any,
    ) -> None:
        self._check(indptr, indices, last_page_len, page_size, seq_lens)
        self._options(options, head_dim)
        if not self._tensor_cores:
            assert num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16)
        self._arrays = (indptr, indices, last_page_len)
        if self._fixed:
            assert len(last_page_len) == len(self._fixed[2]), "the batch size is fixed"
            assert len(indices) <= len(self._fixed[1])
            for buffer, array in zip(self._fixed, self._arrays, strict=True):
                buffer[: len(array)].copy_(array)

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor | None = None) -> torch.Tensor:
        indptr, indices, last_page_len = self._fixed or self._arrays
        assert len(q) == len(last_page_len), "one query a row"
        qo_indptr = torch.arange(len(q) + 1)
        answer = _attend(q, pages, qo_indptr, indptr, indices, last_page_len, layout=self._layout)
        return answer if out is None else out.copy_(answer)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        seq_lens: torch.Tensor,
        **options: Any,
    ) -> None:
        self._check(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, seq_lens)
        self._options(options, head_dim_qk)
        assert causal
        assert qo_indptr.dtype == torch.int32
        assert len(qo_indptr) == len(paged_kv_indptr)
        self._arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)

    def run(self, q: torch.Tensor, pages: Pages, out: torch.Tensor | None = None) -> torch.Tensor:
        assert len(q) == int(self._arrays[0][-1])
        answer = _attend(q, pages, *self._arrays, layout=self._layout)
        return answer if out is None else out.copy_(answer)


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Pages,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    for array in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert array.dtype == torch.int32
    for cache, values in zip(paged_kv_cache, (append_key, append_value), strict=True):
        cells = cache if kv_layout == "NHD" else cache.transpose(1, 2)
        page_size = cells.shape[1]
        assert len(values) == len(batch_indices) == len(positions)
        for token, (row, position) in enumerate(
            zip(batch_indices.tolist(), positions.tolist(), strict=True)
        ):
            page = int(kv_indices[int(kv_indptr[row]) + position // page_size])
            cells[page, position % page_size] = values[token]


def _seq_lens(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    return (indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len


def _attend(
    q: torch.Tensor,
    pages: Pages,
    qo_indptr: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    layout: str,
) -> torch.Tensor:
    """Causal attention whose last query stands at the last key (bottom right)."""
    caches = [cache if layout == "NHD" else cache.transpose(1, 2) for cache in pages]
    page_size, kv_heads = caches[0].shape[1:3]
    lengths = _seq_lens(indptr, last_page_len, page_size).tolist()
    out = torch.empty_like(q)
    for row, length in enumerate(lengths):
        own = indices[int(indptr[row]) : int(indptr[row + 1])].long()
        k, v = (
            cache[own].flatten(0, 1)[:length].float().repeat_interleave(q.shape[1] // kv_heads, 1)
            for cache in caches
        )
        begin, end = int(qo_indptr[row]), int(qo_indptr[row + 1])
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) / math.sqrt(q.shape[2])
        last = torch.arange(length - (end - begin), length)
        scores.masked_fill_(torch.arange(length) > last[:, None], float("-inf"))
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out
