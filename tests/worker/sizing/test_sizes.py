"""Sizes counted from a model's shape, against the model itself and what its passes allocate."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.errors import StartupError
from services.common.model_files import resolve
from services.worker.config import WorkerConfig
from services.worker.engine.filters import DrawParams
from services.worker.engine.thresholds import draw_thresholded
from services.worker.layers.loadable import Loadable
from services.worker.layers.parallel import Parallel
from services.worker.layers.rope_config import RopeConfig
from services.worker.layers.shares import Shares
from services.worker.models import config as model_config
from services.worker.models.config import ModelConfig, MoeConfig
from services.worker.models.decoder import Decoder
from services.worker.sizing import reserve
from services.worker.sizing.pool import cuda_pages, token_bytes
from services.worker.sizing.weights import host_weights, rank_weights

GIB = 1 << 30
LLAMA = ModelConfig("llama", 512, 2, 16, 8, 32, 1792, 4001, 1e-6, RopeConfig(), tied=False)
BIASED = dataclasses.replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True, tied=True)
QWEN3 = dataclasses.replace(LLAMA, qk_norm=True, num_kv_heads=2)
WIDE = dataclasses.replace(QWEN3, hidden_size=128, num_heads=64, num_kv_heads=64)
MOE = dataclasses.replace(QWEN3, moe=MoeConfig(8, 2, 96, True), dense_layers=frozenset({1}))
SPARSE = dataclasses.replace(MOE, dense_layers=frozenset(), moe=MoeConfig(8, 4, 64, True))
SHAPES = [LLAMA, BIASED, QWEN3, WIDE, MOE, SPARSE]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_weights_are_those_that_the_model_has(shape: ModelConfig, tp: int) -> None:
    with torch.device("meta"):
        model = Decoder(shape, torch.bfloat16, torch.device("cpu"), Parallel(tp - 1, tp))
    built = sum(parameter.numel() for parameter in model.parameters()) * 2
    if shape.tied:  # until it is filled, the LM head has a parameter of its own
        built -= model.lm_head.weight.numel() * 2
    assert rank_weights(shape, Shares(tp - 1, tp), 2) == built
    assert all(isinstance(module, Loadable) for module in (model.norm, model.lm_head))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_forward_pass_takes_what_was_counted(shape: ModelConfig) -> None:
    tokens = 1024
    with torch.device("meta"), torch.inference_mode():
        model = Decoder(shape, torch.bfloat16, torch.device("cpu"), Parallel())
        model.stack_experts()
        half = torch.empty(tokens, 1, shape.head_dim // 2, dtype=torch.bfloat16)
        model._rope.angles = lambda positions, dtype: (half, half)  # type: ignore[method-assign]
        ids = torch.empty(tokens, dtype=torch.int64)
        with _PeakMemory() as memory:
            model(ids, ids, _NoAttention())
    counted = reserve.forward_bytes(shape, Shares(), 2, tokens)
    # On top come a few numbers a token: an expert's index, a row's norm.
    assert 0.97 * memory.peak <= counted <= 1.03 * memory.peak


def test_a_draw_takes_what_was_counted() -> None:
    rows, vocab = 16, 20_000

    def column(dtype: torch.dtype, value: float) -> torch.Tensor:
        return torch.full((rows, 1), value, dtype=dtype)

    params = DrawParams(
        temperature=column(torch.float32, 1.0),
        top_k=column(torch.int64, vocab),
        top_p=column(torch.float32, 0.9),
        log_min_p=column(torch.float32, float("-inf")),
        key_low=column(torch.int64, 1),
        key_high=column(torch.int64, 2),
    )
    with torch.inference_mode(), _PeakMemory() as memory:
        draw_thresholded(torch.randn(rows, vocab), params)
    logits = 2 + 4 + 4  # in 16 bits, in 32, and the drawn rows of them
    assert memory.peak / (rows * vocab) + logits - 4 >= 0.9 * reserve.LOGIT_BYTES
    assert memory.peak / (rows * vocab) + logits - 4 <= reserve.LOGIT_BYTES


def test_the_embedded_model() -> None:
    shape = model_config.read(resolve(""))
    assert rank_weights(shape, Shares(), 4) == 538_060_032  # as torch counts them
    assert token_bytes(shape, Shares(), 2) == 2 * 30 * 3 * 64 * 2
    with pytest.raises(StartupError, match=r"9 attention heads, .* --tp 2"):
        rank_weights(shape, Shares(0, 2), 4)


def test_what_is_left_of_a_gpu() -> None:
    config = WorkerConfig(max_running_requests=64)
    memory = reserve.cuda_memory(config, LLAMA, Shares(), "bfloat16", 24 * GIB)
    assert memory.graphs > 0
    without = dataclasses.replace(config, disable_cuda_graph=True)
    assert reserve.cuda_memory(without, LLAMA, Shares(), "bfloat16", 24 * GIB).graphs == 0
    per_token = token_bytes(LLAMA, Shares(), 2)
    pages = cuda_pages(config, 1 << 20, per_token, memory)
    used = memory.weights + memory.activations + memory.graphs + pages * 16 * per_token
    assert 0.89 * 24 * GIB < used <= 0.9 * 24 * GIB


class _NoAttention:
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        return torch.empty_like(q)


class _PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of new storages alive at once, those of the weights left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = {s._cdata for s in _storages((args, kwargs)) if s._cdata not in self._seen}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            key, size = storage._cdata, storage.nbytes()
            if key in inputs or key in self._seen:
                continue  # a view
            self._seen.add(key)
            self._live += size
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._drop, key, size)
        return out

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._live -= size


def _storages(tree: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def test_weights_in_eight_bits_take_a_third_of_the_memory_of_float32() -> None:
    shape = model_config.read(resolve(""))

    def size(quantization: str, limit: int = 1 << 40) -> int:
        return host_weights(shape, Shares(), "float32", quantization, 1, limit)

    table = shape.vocab_size * shape.hidden_size
    numbers = 538_060_032 // 4
    assert size("none") == 4 * (numbers + table)
    assert size("int8") == 4 * table + numbers * 5 // 4
    with pytest.raises(StartupError, match=r"in float32, .* --quantization int8"):
        size("none", limit=size("int8"))
    with pytest.raises(StartupError, match="in int8, "):
        size("int8", limit=size("int8") - 1)
