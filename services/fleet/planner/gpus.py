"""GPUs by name, and the memory that the driver shows of each."""

from __future__ import annotations

# MiB that nvidia-smi shows as the total. Those are listed for which FlashInfer has kernels
# (compute capability 8.0 and later).
GPUS: dict[str, int] = {
    "a100-40": 40_960,
    "a100-80": 81_920,
    "h100": 81_559,
    "h200": 143_771,
    "b200": 183_359,
    "l4": 23_034,
    "l40s": 46_068,
    "rtx4090": 24_564,
}
# Assumed: what the driver and a CUDA context take before anything is loaded.
CONTEXT_BYTES = 640 << 20
CPU = "cpu"


def free_bytes(gpu: str) -> int:
    """What is free on a GPU before a model is loaded."""
    return (GPUS[gpu] << 20) - CONTEXT_BYTES
