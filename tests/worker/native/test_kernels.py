"""The native kernels against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.native.kernels import HEAD_DIMS, Kernels, pack_linear


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = Kernels.load()
    if loaded is None:
        pytest.skip("no C++ compiler")
    return loaded


def _reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    lens: Tensor,
    scale: float,
) -> Tensor:
    """Row by row, gathered, in float64."""
    outs: list[Tensor] = []
    offset = 0
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    for row in range(len(starts)):
        start, count = int(starts[row]), int(lens[row])
        positions = torch.arange(start + count)
        pages = tables[row, positions // page_size].long()
        k = keys[pages, positions % page_size].double()  # [length, kv_heads, dim]
        v = values[pages, positions % page_size].double()
        group = query.shape[1] // kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        q = query[offset : offset + count].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        visible = positions[None, :] <= (start + torch.arange(count))[:, None]
        scores.masked_fill_(~visible, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        offset += count
    return torch.cat(outs)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 16), (4, 4, 128)])
def test_paged_attention(
    kernels: Kernels, page_size: int, heads: int, kv_heads: int, dim: int
) -> None:
    torch.manual_seed(page_size * 100 + heads)
    shapes = [(0, 1), (130, 1), (0, 33), (63, 2), (64, 1), (5, 70), (300, 1), (16, 16), (7, 64)]
    starts = torch.tensor([s for s, _ in shapes], dtype=torch.int32)
    lens = torch.tensor([n for _, n in shapes], dtype=torch.int32)
    width = max(-(-(s + n) // page_size) for s, n in shapes)
    num_pages = width * len(shapes)
    tables = torch.randperm(num_pages).to(torch.int32).view(len(shapes), width)
    pool = torch.randn(2, num_pages + 1, kv_heads, page_size, dim) * 2
    keys, values = pool.transpose(2, 3)  # strides other than the shape's order
    query = torch.randn(int(lens.sum()), heads, dim) * 2
    scale = dim**-0.5
    out = kernels.paged_attention(query, keys, values, tables, starts, lens, scale)
    expected = _reference(query, keys, values, tables, starts, lens, scale)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


def test_every_head_size_has_a_kernel(kernels: Kernels) -> None:
    for dim in HEAD_DIMS:
        keys = torch.randn(2, 4, 1, dim)
        query = torch.randn(1, 2, dim)
        tables = torch.zeros(1, 1, dtype=torch.int32)
        one = torch.ones(1, dtype=torch.int32)
        out = kernels.paged_attention(query, keys, keys, tables, one - 1, one, 1.0)
        torch.testing.assert_close(out, keys[0, :1].expand(1, 2, dim))


def test_a_row_does_not_depend_on_its_neighbours(kernels: Kernels) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 64, 16, 3, 64)
    query = torch.randn(8, 9, 64)
    tables = torch.randperm(64).to(torch.int32).view(8, 8)
    starts = torch.tensor([0, 5, 100, 127, 64, 3, 90, 17], dtype=torch.int32)
    ones = torch.ones(8, dtype=torch.int32)
    together = kernels.paged_attention(query, keys, values, tables, starts, ones, 0.125)
    for row in range(8):
        alone = kernels.paged_attention(
            query[row : row + 1].clone(),
            keys,
            values,
            tables[row : row + 1],
            starts[row : row + 1],
            ones[:1],
            0.125,
        )
        assert torch.equal(alone[0], together[row])


def test_large_scores_do_not_overflow(kernels: Kernels) -> None:
    keys = torch.full((1, 16, 1, 64), 100.0)
    keys[0, 3] = 300.0
    values = torch.randn(1, 16, 1, 64)
    query = torch.full((1, 1, 64), 100.0)
    one = torch.ones(1, dtype=torch.int32)
    out = kernels.paged_attention(query, keys, values, one[None] - 1, one * 15, one, 1.0)
    torch.testing.assert_close(out[0, 0], values[0, 3, 0])


def test_kv_write(kernels: Kernels) -> None:
    torch.manual_seed(1)
    tokens, heads, kv_heads, dim, page_size = 21, 6, 2, 32, 4
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim)
    k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    where = torch.randperm(40)[:tokens]
    pages, slots = (where // page_size).to(torch.int32), (where % page_size).to(torch.int32)
    keys, values = torch.zeros(2, 10, kv_heads, page_size, dim).transpose(2, 3)
    kernels.kv_write(keys, values, k, v, pages, slots)
    expected = torch.zeros(2, 40, kv_heads, dim)
    expected[0, where], expected[1, where] = k, v
    assert torch.equal(keys.reshape(40, kv_heads, dim), expected[0])
    assert torch.equal(values.reshape(40, kv_heads, dim), expected[1])


@pytest.mark.parametrize(("in_size", "out_size"), [(64, 96), (33, 131), (576, 40), (1, 16)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_right_and_rows_do_not_depend_on_each_other(
    kernels: Kernels, in_size: int, out_size: int, with_bias: bool
) -> None:
    torch.manual_seed(in_size)
    weight, x = torch.randn(out_size, in_size), torch.randn(203, in_size)
    bias = torch.randn(out_size) if with_bias else None
    packed = pack_linear(weight)
    whole = kernels.linear(x, packed, out_size, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), expected, atol=1e-4, rtol=1e-4)
    for first, count in ((0, 1), (7, 2), (100, 5), (96, 6), (3, 200)):
        rows = slice(first, first + count)
        assert torch.equal(kernels.linear(x[rows], packed, out_size, bias), whole[rows])


@pytest.mark.parametrize("size", [7, 8, 64, 577])
def test_rms_norm(kernels: Kernels, size: int) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(5, 3, size), torch.randn(size)
    whole = kernels.rms_norm(x, weight, 1e-5)
    expected = torch.nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(kernels.rms_norm(x[1:2], weight, 1e-5), whole[1:2])


@pytest.mark.parametrize("size", [5, 8, 77])
def test_silu_mul(kernels: Kernels, size: int) -> None:
    torch.manual_seed(size)
    gate_up = torch.randn(9, 2 * size) * 20
    gate_up[0, 0], gate_up[1, 0] = -1000.0, 1000.0
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    whole = kernels.silu_mul(gate_up)
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(kernels.silu_mul(gate_up[4:5]), whole[4:5])


def test_uniform_attention_is_the_same_bits_in_any_chunks(kernels: Kernels) -> None:
    torch.manual_seed(3)
    length, page_size, heads, kv_heads, dim = 150, 4, 6, 2, 16
    keys, values = torch.randn(2, 40, page_size, kv_heads, dim)
    query = torch.randn(length, heads, dim)
    table = torch.randperm(40, dtype=torch.int32)[None]

    def attend(start: int, count: int, *, uniform: bool = True) -> Tensor:
        starts, lens = (torch.tensor([n], dtype=torch.int32) for n in (start, count))
        part = query[start : start + count].contiguous()
        return kernels.paged_attention(
            part, keys, values, table, starts, lens, dim**-0.5, uniform=uniform
        )

    whole = attend(0, length)
    for sizes in ([1] * length, [13] * 11 + [7], [64, 64, 22], [33, 1, 1, 115]):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        pieces = [attend(start, size) for start, size in zip(starts, sizes, strict=True)]
        assert torch.equal(torch.cat(pieces), whole)
    decoded = torch.cat([attend(i, 1, uniform=False) for i in range(length)])
    assert not torch.equal(decoded, whole)  # or the mode would be for nothing
