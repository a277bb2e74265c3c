"""Attention on a CPU with torch's fused kernel.

Decode rows of like length share one call, padded to the longest of the bucket;
each prefill chunk is a call of its own. Query heads that share a KV head are laid
out so that K and V are never repeated: as query rows when decoding, as a
stride-zero head axis in a chunk. Pages that follow one another are read in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from services.worker.attention.base import AttentionMetadata
from services.worker.attention.pool import KvPool
from services.worker.core import IntArray

# A bucket may be padded by as many cells as a further call would cost in time:
# about 40 us a layer, which is what reading 256 cells takes.
_FREE_PADDING = 256
_PADDING_SHARE = 0.25


class CpuBackend:
    """Paged attention for CPUs."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def plan(self, metadata: AttentionMetadata) -> CpuPlan:
        return CpuPlan(self._pool, metadata)


class CpuPlan:
    """One step of `CpuBackend`."""

    def __init__(self, pool: KvPool, metadata: AttentionMetadata) -> None:
        self._pool = pool
        self._cells = metadata.cells(pool.page_size)
        single = metadata.query_lens == 1
        decode = np.flatnonzero(single)
        self._buckets = [
            _Bucket.of(rows, metadata, pool) for rows in bucket_rows(metadata.kv_lens, decode)
        ]
        self._chunks = [_Chunk.of(int(row), metadata, pool) for row in np.flatnonzero(~single)]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        self._pool.write(layer, self._cells, k, v)
        keys, values = self._pool.k[layer], self._pool.v[layer]
        if len(self._buckets) == 1 and not self._chunks:
            # Most decode steps; the bucket's order is the batch's where it is the only one.
            return self._buckets[0].attend(q, keys, values)
        out = torch.empty_like(q)
        for bucket in self._buckets:
            rows = q.index_select(0, bucket.tokens)
            out.index_copy_(0, bucket.tokens, bucket.attend(rows, keys, values))
        for chunk in self._chunks:
            span = slice(chunk.begin, chunk.end)
            out[span] = chunk.attend(q[span], k[span], v[span], keys, values)
        return out


def bucket_rows(kv_lens: IntArray, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Groups rows of like length, longest first; rows of a bucket are in batch order."""
    buckets: list[list[int]] = []
    longest = used = 0
    for row in sorted(rows.tolist(), key=lambda row: (-int(kv_lens[row]), row)):
        length = int(kv_lens[row])
        if buckets:
            padding = longest * (len(buckets[-1]) + 1) - used - length
            if padding <= max(_FREE_PADDING, _PADDING_SHARE * used):
                buckets[-1].append(row)
                used += length
                continue
        buckets.append([row])
        longest = used = length
    return [np.sort(np.array(bucket, dtype=np.int64)) for bucket in buckets]


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages of rows of one padded length: a range read in place, or a gather."""

    first: int  # -1: gather
    count: int  # pages a row
    index: torch.Tensor | None  # [rows * count]

    @classmethod
    def of(cls, tables: IntArray) -> _Pages:
        """tables: [rows, pages]"""
        count = tables.shape[1]
        if len(tables) == 1 and bool((np.diff(tables[0]) == 1).all()):
            return cls(int(tables[0, 0]), count, None)
        return cls(-1, count, torch.from_numpy(tables.astype(np.int64).reshape(-1)))

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """pool: [pages, page_size, kv_heads, head_dim] -> [rows, kv, kv_heads, head_dim]"""
        if self.index is None:
            return pool[self.first : self.first + self.count].flatten(0, 1)[None]
        page_size, kv_heads, head_dim = pool.shape[1:]
        return pool.index_select(0, self.index).view(-1, self.count * page_size, kv_heads, head_dim)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Decode rows attended in one call."""

    tokens: torch.Tensor  # [rows], their places in the batch
    pages: _Pages
    kv_len: int  # the longest
    mask: torch.Tensor | None  # [rows, 1, 1, kv]

    @classmethod
    def of(cls, rows: npt.NDArray[np.int64], metadata: AttentionMetadata, pool: KvPool) -> _Bucket:
        kv_lens = metadata.kv_lens[rows]
        longest = int(kv_lens.max())
        pages = -(-longest // pool.page_size)
        mask = None
        if int(kv_lens.min()) != longest:
            beyond = torch.arange(longest) >= torch.from_numpy(kv_lens)[:, None]
            mask = torch.zeros(beyond.shape, dtype=pool.k.dtype)
            mask = mask.masked_fill_(beyond, float("-inf"))[:, None, None, :]
        return cls(
            tokens=torch.from_numpy(metadata.offsets[rows].astype(np.int64)),
            pages=_Pages.of(metadata.page_tables[rows, :pages]),
            kv_len=longest,
            mask=mask,
        )

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q: [rows, heads, head_dim] -> the same"""
        rows, heads, head_dim = q.shape
        kv_heads = keys.shape[2]
        k = self.pages.read(keys)[:, : self.kv_len].transpose(1, 2)
        v = self.pages.read(values)[:, : self.kv_len].transpose(1, 2)
        grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, self.mask)
        return out.reshape(rows, heads, head_dim)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A prefill chunk of one row."""

    begin: int
    end: int
    kv_len: int
    pages: _Pages | None  # None: nothing before the chunk
    mask: torch.Tensor | None  # [query, kv]

    @classmethod
    def of(cls, row: int, metadata: AttentionMetadata, pool: KvPool) -> _Chunk:
        begin, end = int(metadata.offsets[row]), int(metadata.offsets[row + 1])
        start, kv_len = int(metadata.start[row]), int(metadata.kv_lens[row])
        if start == 0:
            return cls(begin, end, kv_len, None, None)
        length = end - begin
        mask = torch.zeros(length, kv_len, dtype=pool.k.dtype)
        mask[:, start:] = torch.full((length, length), float("-inf")).triu_(1)
        count = -(-kv_len // pool.page_size)
        pages = _Pages.of(metadata.page_tables[row : row + 1, :count])
        return cls(begin, end, kv_len, pages, mask)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """q: [query, heads, head_dim], its own k and v: [query, kv_heads, head_dim] -> as q"""
        if self.pages is not None:
            k = self.pages.read(keys)[0, : self.kv_len]
            v = self.pages.read(values)[0, : self.kv_len]
        length, heads, head_dim = q.shape
        kv_heads = keys.shape[2]
        groups = heads // kv_heads
        out = F.scaled_dot_product_attention(
            q.view(length, kv_heads, groups, head_dim).permute(1, 2, 0, 3),
            k.transpose(0, 1)[:, None].expand(-1, groups, -1, -1),
            v.transpose(0, 1)[:, None].expand(-1, groups, -1, -1),
            self.mask,
            is_causal=self.mask is None,
        )  # [kv_heads, groups, query, head_dim]
        return out.permute(2, 0, 1, 3).reshape(length, heads, head_dim)
