"""What FlashInfer's kernels compute and what they need, for those who ask without torch."""

from __future__ import annotations

from services.common.errors import StartupError

FLOAT_WORKSPACE = 256 << 20  # bytes; FlashInfer recommends 128 MiB and more for long contexts
INT_WORKSPACE = 8 << 20  # bytes; one for decode, one for prefill
WORKSPACE = FLOAT_WORKSPACE + 2 * INT_WORKSPACE
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")


def check_kernels(dtype: str, head_dim: int) -> None:
    """Raises StartupError if FlashInfer has no kernel for these."""
    if dtype not in DTYPES:
        raise StartupError(f"FlashInfer computes bfloat16 and float16, not {dtype}")
    if head_dim not in HEAD_DIMS:
        raise StartupError(
            f"FlashInfer has no kernel for head size {head_dim}, only for"
            f" {', '.join(map(str, HEAD_DIMS))}; say --attention-backend torch_reference"
        )
