"""FlashInfer's kernels on a GPU against the reference, over random batches."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_checks import TOLERANCE, attention_error
from services.worker.attention.flashinfer import Heads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("heads", [(8, 8, 64), (9, 3, 64), (16, 4, 64), (32, 8, 128), (8, 8, 128)])
def test_flashinfer_equals_the_reference(
    dtype: torch.dtype, page_size: int, heads: tuple[int, int, int]
) -> None:
    error = attention_error(Heads(*heads), dtype, page_size, torch.device("cuda", 0))
    assert error <= TOLERANCE[dtype]
