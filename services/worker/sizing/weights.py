"""Bytes of a model's weights, from its shape alone: what `models.decoder` builds, counted."""

from __future__ import annotations

from services.common.errors import StartupError
from services.worker.layers.shares import Shares
from services.worker.models.config import ModelConfig
from services.worker.sizing.choices import BYTES, Dtype
from services.worker.sizing.pool import gib


def rank_weights(shape: ModelConfig, shares: Shares, itemsize: int) -> int:
    """Bytes that one rank's weights take at `itemsize` bytes a number.

    Raises StartupError if heads or channels cannot be shared out over the ranks.
    """
    embedding = shares.padded_rows(shape.vocab_size) * shape.hidden_size
    count = embedding * (1 if shape.tied else 2) + shape.hidden_size  # the last norm
    for layer in range(shape.num_layers):
        count += 2 * shape.hidden_size + _attention(shape, shares)
        if shape.moe is not None and layer not in shape.dense_layers:
            count += _experts(shape, shares)
        else:
            count += _feed_forward(shape, shares)
    return count * itemsize


def host_weights(
    shape: ModelConfig, shares: Shares, dtype: Dtype, quantization: str, ranks: int, limit: int
) -> int:
    """Bytes of the weights of `ranks` ranks that share a machine and compute on its CPU.

    A tied LM head is packed there, as a copy. With `--quantization int8` all but the embedding
    takes 1.25 bytes a number. Raises StartupError if they are over `limit`, what the machine lets
    processes use.
    """
    itemsize = BYTES[dtype]
    embedding = shares.padded_rows(shape.vocab_size) * shape.hidden_size
    packed = rank_weights(shape, shares, 1) - embedding + (embedding if shape.tied else 0)
    each = embedding * itemsize
    each += packed * 5 // 4 if quantization == "int8" else packed * itemsize
    if each * ranks > limit:
        smaller = " or --quantization int8" if (dtype, quantization) == ("float32", "none") else ""
        kind = dtype if quantization == "none" else quantization
        raise StartupError(
            f"the weights take {gib(each * ranks)} in {kind}, and this machine lets a process use"
            f" {gib(limit)}: choose a smaller model{smaller}"
        )
    return each * ranks


def _attention(shape: ModelConfig, shares: Shares) -> int:
    heads = shares.share(shape.num_heads, "attention heads")
    _, kv_heads = shares.kv_span(shape.num_kv_heads)
    rows = (heads + 2 * kv_heads) * shape.head_dim
    count = rows * shape.hidden_size + heads * shape.head_dim * shape.hidden_size
    count += rows if shape.qkv_bias else 0
    count += shape.hidden_size if shape.output_bias else 0
    return count + (2 * shape.head_dim if shape.qk_norm else 0)


def _feed_forward(shape: ModelConfig, shares: Shares) -> int:
    size = shares.share(shape.intermediate_size, "feed-forward channels")
    bias = 2 * size + shape.hidden_size if shape.mlp_bias else 0
    return 3 * size * shape.hidden_size + bias


def _experts(shape: ModelConfig, shares: Shares) -> int:
    assert shape.moe is not None
    what = "feed-forward channels of an expert"
    size = shares.share(shape.moe.intermediate_size, what)
    router = shape.moe.num_experts * shape.hidden_size
    return router + shape.moe.num_experts * 3 * size * shape.hidden_size
