"""Experts that are computed together give what they give one by one."""

from __future__ import annotations

import torch

from services.worker.layers.parallel import Parallel
from services.worker.models.config import MoeConfig
from services.worker.models.moe import SparseMlp

HIDDEN = 32


def filled(num_experts: int, per_token: int, dtype: torch.dtype) -> SparseMlp:
    config = MoeConfig(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=48,
        normalize=True,
    )
    mlp = SparseMlp("mlp", HIDDEN, config, dtype, Parallel())
    generator = torch.Generator().manual_seed(4)
    for parameter in mlp.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) / 6
    return mlp


@torch.inference_mode()
def test_stacked_experts_equal_single_ones() -> None:
    mlp = filled(8, 3, torch.bfloat16)
    for num_tokens in (1, 2, 40):
        mlp._stacked = None
        x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
        expected = mlp(x.to(torch.bfloat16))
        mlp.stack()
        torch.testing.assert_close(mlp(x.to(torch.bfloat16)), expected, atol=2e-2, rtol=2e-2)


def test_stacked_experts_hold_their_weights_once() -> None:
    mlp = filled(4, 2, torch.bfloat16)
    mlp.stack()
    places = {p.untyped_storage().data_ptr() for p in mlp.experts.parameters()}
    assert len(places) == 2


def test_experts_of_other_types_stay_single() -> None:
    mlp = filled(4, 2, torch.float32)
    mlp.stack()
    places = {p.untyped_storage().data_ptr() for p in mlp.experts.parameters()}
    assert len(places) == 8
