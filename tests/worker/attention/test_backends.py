"""The CPU backend against the reference, over random ragged batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.attention.base import AttentionMetadata
from services.worker.attention.cpu import CpuBackend, bucket_rows
from services.worker.attention.pool import KvPool
from services.worker.attention.torch_reference import TorchReferenceBackend
from services.worker.core import Batch

LAYERS, PAGES, DIM = 2, 256, 16


def make_pool(page_size: int, kv_heads: int, seed: int) -> KvPool:
    pool = KvPool.allocate(
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(seed)
    pool.k.normal_(generator=generator)
    pool.v.normal_(generator=generator)
    return pool


def random_metadata(
    rng: np.random.Generator, page_size: int, decode_only: bool
) -> AttentionMetadata:
    """Rows of random lengths on random pages; some tables are ranges."""
    rows = int(rng.integers(1, 9))
    capacity = PAGES // rows * page_size
    kv_lens = rng.integers(1, min(capacity, 200) + 1, rows)
    query_lens = np.ones(rows, np.int64)
    if not decode_only:
        query_lens = np.array([rng.integers(1, length + 1) for length in kv_lens])
    pages = np.arange(PAGES) if rng.random() < 0.5 else rng.permutation(PAGES)
    width = int(-(-kv_lens.max() // page_size))
    tables = np.full((rows, width), PAGES)
    for row, length in enumerate(kv_lens):
        count = -(-length // page_size)
        tables[row, :count], pages = pages[:count], pages[count:]
    return AttentionMetadata.of(
        Batch(
            step=0,
            slots=np.arange(rows, dtype=np.int32),
            start=(kv_lens - query_lens).astype(np.int32),
            query_lens=query_lens.astype(np.int32),
            input_ids=np.zeros(int(query_lens.sum()), np.int32),
            page_tables=tables.astype(np.int32),
            sample=np.ones(rows, np.bool_),
            output_positions=np.zeros(rows, np.int32),
        )
    )


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("decode_only", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_cpu_equals_reference(page_size: int, decode_only: bool, heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(page_size * 10 + heads[0])
    for seed in range(12):
        metadata = random_metadata(rng, page_size, decode_only)
        tokens = int(metadata.offsets[-1])
        q = torch.randn(tokens, heads[0], DIM)
        k, v = torch.randn(2, tokens, heads[1], DIM).unbind()
        pools = [make_pool(page_size, heads[1], seed) for _ in range(2)]
        plans = (
            CpuBackend(pools[0]).plan(metadata),
            TorchReferenceBackend(pools[1]).plan(metadata),
        )
        for layer in range(LAYERS):
            got, expected = (plan.forward(q, k, v, layer) for plan in plans)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(pools[0].k, pools[1].k, atol=0, rtol=0)


def test_buckets_hold_every_row_once_and_bound_the_padding() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        kv_lens = rng.integers(1, 8000, int(rng.integers(1, 60))).astype(np.int32)
        buckets = bucket_rows(kv_lens, np.arange(len(kv_lens)))
        assert sorted(np.concatenate(buckets).tolist()) == list(range(len(kv_lens)))
        for bucket in buckets:
            lengths = kv_lens[bucket]
            padding = int(lengths.max()) * len(bucket) - int(lengths.sum())
            assert padding <= max(256, 0.25 * int(lengths.sum()))
    equal = bucket_rows(np.full(40, 100, np.int32), np.arange(40))
    assert len(equal) == 1
