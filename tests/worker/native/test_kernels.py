"""The native kernels against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.native.kernels import HEAD_DIMS, Kernels, PagedRows
from services.worker.native.packing import GROUP, PackedWeight, pack_float32, pack_int8


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = Kernels.load()
    if loaded is None:
        pytest.skip("no C++ compiler")
    return loaded


def _attend(
    kernels: Kernels,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    lens: Tensor,
    scale: float,
    *,
    uniform: bool = False,
) -> Tensor:
    """Attention to the pools of one layer; nothing is written to them."""
    nothing = torch.zeros(0, dtype=torch.int32)
    rows = PagedRows(
        keys[None], values[None], tables, starts, lens, nothing, nothing, scale, uniform
    )
    return kernels.paged_attention(query, rows, 0)


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


def _check_rows(
    kernels: Kernels,
    shapes: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    page_size: int,
) -> None:
    """Compares rows with the reference. shapes: (start, tokens) of each; heads: with the KV's."""
    num_heads, kv_heads = heads
    torch.manual_seed(page_size * 100 + num_heads)
    starts = torch.tensor([s for s, _ in shapes], dtype=torch.int32)
    lens = torch.tensor([n for _, n in shapes], dtype=torch.int32)
    width = max(-(-(s + n) // page_size) for s, n in shapes)
    num_pages = width * len(shapes)
    tables = torch.randperm(num_pages).to(torch.int32).view(len(shapes), width)
    pool = torch.randn(2, num_pages + 1, kv_heads, page_size, dim) * 2
    keys, values = pool.transpose(2, 3)  # strides other than the shape's order
    query = torch.randn(int(lens.sum()), num_heads, dim) * 2
    scale = dim**-0.5
    out = _attend(kernels, query, keys, values, tables, starts, lens, scale)
    expected = _reference(query, keys, values, tables, starts, lens, scale)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((8, 1), 16), ((4, 4), 128)])
def test_paged_attention(
    kernels: Kernels, page_size: int, heads: tuple[int, int], dim: int
) -> None:
    shapes = [(0, 1), (130, 1), (0, 33), (63, 2), (64, 1), (5, 70), (300, 1), (16, 16), (7, 64)]
    _check_rows(kernels, shapes, heads, dim, page_size)


@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((4, 1), 16), ((10, 2), 80)])
def test_few_queries_far_into_a_prompt(kernels: Kernels, heads: tuple[int, int], dim: int) -> None:
    """Their keys are cut into spans of 1,024: about the cuts, and some queries before one."""
    shapes = [(1022, 1), (1023, 1), (1024, 1), (2500, 1), (1000, 40), (2047, 2), (3000, 64)]
    _check_rows(kernels, [*shapes, (1020, 65), (5, 3)], heads, dim, page_size=16)


def test_every_head_size_has_a_kernel(kernels: Kernels) -> None:
    for dim in HEAD_DIMS:
        keys = torch.randn(2, 4, 1, dim)
        query = torch.randn(1, 2, dim)
        tables = torch.zeros(1, 1, dtype=torch.int32)
        one = torch.ones(1, dtype=torch.int32)
        out = _attend(kernels, query, keys, keys, tables, one - 1, one, 1.0)
        torch.testing.assert_close(out, keys[0, :1].expand(1, 2, dim))


def test_a_row_does_not_depend_on_its_neighbours(kernels: Kernels) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 64, 16, 3, 64)
    query = torch.randn(8, 9, 64)
    tables = torch.randperm(64).to(torch.int32).view(8, 8)
    starts = torch.tensor([0, 5, 100, 127, 64, 3, 90, 17], dtype=torch.int32)
    ones = torch.ones(8, dtype=torch.int32)
    together = _attend(kernels, query, keys, values, tables, starts, ones, 0.125)
    for row in range(8):
        alone = _attend(
            kernels,
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
    out = _attend(kernels, query, keys, values, one[None] - 1, one * 15, one, 1.0)
    torch.testing.assert_close(out[0, 0], values[0, 3, 0])


def test_kv_write(kernels: Kernels) -> None:
    torch.manual_seed(1)
    tokens, heads, kv_heads, dim, page_size = 21, 6, 2, 32, 4
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim)
    k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    where = torch.randperm(40)[:tokens]
    pages, slots = (where // page_size).to(torch.int32), (where % page_size).to(torch.int32)
    keys, values = torch.zeros(2, 10, kv_heads, page_size, dim).transpose(2, 3)
    none = pages[:0]
    rows = PagedRows(keys[None], values[None], none[None], none, none, pages, slots, 1.0)
    kernels.kv_write(k, v, rows, 0)
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
    packed = pack_float32(weight, bias)
    whole = kernels.linear(x, packed)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), expected, atol=1e-4, rtol=1e-4)
    for first, count in ((0, 1), (7, 2), (100, 5), (96, 6), (3, 200)):
        rows = slice(first, first + count)
        assert torch.equal(kernels.linear(x[rows], packed), whole[rows])


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
        return _attend(kernels, part, keys, values, table, starts, lens, dim**-0.5, uniform=uniform)

    whole = attend(0, length)
    for sizes in ([1] * length, [13] * 11 + [7], [64, 64, 22], [33, 1, 1, 115]):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        pieces = [attend(start, size) for start, size in zip(starts, sizes, strict=True)]
        assert torch.equal(torch.cat(pieces), whole)
    decoded = torch.cat([attend(i, 1, uniform=False) for i in range(length)])
    assert not torch.equal(decoded, whole)  # or the mode would be for nothing


