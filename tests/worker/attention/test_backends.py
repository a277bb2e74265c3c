"""The CPU backends against the reference, over random ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.attention.base import AttentionBackend, AttentionMetadata
from services.worker.attention.cpu import CpuBackend, bucket_rows
from services.worker.attention.native import NativeBackend
from services.worker.attention.pool import KvPool
from services.worker.attention.registry import create_backend
from services.worker.attention.torch_reference import TorchReferenceBackend
from services.worker.core import Batch
from services.worker.native.kernels import Kernels

LAYERS, PAGES, DIM = 2, 256, 16


def make_pool(page_size: int, kv_heads: int, seed: int, *, head_major: bool = False) -> KvPool:
    pool = KvPool.allocate(
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        dtype=torch.float32,
        head_major=head_major,
    )
    generator = torch.Generator().manual_seed(seed)
    for tensor in (pool.k, pool.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


@pytest.fixture(params=["torch", "native"])
def cpu_backend(request: pytest.FixtureRequest) -> Callable[[int, int, int], AttentionBackend]:
    """Makes a CPU backend over a random pool: (page size, KV heads, seed)."""
    if request.param == "torch":
        return lambda *args: CpuBackend(make_pool(*args))
    kernels = Kernels.load()
    if kernels is None:
        pytest.skip("no C++ compiler to build the native kernels with")
    return lambda *args: NativeBackend(make_pool(*args, head_major=True), kernels)


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
def test_cpu_equals_reference(
    cpu_backend: Callable[[int, int, int], AttentionBackend],
    page_size: int,
    decode_only: bool,
    heads: tuple[int, int],
) -> None:
    rng = np.random.default_rng(page_size * 10 + heads[0])
    for seed in range(12):
        metadata = random_metadata(rng, page_size, decode_only)
        tokens = int(metadata.offsets[-1])
        q = torch.randn(tokens, heads[0], DIM)
        k, v = torch.randn(2, tokens, heads[1], DIM).unbind()
        plans = (
            cpu_backend(page_size, heads[1], seed).plan(metadata),
            TorchReferenceBackend(make_pool(page_size, heads[1], seed)).plan(metadata),
        )
        for layer in range(LAYERS):
            got, expected = (plan.forward(q, k, v, layer) for plan in plans)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def test_the_kernels_are_used_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = {"num_layers": 1, "num_pages": 4, "page_size": 4, "num_kv_heads": 1}
    if Kernels.load() is not None:
        backend = create_backend("auto", head_dim=16, dtype=torch.float32, **shape)
        assert isinstance(backend, NativeBackend)
    for head_dim, dtype in ((20, torch.float32), (16, torch.bfloat16)):
        backend = create_backend("cpu", head_dim=head_dim, dtype=dtype, **shape)
        assert isinstance(backend, CpuBackend)
    monkeypatch.setattr(Kernels, "load", lambda: None)
    assert isinstance(create_backend("cpu", head_dim=16, dtype=torch.float32, **shape), CpuBackend)


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
