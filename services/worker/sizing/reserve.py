"""What steps need of a GPU beside weights and KV, estimated from a model's shape.

The engine measures this on the GPU when it starts (`engine.cuda_memory`) and sizes its pool by
what it measured. Without a GPU it can only be counted: the tensors that are alive at once at the
widest place of a forward pass and of a draw, as `models.decoder` and `engine.sampler` make them.
What torch's allocator and CUDA add is assumed, not measured.
"""

from __future__ import annotations

from services.worker.attention.flashinfer_limits import WORKSPACE
from services.worker.config import WorkerConfig
from services.worker.layers.shares import Shares
from services.worker.models.config import ModelConfig
from services.worker.sizing.choices import BYTES, Dtype, graph_sizes, prefill_tokens
from services.worker.sizing.pool import CudaMemory, graph_bytes
from services.worker.sizing.weights import rank_weights

# Bytes a draw with top-p holds for each row and token of the vocabulary: the logits in 16 and
# in 32 bits, the drawn rows' copy of them, and what the thresholds and the noise take.
LOGIT_BYTES = 32
GRAPH_BYTES = 16 << 20  # assumed: what CUDA keeps of a captured decode step beside its tensors


def forward_bytes(shape: ModelConfig, shares: Shares, itemsize: int, tokens: int) -> int:
    """The most bytes of activations at once in a forward pass over `tokens` tokens."""
    hidden, dim = shape.hidden_size, shape.head_dim
    heads = shares.share(shape.num_heads, "attention heads")
    _, kv_heads = shares.kv_span(shape.num_kv_heads)
    rotated = (heads + kv_heads) * dim
    # Residual and normalised input; q, k and v; their normalised copy; the turned ones, halves
    # first.
    attention = 2 * hidden + rotated + kv_heads * dim + (2 + shape.qk_norm) * rotated
    widest = max(attention, 3 * hidden + _inner_width(shape, shares))
    return widest * tokens * itemsize


def _inner_width(shape: ModelConfig, shares: Shares) -> int:
    """The widest feed-forward, in numbers a token, beside the residual."""
    width = 0
    if shape.moe is None or shape.dense_layers:
        # gate and up, silu(gate), their product
        width = 4 * shares.share(shape.intermediate_size, "feed-forward channels")
    if shape.moe is not None:
        what = "feed-forward channels of an expert"
        inner = shares.share(shape.moe.intermediate_size, what)
        experts = shape.moe.experts_per_token
        # As above for each chosen expert; or gate and up, the outputs weighted and not, their sum.
        summing = experts * (2 * inner + 2 * shape.hidden_size) + shape.hidden_size
        width = max(width, experts * 4 * inner, summing)
    return width


def cuda_memory(
    config: WorkerConfig, shape: ModelConfig, shares: Shares, dtype: Dtype, free: int
) -> CudaMemory:
    """What `engine.cuda_memory` would measure on a GPU with `free` bytes, estimated.

    Raises StartupError if the model cannot be shared out over the ranks.
    """
    itemsize, rows = BYTES[dtype], config.max_running_requests
    tokens = max(prefill_tokens(config, "cuda"), rows)
    draw = rows * shape.vocab_size * LOGIT_BYTES
    return CudaMemory(
        free_before=free,
        weights=rank_weights(shape, shares, itemsize) + WORKSPACE,
        activations=forward_bytes(shape, shares, itemsize, tokens) + draw,
        graphs=_graphs(config, shape, shares, itemsize),
    )


def _graphs(config: WorkerConfig, shape: ModelConfig, shares: Shares, itemsize: int) -> int:
    if config.disable_cuda_graph:
        return 0
    sizes = graph_sizes(min(config.cuda_graph_max_batch, config.max_running_requests))
    if not sizes:
        return 0
    tensors = forward_bytes(shape, shares, itemsize, sizes[-1])
    return graph_bytes(tensors + GRAPH_BYTES, GRAPH_BYTES, len(sizes))