def _plain(packed: PackedWeight) -> Tensor:
    """The weight [out, in] that eight bits stand for, in float64."""
    assert packed.scales is not None
    numbers = packed.data.transpose(1, 2).reshape(-1, packed.in_size).double()
    scale, minimum = (
        packed.scales.double().permute(2, 0, 3, 1).reshape(2, -1, packed.in_size // GROUP)
    )
    plain: Tensor = numbers * scale.repeat_interleave(GROUP, 1) + minimum.repeat_interleave(
        GROUP, 1
    )
    return plain[: packed.out_size]


def _rounded(x: Tensor) -> Tensor:
    """Activations as the eight-bit kernels see them, in float64."""
    groups = x.view(len(x), -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale.clamp(min=1e-30)).round() * scale.double()).view(x.shape)


@pytest.mark.parametrize(("in_size", "out_size"), [(32, 1), (64, 131), (576, 96)])
@pytest.mark.parametrize("narrow", [False, True])
def test_eight_bits_are_summed_exactly(
    kernels: Kernels, in_size: int, out_size: int, narrow: bool
) -> None:
    torch.manual_seed(in_size)
    weight, x = torch.randn(out_size, in_size), torch.randn(300, in_size) * 3
    bias = torch.randn(out_size)
    if narrow:  # what a block of four bits holds
        blocks = torch.randint(0, 16, (out_size, in_size // GROUP, GROUP))
        blocks[..., 0], blocks[..., 1] = 0, 15
        weight = (blocks * torch.rand(blocks.shape[:2])[..., None] - 1.5).view(out_size, in_size)
    packed = pack_int8(weight, bias)
    assert packed.narrow == narrow
    whole = kernels.linear(x, packed)
    expected = _rounded(x) @ _plain(packed).T + bias.double()
    # One activation in a few thousand lies so near the middle that it rounds the other way.
    torch.testing.assert_close(whole.double(), expected, atol=0.05 + 0.0005 * in_size, rtol=1e-4)
    assert (whole.double() - expected).abs().median() < 1e-5 * in_size
    for first, count in ((0, 1), (7, 2), (100, 5), (255, 45)):
        rows = slice(first, first + count)
        assert torch.equal(kernels.linear(x[rows], packed), whole[rows])


def test_the_largest_numbers_do_not_saturate(kernels: Kernels) -> None:
    for step, narrow in ((8, True), (1, False)):
        numbers = torch.arange(GROUP * 16).view(16, GROUP) % 121 // step * step
        numbers[:, 2:] = 120  # so that pairs of 127 * 120 are added up
        weight = numbers.float()
        weight[:, 0] = 0
        packed = pack_int8(weight)
        assert packed.narrow == narrow
        x = torch.full((4, GROUP), 127.0)
        x[1] = -127.0
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(kernels.linear(x, packed).double(), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_eight_bits_hide_nothing_that_is_no_number(kernels: Kernels, value: float) -> None:
    x = torch.ones(2, 2 * GROUP)
    x[0, 5:9] = value
    out = kernels.linear(x, pack_int8(torch.ones(16, 2 * GROUP)))
    assert not out[0].isfinite().any()
    assert out[1].isfinite().all()


def test_four_bit_blocks_lose_nothing_and_others_little() -> None:
    torch.manual_seed(5)
    blocks = torch.randint(0, 16, (48, 3, GROUP)).float()
    blocks[..., 3], blocks[..., 9] = 0, 15
    scales = (torch.rand(48, 3, 1) / 50).half().float()
    weight = (blocks * scales - (torch.rand(48, 3, 1) / 9).half().float()).view(48, -1)
    torch.testing.assert_close(_plain(pack_int8(weight)).float(), weight, atol=1e-6, rtol=1e-6)
    mixed = weight.clone()
    mixed[0] = torch.randn(96)
    packed = pack_int8(mixed)
    assert not packed.narrow
    error = (_plain(packed) - mixed.double()).abs()
    assert error[1:].max() < 1e-6  # 15 steps of eight are among the 120
    assert error[0].max() <= float(mixed[0].max() - mixed[0].min()) / 240 + 1e-6
