"""The FlashInfer backend, over an emulation of the library, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.common.errors import StartupError
from services.worker.attention import flashinfer as backend_module
from services.worker.attention.flashinfer import FlashInferBackend, Heads, Workspace
from services.worker.attention.pool import KvPool
from services.worker.attention.torch_reference import TorchReferenceBackend
from tests.worker.attention import flashinfer_emulation
from tests.worker.attention.test_backends import DIM, LAYERS, PAGES, make_pool, random_metadata

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "FLOAT_WORKSPACE", 64)
    monkeypatch.setattr(backend_module, "INT_WORKSPACE", 64)


def make_backend(pool: KvPool, heads: tuple[int, int]) -> FlashInferBackend:
    return FlashInferBackend(flashinfer_emulation, pool, Heads(*heads, DIM), Workspace(CPU))


def random_qkv(
    tokens: int, heads: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k as the model makes them: parts of one tensor."""
    qk = torch.randn(tokens, sum(heads), DIM)
    return qk[:, : heads[0]], qk[:, heads[0] :], torch.randn(tokens, heads[1], DIM)


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 2)])
def test_it_equals_the_reference(page_size: int, head_major: bool, heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(page_size + heads[0])
    for seed, decode_only in enumerate([True, False, False, False]):
        metadata = random_metadata(rng, page_size, decode_only)
        pools = [make_pool(page_size, heads[1], seed, head_major=head_major) for _ in range(2)]
        plain = KvPool(pools[1].k.contiguous(), pools[1].v.contiguous(), page_size)
        qkv = random_qkv(int(metadata.offsets[-1]), heads)
        plan = make_backend(pools[0], heads).plan(metadata)
        reference = TorchReferenceBackend(plain).plan(metadata)
        for layer in range(LAYERS):
            got, expected = plan.forward(*qkv, layer=layer), reference.forward(*qkv, layer=layer)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(pools[0].k, plain.k)
        torch.testing.assert_close(pools[0].v, plain.v)


def test_a_graph_plan_reads_its_buffers_as_they_are_at_the_replay() -> None:
    rng = np.random.default_rng(4)
    heads, page_size = (8, 2), 16
    pool, plain = (make_pool(page_size, heads[1], 5) for _ in range(2))
    backend = make_backend(pool, heads)
    graphs = backend.graph_plans([8, 4, 2, 1], context=200)
    done = 0
    while done < 8:
        metadata = random_metadata(rng, page_size, decode_only=True)
        size = len(metadata.kv_lens)
        if size not in graphs:
            continue
        qkv = random_qkv(size, heads)
        graphs[size].update(metadata)
        reference = TorchReferenceBackend(plain).plan(metadata)
        for layer in range(LAYERS):
            got, expected = (
                graphs[size].forward(*qkv, layer=layer),
                reference.forward(*qkv, layer=layer),
            )
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        assert graphs[size].positions.tolist() == metadata.positions.tolist()
        done += 1
    torch.testing.assert_close(pool.k, plain.k)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "said"),
    [(80, torch.bfloat16, "head size 80"), (64, torch.float32, "float32")],
)
def test_what_it_has_no_kernel_for_is_refused(head_dim: int, dtype: torch.dtype, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        Heads(8, 2, head_dim).check(dtype)
    Heads(8, 2, 128).check(torch.float16)


def test_without_the_package_the_command_to_install_it_is_said() -> None:
    with pytest.raises(StartupError, match=r"pip install 'shoal\[cuda\]'"):
        backend_module.load_library()


def test_the_dummy_page_is_beyond_the_pool() -> None:
    assert make_pool(16, 2, 0).k.shape[1] == PAGES + 1
